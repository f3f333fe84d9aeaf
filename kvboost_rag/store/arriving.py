"""Blocks on their way: header and token ids are here and verified, layers come in one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store.base import Miss
from kvboost_rag.store.disk_files import reason_of
from kvboost_rag.store.remote_link import Unavailable

# Told how it ended: the whole block or why there is none, and the seconds that reading took.
Ended = Callable[[Block | Miss, float], object]


class BlockLost(Exception):
    """A layer will never be there; ``miss`` says why. What was made with the layers before it must be thrown away."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(f"{miss.reason}: {miss.detail}")
        self.miss = miss


class ArrivingBlock:
    """A block that a store hands out while its layers are still on their way. Whoever takes one reads every layer, in
    order, calls :meth:`finish`, and :meth:`abandon` where it wants no more of it. Thread-safe.

    Args:
        source: the block, its layers unread.
        opened_s: seconds that it took to get as far as this.
        leave: called once, by :meth:`abandon`: reads that wait should end.
        read_s: seconds that reading took, where the time spent in ``source`` does not tell.
    """

    def __init__(
        self,
        source: LayeredBlock,
        opened_s: float = 0.0,
        *,
        leave: Callable[[], None] = lambda: None,
        read_s: Callable[[], float] | None = None,
    ) -> None:
        self._source, self._leave, self._read_s = source, leave, read_s
        self.key, self.header, self.token_ids = source.key, source.header, source.token_ids
        self.shape, self.num_tokens, self.num_layers = source.shape, source.num_tokens, source.num_layers
        self.nbytes = source.nbytes
        self._lock = threading.Lock()
        self._seconds = opened_s
        self._unread = set(range(self.num_layers))
        self._listeners: list[Ended] = []
        self._over = False
        self.whole: Block | None = None  # once :meth:`finish` gave it

    @property
    def kv(self) -> torch.Tensor:
        """``[num_layers, 2, num_kv_heads, num_tokens, head_dim]``, K without rotation. A layer holds anything before
        :meth:`read` has returned for it. Never write into it."""
        return self._source.kv

    def then(self, listener: Ended) -> ArrivingBlock:
        """Tell ``listener`` how this ends, once; nobody is told of a block that is abandoned. Returns itself."""
        self._listeners.append(listener)
        return self

    def read(self, index: int) -> None:
        """Wait until layer ``index`` is in :attr:`kv`, verified.

        Raises:
            BlockLost: it never will be; the block was set aside, if that was due.
        """
        started = time.perf_counter()
        try:
            self._source.layer(index)
        except (BlockFormatError, Unavailable, MemoryError) as error:
            miss = _miss(error)
            self._end(miss)
            raise BlockLost(miss) from error
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - started
        with self._lock:
            self._unread.discard(index)

    def finish(self) -> Block | None:
        """The whole block, once every layer was read: now it counts as a hit, and moves to faster tiers. None where it
        was lost or abandoned, and the second time."""
        with self._lock:
            if self._unread or self._over:
                return None
        self.whole = block = self._source.whole()
        self._end(block)
        return block

    def abandon(self) -> None:
        """Nobody wants the rest: reads that wait end soon. Without effect on what is whole or lost."""
        with self._lock:
            done = self._over or not self._unread
            self._over = self._over or not done
        if not done:
            self._leave()

    def _end(self, result: Block | Miss) -> None:
        with self._lock:
            over, self._over = self._over, True
            seconds = self._seconds if self._read_s is None else self._read_s()
        if not over:
            for listener in self._listeners:
                listener(result, seconds)


def _miss(error: Exception) -> Miss:
    if isinstance(error, BlockFormatError):
        return Miss(reason_of(error), str(error))
    return Miss("unavailable", str(error) if isinstance(error, Unavailable) else "out of memory")
