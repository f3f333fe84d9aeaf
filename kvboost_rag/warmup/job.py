"""The warm-up job: compute the blocks of many chunks and store them; can be stopped and run again at any moment.

Nothing remembers how far a job came: what is in the store is done. A rerun tokenises everything again, skips what is
there and computes the rest, so an interrupt, a kill or another machine's shard need no bookkeeping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from kvboost_rag.errors import CapacityError, UsageError
from kvboost_rag.warmup.batch import group, slots
from kvboost_rag.warmup.encoder import CANONICAL, Encoder
from kvboost_rag.warmup.ingest import STDIN, Corpus
from kvboost_rag.warmup.intake import Intake, Item
from kvboost_rag.warmup.meter import Meter
from kvboost_rag.warmup.progress import Callback, showing
from kvboost_rag.warmup.report import WarmReport
from kvboost_rag.warmup.source import InputProblem, Shard, SourceChunk

if TYPE_CHECKING:
    from kvboost_rag.kv.block import Block

__all__ = ["Encoder", "warm"]

log = logging.getLogger(__name__)

WINDOW = 256  # chunks sorted by length at a time
MAX_FAILURES_IN_ROW = 32  # then the fault lies with the machine or the store, and going on is pointless


class _Stop(Exception):
    """The job ends here, with what is done; carries the problem, if one is the cause."""


def warm(
    encoder: Encoder,
    chunks: Iterable[SourceChunk | str],
    *,
    batch_tokens: int = 2048,
    window: int = WINDOW,
    progress: bool | Callback = False,
    shard: Shard | None = None,
    should_stop: Callable[[], bool] | None = None,
    tags: Sequence[str] = (),
) -> WarmReport:
    """Compute and store the blocks of ``chunks`` (a :class:`Corpus` or any iterable) that the store lacks.

    Chunks go into one forward of at most ``batch_tokens`` token slots, packed or with others of like length (see the
    encoder); a longer chunk goes alone.
    ``shard=(i, n)`` takes the i-th of n disjoint shares, cut by the hash of the text. ``should_stop`` is asked between
    batches. ``tags`` are put onto every block, beside its document's name and its chunk's id: the store's
    ``delete_tagged`` drops blocks by any of them. (A text in several documents has one block, with the first one's.)

    An unusable chunk becomes an entry of the report's ``problems``. A forward that fails is tried again on halves.
    Ctrl-C (KeyboardInterrupt) and ``should_stop`` end the job with ``interrupted=True``, whatever is stored stays.

    Raises:
        UsageError: a bad option, a shard that does not exist, or chunks of a wrong type.
        MissingExtraError: a library that an input needs is not installed.
        StoreError: the store cannot be used at all.
    """
    if batch_tokens < 1 or window < 1:
        raise UsageError("batch_tokens and window must be at least 1", hint="the defaults are 2048 and 256")
    if isinstance(chunks, str):
        raise UsageError("warm takes an iterable of texts, got one str", hint="pass [text]")
    with showing(progress) as callback:
        job = _Job(encoder, chunks, batch_tokens, Intake(encoder, shard), callback, should_stop, tuple(tags))
        return job.run(window)


class _Job:
    def __init__(
        self,
        encoder: Encoder,
        chunks: Iterable[SourceChunk | str],
        batch_tokens: int,
        intake: Intake,
        callback: Callback | None,
        should_stop: Callable[[], bool] | None,
        tags: tuple[str, ...],
    ) -> None:
        self.encoder, self.chunks, self.intake, self.tags = encoder, chunks, intake, tags
        self.batch_tokens = min(batch_tokens, encoder.max_batch_tokens or batch_tokens)  # falls when memory runs out
        self.should_stop = should_stop or (lambda: False)
        self.report = WarmReport()
        self.problems: list[InputProblem] = []
        self.unwritten = 0
        self.failures_in_row = 0
        self.meter = Meter(chunks, self.report, callback)

    def run(self, window: int) -> WarmReport:
        started = time.perf_counter()
        evicted_before = self.encoder.store.stats().evictions
        items = self.intake.items(self.meter.counted(self.chunks))
        try:
            while batch := list(islice(items, window)):
                self._window(batch)
        except KeyboardInterrupt:
            self.report.interrupted = True
        except _Stop as stop:
            self.report.interrupted = not stop.args
            self.problems += stop.args
        self.report.seconds = time.perf_counter() - started
        self._finish(self.encoder.store.stats().evictions - evicted_before)
        return self.report

    def _finish(self, evicted: int) -> None:
        self.report.failed += self.intake.failed
        if isinstance(self.chunks, Corpus):
            self.report.problems += self.chunks.problems
            self.report.ignored = dict(self.chunks.ignored)
        self.report.problems += self.intake.problems + self.problems
        if self.unwritten:
            self.report.problems.append(
                InputProblem("store", None, f"{self.unwritten} blocks not written, see the store's warning")
            )
        if evicted > 0:
            reason = f"{evicted} blocks made room for others: the corpus is larger than the store's limit"
            self.report.problems.append(InputProblem("store", None, reason))

    def _window(self, items: list[Item]) -> None:
        # Texts are registered even where nothing is computed: the block may be older than the anchors (a killed job).
        self.encoder.register([(item.text, item.key) for item in items if CANONICAL not in item.missing])
        todo = [item for item in items if item.missing]
        skipped = len(items) - len(todo)
        self.report.skipped += skipped
        self.meter.window(skipped + sum(len(item.missing) for item in todo), skipped)
        for context in dict.fromkeys(context for item in todo for context in item.missing):
            self._context([item for item in todo if context in item.missing], context)

    def _context(self, items: list[Item], context: str) -> None:
        """The blocks of ``items`` after one context, batch by batch."""
        batches = group([len(item.ids) for item in items], self.batch_tokens, packed=self.encoder.packs)
        pending = [[items[i] for i in batch] for batch in reversed(batches)]
        while pending:
            if self.should_stop():
                raise _Stop
            batch = pending.pop()
            # Memory may have run out since the batches were cut.
            too_large = len(batch) > 1 and self._slots(batch) > self.batch_tokens
            error = None if too_large else self._batch(batch, context)
            if len(batch) > 1 and (too_large or error):
                half = (len(batch) + 1) // 2
                pending += [batch[half:], batch[:half]]
            elif error:
                self._fail(batch[0], f"could not be computed: {error}")
                self.meter.done(1)
                self._stop_if_hopeless(error)

    def _slots(self, batch: list[Item]) -> int:
        return slots([len(item.ids) for item in batch], packed=self.encoder.packs)

    def _batch(self, batch: list[Item], context: str) -> str | None:
        """Encode and store one batch; returns what went wrong with the forward, if anything did."""
        ids, texts = [item.ids for item in batch], [item.text for item in batch]
        try:
            blocks = self.encoder.encode(ids, texts=texts, context=context, tags=self.tags)
        except Exception as exc:  # one chunk must not end a night's work; it is told as a problem
            if len(batch) > 1 and _is_out_of_memory(exc):
                self.batch_tokens = max(1, self._slots(batch) // 2)
                log.info("out of memory: batches of %d tokens from here on", self.batch_tokens)
            return f"{type(exc).__name__}: {exc}"
        self._store(batch, blocks, context)
        return None

    def _store(self, batch: list[Item], blocks: Sequence[Block], context: str) -> None:
        pairs = zip(batch, blocks, strict=True)
        written = [item for item, block in pairs if self._put(item, _tagged(block, item.chunk), context)]
        if context == CANONICAL:
            self.encoder.register([(item.text, item.key) for item in written])
        self.meter.done(len(batch))
        self._stop_if_hopeless("the store does not take blocks")

    def _put(self, item: Item, block: Block, context: str) -> bool:
        if not self.encoder.store.put(block):
            if not self.unwritten:
                log.warning(
                    "the store did not take a block (its own warning says why); such chunks are counted as failed"
                )
            self.unwritten += 1
            self._fail(item)
            return False
        self.failures_in_row = 0
        self.report.tokens += len(item.ids)
        self.report.bytes += len(item.ids) * self.encoder.bytes_per_token
        item.missing.remove(context)
        if not item.missing and not item.failed:
            self.report.stored += 1
        return True

    def _fail(self, item: Item, reason: str = "") -> None:
        if not item.failed:
            item.failed = True
            self.report.failed += 1
        if reason:
            self.problems.append(InputProblem(item.chunk.source, item.chunk.line, reason))
        self.failures_in_row += 1

    def _stop_if_hopeless(self, last: str) -> None:
        if self.failures_in_row >= MAX_FAILURES_IN_ROW:
            reason = f"stopped after {self.failures_in_row} failures in a row, the last: {last}"
            raise _Stop(InputProblem("warm-up", None, reason))


def _tagged(block: Block, chunk: SourceChunk) -> Block:
    """``block`` with its document's name and its chunk's id among its tags, so that it can be deleted by them."""
    tags = dict.fromkeys((*block.header.tags, *(tag for tag in (chunk.source, chunk.id) if tag not in ("", STDIN))))
    return replace(block, header=replace(block.header, tags=tuple(tags)))


def _is_out_of_memory(exc: Exception) -> bool:
    return isinstance(exc, (MemoryError, CapacityError)) or "out of memory" in str(exc).lower()
