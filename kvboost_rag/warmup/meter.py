"""From counts to rate and time left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized

from kvboost_rag.warmup.ingest import Corpus
from kvboost_rag.warmup.progress import Callback, WarmProgress
from kvboost_rag.warmup.report import WarmReport
from kvboost_rag.warmup.source import SourceChunk


class Meter:
    """Calls ``callback`` with a :class:`WarmProgress` after every step of a job; does nothing without one.

    The input is read a window ahead of the work, so the fraction done lies between what was read before the window and
    with it. Time left is judged from the first computed batch on: what a resumed job skips at its start tells nothing.
    """

    def __init__(self, chunks: Iterable[object], report: WarmReport, callback: Callback | None) -> None:
        self._chunks, self._report, self._callback = chunks, report, callback
        self._started = time.perf_counter()
        self._read = 0
        self._low: float | None = 0.0  # fraction of the input read before the present window
        self._high: float | None = 0.0  # and with it
        self._size = self._done = 0  # of the window, in blocks
        self._origin = (0.0, self._started)  # fraction and time when computing began

    def counted(self, chunks: Iterable[SourceChunk | str]) -> Iterator[SourceChunk | str]:
        """``chunks``, counted as they are read."""
        for chunk in chunks:
            self._read += 1
            yield chunk

    def window(self, size: int, done: int) -> None:
        """A window was read that amounts to ``size`` blocks, ``done`` of which need no work."""
        if self._callback:
            self._low, self._high = self._high, self._fraction_read()
            self._size, self._done = size, 0
            self.done(done)

    def done(self, count: int) -> None:
        """``count`` more blocks of the window are dealt with."""
        if self._callback:
            self._done += count
            self._callback(self._moment(time.perf_counter()))

    def _moment(self, now: float) -> WarmProgress:
        report, fraction, left_s = self._report, None, None
        if self._low is not None and self._high is not None:
            fraction = self._low + (self._high - self._low) * self._done / max(1, self._size)
            if report.tokens == 0:
                self._origin = (fraction, now)
            gained, spent = fraction - self._origin[0], now - self._origin[1]
            left_s = (1 - fraction) * spent / gained if gained > 0 else None
        return WarmProgress(
            chunks=report.chunks,
            stored=report.stored,
            skipped=report.skipped,
            failed=report.failed,
            tokens=report.tokens,
            tokens_per_s=report.tokens / max(1e-9, now - self._started),
            fraction=fraction,
            left_s=left_s,
        )

    def _fraction_read(self) -> float | None:
        if isinstance(self._chunks, Corpus):
            return self._chunks.fraction_read()
        if isinstance(self._chunks, Sized):
            return min(1.0, self._read / max(1, len(self._chunks)))
        return None
