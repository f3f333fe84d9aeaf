"""``kvboost-rag store``: look at a store, check it, make it smaller, empty it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvboost_rag.cli import common
from kvboost_rag.cli.values import salt_value
from kvboost_rag.errors import UsageError

if TYPE_CHECKING:
    from kvboost_rag.store.base import BlockStore, StoreStats


def open_existing(spec: str, **options: Any) -> BlockStore:
    """The store at ``spec``, with options of ``open_store``. Tests put their own in place of this function.

    Raises:
        UsageError: a folder that is not there, or is no store (one is made by the warm-up, not by looking at it).
        StoreError: it cannot be opened.
    """
    from kvboost_rag.store.disk_folder import is_store
    from kvboost_rag.store.open import open_store  # brings torch

    if "://" not in spec:
        spec = os.path.expanduser(spec)
        if not is_store(spec):
            raise UsageError(f"no store at {spec}", hint="kvboost-rag warmup makes one; --store names it")
    return open_store(spec, memory_bytes=0, **options)


@contextmanager
def _opened(spec: str, **options: Any) -> Iterator[BlockStore]:
    store = open_existing(spec, **options)
    try:
        yield store
    finally:
        store.close()


@click.group("store")
def command() -> None:
    """Look at a store, check it, make it smaller, empty it."""


@command.command()
@common.store_option
@common.salt_option
@common.json_option
def stats(store: str, salt: str | None, as_json: bool) -> None:
    """Blocks, bytes and counters; with --salt also what that tenant holds."""
    with _opened(store) as opened:
        found, usage = opened.stats(), None
        if salt is not None:
            usage = opened.tenant_usage(salt_value(salt))
    if as_json:
        common.print_json({**found.as_dict(), **({} if usage is None else {"tenant_usage": usage})})
        return
    _print_stats(found)
    if usage is not None:
        click.echo(f"this tenant: {common.format_size(usage)}")


@command.command("set")
@common.store_option
@click.option("--limit", metavar="SIZE", callback=common.parsed(common.parse_size), help="Most bytes of block files.")
@common.tenant_bytes_option
@common.compression_option
@common.policy_option
@common.ttl_option
@common.json_option
def set_(store: str, limit: int | None, ttl: float | None, as_json: bool, **given: Any) -> None:
    """Change what a folder remembers: limits hold at once, compression for what is written from now on. A process that
    has the folder open keeps what it opened it with."""
    if "://" in store:
        hint = "give them where the server is used: warmup --tenant-bytes …"
        raise UsageError("servers remember no settings", hint=hint)
    given |= {"limit_bytes": limit, "ttl_s": ttl}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise UsageError("nothing to set", hint="--limit 20GiB, --policy lfu, --compression int8, …")
    with _opened(store, **given) as opened:
        found = opened.stats()
    if as_json:
        common.print_json(found.as_dict())
    else:
        _print_stats(found)


def _print_stats(found: StoreStats, indent: str = "") -> None:
    limit = f" of {common.format_size(found.limit_bytes)}" if found.limit_bytes is not None else ""
    click.echo(f"{indent}{found.kind}: {found.blocks:,} blocks, {common.format_size(found.bytes)}{limit}")
    notes = [f"known chunks {found.known_chunks:,}", f"evictions {found.evictions:,}"]
    notes += [f"policy {found.policy}"] if found.policy else []
    notes += [f"compression {found.compression}"] if found.compression != "none" else []
    notes += [f"pinned {found.pinned:,}"] if found.pinned else []
    notes += [f"time to live {found.ttl_s:g} s"] if found.ttl_s else []
    if found.tenant_bytes:
        notes += [f"tenants {found.tenants:,}, at most {common.format_size(found.tenant_bytes)} each"]
    click.echo(f"{indent}  {', '.join(notes)}")
    for tier in found.tiers:
        _print_stats(tier, indent + "  ")


@command.command()
@common.store_option
@click.option("--fix", is_flag=True, help="Set aside what is damaged, so that it is computed anew.")
@click.option(
    "--tenant-bytes",
    metavar="SIZE",
    callback=common.parsed(common.parse_size),
    help="With --fix, of a server: make blocks that were written without this quota count.",
)
@common.json_option
def check(store: str, fix: bool, tenant_bytes: int | None, as_json: bool) -> None:
    """Read and verify everything. Exit status 1 when something is wrong, fixed or not."""
    if tenant_bytes is not None and not (fix and "://" in store):
        raise UsageError("--tenant-bytes goes with --fix and a server", hint="a folder: store set --tenant-bytes")
    with _opened(store, **({} if tenant_bytes is None else {"tenant_bytes": tenant_bytes})) as opened:
        problems = opened.check(fix=fix)
    if as_json:
        entries = [{"kind": p.kind, "where": p.where, "detail": p.detail, "fixed": p.fixed} for p in problems]
        common.print_json({"healthy": not problems, "problems": entries})
    else:
        for problem in problems:
            click.echo(f"{problem.kind}: {problem.where}: {problem.detail}{' (fixed)' if problem.fixed else ''}")
        click.echo(f"{len(problems)} problems" if problems else "healthy")
    raise click.exceptions.Exit(1 if problems else 0)


@command.command()
@common.store_option
@click.option(
    "--max-bytes",
    metavar="SIZE",
    callback=common.parsed(common.parse_size),
    help="Drop the least recently used blocks down to this, e.g. 20GiB.",
)
@click.option(
    "--older-than",
    metavar="TIME",
    callback=common.parsed(common.parse_duration),
    help="Drop blocks not used for this long, e.g. 30d.",
)
@common.json_option
def prune(store: str, max_bytes: int | None, older_than: float | None, as_json: bool) -> None:
    """Make the store smaller."""
    if max_bytes is None and older_than is None:
        raise UsageError("nothing to prune by", hint="--max-bytes 20GiB or --older-than 30d")
    with _opened(store) as opened:
        dropped = _prune(opened, max_bytes, older_than)
        left = opened.stats()
    if as_json:
        common.print_json({"dropped": dropped, "blocks": left.blocks, "bytes": left.bytes})
    else:
        click.echo(f"{dropped:,} blocks dropped, {left.blocks:,} left, {common.format_size(left.bytes)}")


def _prune(store: Any, max_bytes: int | None, older_than_s: float | None) -> int:
    method = getattr(store, "prune", None)
    if method is None:
        kind = store.stats().kind
        raise UsageError(f"a {kind} store cannot be pruned", hint="store clear, or a smaller --store-limit at warmup")
    given = {"max_bytes": max_bytes, "older_than_s": older_than_s}
    return int(method(**{name: value for name, value in given.items() if value is not None}))


@command.command()
@common.store_option
@click.option(
    "--tag",
    "tags",
    metavar="TAG",
    multiple=True,
    required=True,
    help="A document's name, as warmup was given it; a chunk's id; or a tag of warmup --tag.",
)
@common.json_option
def delete(store: str, tags: tuple[str, ...], as_json: bool) -> None:
    """Drop every block that carries a tag, and what was set aside as damaged."""
    with _opened(store) as opened:
        dropped = sum(opened.delete_tagged(tag) for tag in tags)
    if as_json:
        common.print_json({"dropped": dropped})
    else:
        click.echo(f"{dropped:,} blocks dropped")


@command.command()
@common.store_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@common.json_option
def clear(store: str, yes: bool, as_json: bool) -> None:
    """Drop every block and every known text."""
    with _opened(store) as opened:
        found = opened.stats()
        if not yes:
            click.confirm(f"drop {found.blocks:,} blocks ({common.format_size(found.bytes)})?", abort=True, err=True)
        dropped = opened.clear()
    if as_json:
        common.print_json({"dropped": dropped})
    else:
        click.echo(f"{dropped:,} blocks dropped")
