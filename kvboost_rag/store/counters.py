"""What every store needs around its own medium: counting, one warning per cause, and what may enter at all."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from typing import TypeVar

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.compress import compress
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.once import Once
from kvboost_rag.store.base import LATENCY_BOUNDS_S, REASONS, Miss, StoreStats

T = TypeVar("T", bound=Block | LayeredBlock)


class Counters:
    """Counters of one store since it was opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._seconds = {"read": 0.0, "write": 0.0}
        self._read_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._once = Once("kvboost_rag.store")

    def count(self, name: str, amount: int = 1) -> None:
        """Add to ``hits``, ``writes``, ``skipped_writes`` or ``evictions``."""
        with self._lock:
            self._counts[name] += amount

    def result(self, found: T | Miss, seconds: float = 0.0) -> T | Miss:
        """Count what a look-up led to, and pass it on."""
        with self._lock:
            if isinstance(found, Miss):
                assert found.reason in REASONS, found.reason
                self._misses[found.reason] += 1
            else:
                self._counts["hits"] += 1
                self._counts["read_bytes"] += found.nbytes
                self._seconds["read"] += seconds
                self._read_counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        return found

    def wrote(self, seconds: float) -> bool:
        """Count a write. Returns True, as ``put`` does then."""
        with self._lock:
            self._counts["writes"] += 1
            self._seconds["write"] += seconds
        return True

    def skip(self, cause: str, detail: str) -> bool:
        """Count a skipped write; warn the first time that ``cause`` is met. Returns False, as ``put`` does then."""
        self.count("skipped_writes")
        self.warn(cause, f"block not stored: {detail}; further ones are skipped silently")
        return False

    def unfit(self, error: Exception) -> bool:
        """A block that cannot be brought into the form in which it is stored: like :meth:`skip`."""
        if isinstance(error, MemoryError):
            return self.skip("memory", "out of memory")
        return self.skip("format", str(error))

    def warn(self, cause: str, message: str) -> None:
        """Log a warning once per ``cause``."""
        self._once.warn(cause, message)

    def stats(self, kind: str) -> StoreStats:
        """The counters as stats; sizes are the caller's to fill in."""
        with self._lock:
            c = self._counts
            return StoreStats(
                kind,
                hits=c["hits"],
                misses=dict(self._misses),
                writes=c["writes"],
                skipped_writes=c["skipped_writes"],
                evictions=c["evictions"],
                read_bytes=c["read_bytes"],
                read_s=self._seconds["read"],
                write_s=self._seconds["write"],
                read_counts=list(self._read_counts),
            )


def admit(block: Block, *, keep_text: bool, compression: str = "none") -> Block:
    """``block`` as it may be stored: under its true key, without its text unless that was asked for, compressed
    (in ``packed``; ``kv`` is left as it was).

    Raises:
        UsageError: ``block.key`` is not the key of its contents.
    """
    if block.key != block.derive_key():
        raise UsageError(f"block has key {block.key!r}, but its contents lead to another", hint="leave key empty")
    if not keep_text and block.header.text:
        block = replace(block, header=replace(block.header, text=""))
    return compress(block, compression, unpack=False)
