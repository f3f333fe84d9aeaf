"""How far a warm-up is: a bar on a terminal, a line every few seconds elsewhere, or the caller's own function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

PLAIN_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class WarmProgress:
    """A moment of a running warm-up. ``fraction`` (0 to 1) and ``left_s`` are None while they cannot be known."""

    chunks: int
    stored: int
    skipped: int
    failed: int
    tokens: int
    tokens_per_s: float
    fraction: float | None
    left_s: float | None

    def __str__(self) -> str:
        share = f"{self.fraction:4.0%} " if self.fraction is not None else ""
        left = f", {format_seconds(self.left_s)} left" if self.left_s is not None else ""
        failed = f", {self.failed:,} failed" if self.failed else ""
        counts = f"{self.chunks:,} chunks ({self.skipped:,} there before{failed})"
        return f"{share}{counts}, {self.tokens_per_s:,.0f} tokens/s{left}"


Callback = Callable[[WarmProgress], None]


def format_seconds(seconds: float) -> str:
    """Seconds for people: ``0.4 s``, ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


@contextmanager
def showing(progress: bool | Callback, stream: TextIO | None = None) -> Iterator[Callback | None]:
    """The function to call with each :class:`WarmProgress`: the given one, one that draws on ``stream`` (default:
    stderr), or None where ``progress`` is false."""
    if callable(progress):
        yield progress
        return
    out = stream or sys.stderr
    if not progress:
        yield None
    elif out.isatty() and (bar := _rich_bar(out)):
        with bar:
            task = bar.add_task("", total=1.0)
            yield lambda now: bar.update(task, completed=now.fraction or 0.0, description=str(now))
    else:
        yield _PlainLines(out)


def _rich_bar(out: TextIO) -> Any | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        return None
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(file=out), redirect_stdout=False)


class _PlainLines:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = time.monotonic()

    def __call__(self, now: WarmProgress) -> None:
        if time.monotonic() - self._last >= PLAIN_INTERVAL_S:
            self._last = time.monotonic()
            print(now, file=self._out, flush=True)
