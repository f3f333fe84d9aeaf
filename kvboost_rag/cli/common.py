"""What the commands share: engine options, sizes and durations, lists of problems."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from kvboost_rag.cli.values import salt_value, text_value
from kvboost_rag.errors import UsageError
from kvboost_rag.warmup.source import InputProblem

DEFAULT_STORE = "~/.cache/kvboost-rag"
SALT = "KVBOOST_SALT"  # environment
F = TypeVar("F", bound=Callable[..., Any])

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(text: str) -> int:
    """Bytes of ``"20GiB"`` (powers of 1024), ``"500MB"`` (powers of 1000), ``"20G"`` (as GiB) or a plain number.

    Raises:
        UsageError: ``text`` is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{text!r} is not a size", hint="for example 20GiB, 500MB or a number of bytes")
    number, unit, tail = match.groups()
    base = 1000 if (tail or "").lower() == "b" else 1024
    return int(float(number) * base ** _POWERS[unit.lower()]) if unit else int(float(number))


def parse_duration(text: str) -> float:
    """Seconds of ``"30d"``, ``"12h"``, ``"2w"``, ``"90m"`` or a plain number.

    Raises:
        UsageError: ``text`` is no duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{text!r} is not a duration", hint="for example 30d, 12h, 90m or a number of seconds")
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1024: ``"1.5 GiB"``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A click callback that runs one of the parsers above and names the option where the value is wrong."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except UsageError as exc:
            raise click.BadParameter(str(exc), ctx=ctx, param=param) from exc

    return convert


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything that the commands hand to ``KVBoost.from_pretrained``; ``opening`` is what goes to ``open_store``
    alone."""

    model: str
    store: str | None
    dtype: str
    device: str
    revision: str | None
    filler: str | None = None
    disk_bytes: int | None = None
    keep_text: bool = False
    answers: Mapping[str, Any] = field(default_factory=dict)  # what `answer_options` of ask gave
    memory_bytes: int | None = None
    tenant_bytes: int | None = None
    compression: str | None = None
    salt: str = field(default="", repr=False)  # never shown
    opening: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def take(cls, params: dict[str, Any]) -> EngineOptions:
        """Build from click's parameters, which are removed from ``params``; reads the files of filler and salt."""
        store = params.pop("store")
        opening = {"policy": params.pop("policy"), "ttl_s": params.pop("ttl"), "local": params.pop("local")}
        opening["write"] = "back" if params.pop("write_back") else None
        filler = params.pop("filler", None)
        return cls(
            model=params.pop("model"),
            store=None if store in ("none", "off") else os.path.expanduser(store),
            dtype=params.pop("dtype"),
            device=params.pop("device"),
            revision=params.pop("revision"),
            filler=text_value(f"@{filler}") if filler else None,
            disk_bytes=params.pop("store_limit"),
            keep_text=params.pop("keep_text", False),
            answers={n: value for n in ANSWER_OPTIONS if (value := params.pop(n, None)) not in (None, False)},
            memory_bytes=params.pop("memory_limit"),
            tenant_bytes=params.pop("tenant_bytes"),
            compression=params.pop("compression"),
            salt=salt_value(params.pop("salt")),
            opening={name: value for name, value in opening.items() if value is not None},
        )

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments; what was not given is left to the engine's defaults."""
        given = {
            "revision": self.revision,
            "filler": self.filler,
            "disk_bytes": self.disk_bytes,
            "keep_text": self.keep_text or None,
            "memory_bytes": self.memory_bytes,
            "tenant_bytes": self.tenant_bytes,
            "compression": self.compression,
            "salt": self.salt or None,
        }
        rest = {name: value for name, value in given.items() if value is not None}
        return {"store": self.store, "dtype": self.dtype, "device": self.device, **rest, **self.answers}

    def opened(self) -> Any:
        """The store, opened here where it takes options that the engine has no words for; else its name."""
        if not self.opening:
            return self.store
        from kvboost_rag.store.open import open_store

        return open_store(
            self.store,
            memory_bytes=self.memory_bytes,
            limit_bytes=self.disk_bytes,
            tenant_bytes=self.tenant_bytes,
            compression=self.compression,
            keep_text=self.keep_text,
            **self.opening,
        )


def make_engine(options: EngineOptions) -> Any:
    """The engine for a command. Tests put their own in place of this function."""
    from kvboost_rag import KVBoost  # torch and transformers load here and not before

    return KVBoost.from_pretrained(options.model, **{**options.kwargs(), "store": options.opened()})


@contextmanager
def engine_for(options: EngineOptions) -> Iterator[Any]:
    """The engine, closed at the end where it can be closed."""
    # pypdf tells about every oddity of a file; what matters comes as an InputProblem.
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the bars that transformers draws while it loads weights
    engine = make_engine(options)
    try:
        yield engine
    finally:
        close = getattr(engine, "close", None)
        if close:
            close()


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several click decorators as one, in reading order."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


store_option = click.option(
    "--store",
    default=DEFAULT_STORE,
    show_default=True,
    envvar="KVBOOST_STORE",
    metavar="DIR|URL",
    help="Where blocks are kept.",
)
salt_option = click.option(
    "--salt",
    envvar=SALT,
    show_envvar=True,
    metavar="TEXT|@FILE",
    help="The tenant: texts under another salt are never found. What stands here shows in the list of processes; the "
    "environment and @FILE do not.",
)
tenant_bytes_option = click.option(
    "--tenant-bytes",
    metavar="SIZE",
    callback=parsed(parse_size),
    help="Most bytes of one tenant's blocks; 0 for no quota.  [default: as the folder remembers, or none]",
)
compression_option = click.option(
    "--compression",
    metavar="KIND",
    help="none, int8, int4, zstd (exact), int8+zstd or int4+zstd.  [default: as the folder remembers, or none]",
)
policy_option = click.option(
    "--policy", metavar="NAME", help="Who goes first when a folder is full: lru, lfu or cost.  [default: lru]"
)
ttl_option = click.option(
    "--ttl", metavar="TIME", callback=parsed(parse_duration), help="Blocks older than this are misses; 0 for no limit."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
engine_options = options(
    click.option(
        "--model", default="smollm2", show_default=True, envvar="KVBOOST_MODEL", help="Hub id, folder or .gguf file."
    ),
    store_option,
    click.option(
        "--store-limit",
        metavar="SIZE",
        callback=parsed(parse_size),
        help="Most bytes of block files in a folder.  [default: as the folder remembers, or 20GiB]",
    ),
    click.option(
        "--memory-limit",
        metavar="SIZE",
        callback=parsed(parse_size),
        help="Most bytes of blocks held in memory; 0 for none.  [default: 2GiB]",
    ),
    click.option("--write-back", is_flag=True, help="Write to folder and server in the background."),
    click.option("--local", metavar="DIR", help="With a URL: a folder here that keeps what was fetched."),
    compression_option,
    policy_option,
    ttl_option,
    salt_option,
    tenant_bytes_option,
    click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16 or auto."),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, mps or auto."),
    click.option("--revision", help="Branch, tag or commit of a hub model."),
    click.option(
        "--filler",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Neutral prose to compute chunks after, in the corpus's language. Part of every key.",
    ),
)
ANSWER_OPTIONS = ("on_low_fidelity", "cost_model", "spot_check")
corpus_options = options(
    click.option("--chunk-size", type=click.IntRange(min=1), default=1000, show_default=True, help="In characters."),
    click.option("--chunk-overlap", type=click.IntRange(min=0), default=100, show_default=True, help="In characters."),
)


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, indent=2))


def list_problems(problems: Sequence[InputProblem], ignored: Mapping[str, int]) -> None:
    """What could not be used, one line each, and what was left out on purpose, on stderr."""
    if problems:
        noun = "input" if len(problems) == 1 else "inputs"
        click.echo(f"{len(problems)} {noun} with problems:", err=True)
    for problem in problems:
        click.echo(f"  {problem}", err=True)
    if ignored:
        click.echo("ignored: " + counts(ignored.items()), err=True)


def counts(items: Iterable[tuple[str, int]]) -> str:
    """``3 × .png, 1 × .css``."""
    return ", ".join(f"{count} × {kind}" for kind, count in items)
