"""``kvboost-rag warmup``: read a corpus, compute the blocks that the store lacks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

from kvboost_rag.cli import common
from kvboost_rag.cli.jobs import PARENT, child_arguments, run_jobs
from kvboost_rag.cli.values import text_value
from kvboost_rag.errors import UsageError
from kvboost_rag.warmup import Corpus, SplitOptions, WarmPlan, WarmReport, plan, warm
from kvboost_rag.warmup.progress import format_seconds
from kvboost_rag.warmup.source import Shard, check_shard


def parse_shard(text: str) -> Shard:
    """``"2/8"`` as ``(2, 8)``. Raises :class:`UsageError`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not match:
        raise UsageError(f"{text!r} is not a shard", hint="for example 2/8, the second of eight")
    shard = (int(match[1]), int(match[2]))
    check_shard(shard)
    return shard


@click.command("warmup")
@click.argument("paths", nargs=-1, metavar="PATH…")
@click.option(
    "--llama-index",
    type=click.Path(exists=True),
    metavar="STORAGE_DIR",
    help="Instead of PATH: the nodes of a persisted LlamaIndex storage context.",
)
@common.engine_options
@click.option("--keep-text", is_flag=True, help="Keep the chunks' text in the store.")
@click.option("--head", metavar="TEXT|@FILE", help="System prompt: also store blocks that are exact right after it.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Put onto every new block, for store delete --tag.")
@common.corpus_options
@click.option("--skip-unknown", is_flag=True, help="Files of other kinds are no problem, only counted.")
@click.option("--batch-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens per forward.")
@click.option(
    "--shard", metavar="i/n", callback=common.parsed(parse_shard), help="Only the i-th of n shares, cut by text hash."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, help="Processes, one shard each: on this machine, or with --ray."
)
@click.option("--ray", is_flag=True, help="Spread the shards over a Ray cluster (RAY_ADDRESS, or this machine).")
@click.option("--dry-run", is_flag=True, help="Only say how many chunks, tokens, bytes and about how long.")
@common.json_option
@click.option("--progress/--no-progress", default=True, help="Progress on stderr.")
@click.pass_context
def command(ctx: click.Context, /, paths: tuple[str, ...], **params: Any) -> None:
    """Compute and store the KV blocks of every chunk below PATH….

    PATH is a folder, a .txt, .md, .html, .pdf or .jsonl file ({"text": …} per line, ready chunks), or - for stdin. What
    the store has is skipped, so a stopped run is continued by running it again, and several machines can share a corpus
    with --shard. Exit status 1 if some inputs were bad; they are listed at the end.

    \b
    kvboost-rag warmup docs/ --store ~/kv --dry-run
    kvboost-rag warmup docs/ --store ~/kv --chunk-size 800 --chunk-overlap 80
    kvboost-rag warmup chunks.jsonl --store /mnt/kv --shard 2/8 --json
    kvboost-rag warmup /mnt/docs --store redis://cache/0 --ray
    kvboost-rag warmup --llama-index storage/ --store ~/kv
    """
    options = common.EngineOptions.take(params)
    corpus = _corpus(paths, params)
    head = text_value(params["head"])
    corpus.require_readers()
    if not params["dry_run"] and options.store in (None, "memory"):
        raise UsageError("a warm-up into a store that ends with this process is lost", hint="--store DIR")
    with _stopping_on_sigterm():
        if params["dry_run"]:
            _finish_plan(_plan(options, corpus, head, params["shard"]), params["as_json"])
        elif params["ray"] or params["jobs"] > 1:
            _check_jobs(params)
            args = child_arguments(ctx, leave_out=("jobs", "ray", "shard", "as_json", "salt"))
            secrets = {common.SALT: options.salt} if options.salt else {}
            on_ray = params["ray"]
            report = _on_ray(ctx, args, options, secrets) if on_ray else run_jobs(args, params["jobs"], secrets)
            _finish(report, params["as_json"])
        else:
            _finish(_warm(options, corpus, head, params), params["as_json"])


def _corpus(paths: tuple[str, ...], params: dict[str, Any]) -> Corpus:
    if not params["llama_index"]:
        if not paths:
            raise click.UsageError("Missing argument 'PATH…'.")
        split = SplitOptions(params["chunk_size"], params["chunk_overlap"])
        return Corpus(paths, split=split, skip_unknown=params["skip_unknown"])
    if paths:
        raise UsageError("--llama-index stands in place of PATH", hint="warm both in two runs")
    from kvboost_rag.warmup.llama_index import LlamaIndexCorpus

    return LlamaIndexCorpus(params["llama_index"])


def _check_jobs(params: dict[str, Any]) -> None:
    if params["shard"]:
        raise UsageError("--jobs and --ray make their own shards", hint="give --shard, or one of these")


def _on_ray(
    ctx: click.Context, arguments: Sequence[str], options: common.EngineOptions, secrets: dict[str, str]
) -> WarmReport:
    from kvboost_rag.cli.ray_jobs import run_on_ray

    given = ctx.get_parameter_source("jobs") is not ParameterSource.DEFAULT
    local = "://" not in (options.store or "")
    return run_on_ray(arguments, ctx.params["jobs"] if given else None, local_store=local, secrets=secrets)


def _plan(options: common.EngineOptions, corpus: Corpus, head: str | None, shard: Shard | None) -> WarmPlan:
    with common.engine_for(options) as engine:
        return plan(corpus, engine.encoder(head=head), shard=shard)


def _warm(options: common.EngineOptions, corpus: Corpus, head: str | None, params: dict[str, Any]) -> WarmReport:
    with common.engine_for(options) as engine:
        return warm(
            engine.encoder(head=head),
            corpus,
            batch_tokens=params["batch_tokens"],
            progress=params["progress"],
            shard=params["shard"],
            should_stop=_orphaned,
            tags=params["tags"],
        )


def _is_child() -> bool:
    return PARENT in os.environ


def _orphaned() -> bool:
    """Whether this is a job of ``--jobs`` whose starter is gone (killed): then nobody waits for the result."""
    return _is_child() and os.environ[PARENT] != str(os.getppid())


@contextmanager
def _stopping_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: keep what is done, report, exit 130."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _finish_plan(found: WarmPlan, as_json: bool) -> None:
    if as_json:
        common.print_json(found.as_dict())
    else:
        time = "unknown time" if found.estimate_s is None else f"about {format_seconds(found.estimate_s)}"
        click.echo(f"{found.chunks:,} chunks, {found.already_stored:,} stored already, {found.new_chunks:,} to compute")
        click.echo(f"{found.tokens:,} tokens, {common.format_size(found.bytes)}, {time}")
    common.list_problems(found.problems, found.ignored)
    raise click.exceptions.Exit(1 if found.problems else 0)


def _finish(report: WarmReport, as_json: bool) -> None:
    if as_json:
        common.print_json(report.as_dict())
    else:
        shares = f"{report.stored:,} stored, {report.skipped:,} there before, {report.failed:,} failed"
        click.echo(f"{report.chunks:,} chunks: {shares}")
        speed = f"{format_seconds(report.seconds)}, {report.tokens_per_s:,.0f} tokens/s"
        click.echo(f"{report.tokens:,} tokens computed, {common.format_size(report.bytes)}, {speed}")
    if not _is_child():  # a job's problems are listed once, by its starter
        common.list_problems(report.problems, report.ignored)
        if report.interrupted:
            click.echo("interrupted; run the same command again to continue", err=True)
    raise click.exceptions.Exit(130 if report.interrupted else 0 if report.ok else 1)
