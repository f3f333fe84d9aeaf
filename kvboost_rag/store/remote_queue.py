"""Writes that do not wait: a bounded queue of blocks with one thread behind it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvboost_rag.kv.block import Block
from kvboost_rag.kv.compress import unpacked
from kvboost_rag.once import Once
from kvboost_rag.store.remote_link import describe

DEFAULT_QUEUE_BYTES = 256 << 20
_SETTLE_S = 60.0  # most seconds that forgetting waits for a write under way


class WriteQueue:
    """Hands blocks to ``write`` one after the other, in a thread of its own.

    Args:
        write: stores a block; False if it could not. What breaks in it costs that block, with one warning.
        limit_bytes: most bytes of K and V that wait; more is refused.
    """

    def __init__(self, write: Callable[[Block], bool], limit_bytes: int = DEFAULT_QUEUE_BYTES) -> None:
        self._write = write
        self._limit = limit_bytes
        self._waiting: OrderedDict[str, Block] = OrderedDict()  # the one being written included
        self._writing: Block | None = None
        self._bytes = 0
        self._once = Once("kvboost_rag.store")
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, block: Block) -> bool:
        """Queue a block. False if there is no room."""
        with self._changed:
            if block.key in self._waiting:
                return True
            if self._closed or self._bytes + block.nbytes > self._limit:
                return False
            self._waiting[block.key] = block
            self._bytes += block.nbytes
            if self._thread is None or not self._thread.is_alive():  # also after a fork
                self._thread = threading.Thread(target=self._work, name="kvboost-write-back", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def get(self, key: str) -> Block | None:
        """A block that is still waiting, as it will come back."""
        with self._changed:
            block = self._waiting.get(key)
        if block is None or block.packed is None:
            return block
        return unpacked(block.packed, block.token_ids, block.header, key)

    def __contains__(self, key: str) -> bool:
        with self._changed:
            return key in self._waiting

    def tagged(self, tag: str) -> list[str]:
        """Keys of the waiting blocks that carry ``tag``."""
        with self._changed:
            return [key for key, block in self._waiting.items() if tag in block.header.tags]

    def drop(self, key: str, timeout_s: float = _SETTLE_S) -> bool:
        """Forget a block that is still waiting. True if it was. One that is being written is waited for: whoever
        deletes it afterwards deletes it for good."""
        with self._changed:
            dropped = self._remove(key)
            self._changed.wait_for(lambda: self._writing is None or self._writing.key != key, timeout_s)
            return dropped

    def clear(self, timeout_s: float = _SETTLE_S) -> None:
        """Forget all that is waiting; waits for what is being written."""
        with self._changed:
            for key in list(self._waiting):
                self._remove(key)
            writing = self._writing
            self._changed.wait_for(lambda: self._writing is not writing or writing is None, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written or given up. False if that took longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> int:
        """Flush and stop; the number of blocks that were not written."""
        self.flush(timeout_s)
        with self._changed:
            left = len(self._waiting)
            self._closed = True
            self.clear(0)
            self._changed.notify_all()
        return left

    def _remove(self, key: str) -> bool:
        block = self._waiting.pop(key, None)
        if block is None:
            return False
        self._bytes -= block.nbytes
        self._changed.notify_all()
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._writing = block = next(iter(self._waiting.values()))
            try:
                self._write(block)
            except Exception as error:  # full memory, a tier that breaks: the next block may go through
                self._once.warn(type(error).__name__, f"a block that waited was not stored: {describe(error)}")
            with self._changed:
                self._writing = None
                if self._waiting.get(block.key) is block:  # else dropped, and perhaps put again
                    self._remove(block.key)
                self._changed.notify_all()


class Ticker:
    """Calls ``work`` every ``period_s`` seconds, and soon after :meth:`wake`, in a thread of its own, until closed.

    Args:
        settle_s: pause between a wake-up and the call, so that a burst of wake-ups is one call.
    """

    def __init__(self, work: Callable[[], None], period_s: float, settle_s: float = 0.2) -> None:
        self._work, self._period, self._settle = work, period_s, settle_s
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvboost-refresh", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """Stop; does not wait for a call that is under way."""
        self._stop.set()
        self._wake.set()

    def _run(self) -> None:
        due = time.monotonic() + self._period
        while not self._stop.is_set():
            if self._wake.wait(max(0.0, due - time.monotonic())):
                self._stop.wait(self._settle)
            self._wake.clear()
            if self._stop.is_set():
                return
            self._work()
            due = time.monotonic() + self._period
