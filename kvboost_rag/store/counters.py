"""What every store needs around its own medium: counting, one warning per cause, and what may enter at all."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.store.base import REASONS, Miss, StoreStats

log = logging.getLogger("kvboost_rag.store")


class Counters:
    """Counters of one store since it was opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()

    def count(self, name: str, amount: int = 1) -> None:
        """Add to ``hits``, ``writes``, ``skipped_writes`` or ``evictions``."""
        with self._lock:
            self._counts[name] += amount

    def result(self, found: Block | Miss) -> Block | Miss:
        """Count what a look-up led to, and pass it on."""
        with self._lock:
            if isinstance(found, Miss):
                assert found.reason in REASONS, found.reason
                self._misses[found.reason] += 1
            else:
                self._counts["hits"] += 1
        return found

    def skip(self, cause: str, detail: str) -> bool:
        """Count a skipped write; warn the first time that ``cause`` is met. Returns False, as ``put`` does then."""
        self.count("skipped_writes")
        self.warn(cause, f"block not stored: {detail}; further ones are skipped silently")
        return False

    def warn(self, cause: str, message: str) -> None:
        """Log a warning once per ``cause``."""
        with self._lock:
            if cause in self._warned:
                return
            self._warned.add(cause)
        log.warning(message)

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
            )


def admit(block: Block, *, keep_text: bool) -> Block:
    """``block`` as it may be stored: under its true key, and without its text unless that was asked for.

    Raises:
        UsageError: ``block.key`` is not the key of its contents.
    """
    if block.key != block.derive_key():
        raise UsageError(f"block has key {block.key!r}, but its contents lead to another", hint="leave key empty")
    if keep_text or not block.header.text:
        return block
    return replace(block, header=replace(block.header, text=""))
