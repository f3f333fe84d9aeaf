"""Two buffers on the device that host memory passes through, one piece while the other is used.

A user names each piece that it sends, and sends no further ahead than there are buffers. Users may take turns without
telling each other: whoever finds another's piece in its buffer sends its own again.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvboost_rag.model.streaming.backend import Backend

SLOTS = 2
ROUND = 1 << 16  # sizes are multiples of this

Name = tuple[int, int]  # (user, number of its piece)
Parts = Sequence[tuple[int, torch.Tensor]]  # (offset in the buffer, contiguous uint8 in host memory)


@dataclass(slots=True)
class RingStats:
    """Counters since the beginning. ``late_pieces`` were sent only when they were due, because somebody else had used
    the buffer."""

    slot_bytes: int = 0  # of each buffer
    pieces: int = 0
    copies: int = 0
    bytes_carried: int = 0
    late_pieces: int = 0


class Ring:
    """Used under the model's lock. Device memory is taken when it is first needed, and kept."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.stats = backend, RingStats()
        self._users = itertools.count()
        self._slots: list[torch.Tensor] = []
        self._holds: list[Name | None] = [None] * SLOTS
        self._ready = [backend.event() for _ in range(SLOTS)]
        self._free = [backend.event() for _ in range(SLOTS)]
        self._kept: deque[tuple[Any, list[torch.Tensor]]] = deque()
        events = [*self._ready, *self._free]
        weakref.finalize(self, _settle, backend, events, self._slots, self._kept).atexit = False

    def user(self) -> int:
        """A number for somebody new."""
        return next(self._users)

    def reserve(self, nbytes: int) -> None:
        """Have buffers of ``nbytes`` or more. Raises CapacityError."""
        size = -(-nbytes // ROUND) * ROUND
        if size <= self.stats.slot_bytes:
            return
        if self._slots:
            self.close()  # the memory goes back: nothing may write there
        with torch.inference_mode(False):  # whatever mode the caller is in: they are written in others too
            self._slots += [self.backend.empty(size) for _ in range(SLOTS)]
        self.stats.slot_bytes = size
        for free in self._free:  # this memory may have been others' before, whose last use is enqueued but not over
            self.backend.record(free, "compute")

    def send(self, name: Name, parts: Parts) -> None:
        """Enqueue the copies of a piece. The sources must stay as they are until they were, see :meth:`keep`."""
        s = name[1] % SLOTS
        self.reserve(max(offset + source.numel() for offset, source in parts))  # they may have been given back
        self.backend.wait("copy", self._free[s])
        self._holds[s] = None
        try:
            for offset, source in parts:
                self.backend.copy(self._slots[s][offset : offset + source.numel()], source)
                self.stats.bytes_carried += source.numel()
        finally:  # where one fails, those before it are under way all the same
            self.backend.record(self._ready[s], "copy")
        self._holds[s] = name
        self.stats.pieces += 1
        self.stats.copies += len(parts)

    @contextmanager
    def piece(self, name: Name, parts: Parts) -> Iterator[torch.Tensor]:
        """The buffer that holds a piece, for the compute stream to read inside the ``with``. The host does not wait."""
        s = name[1] % SLOTS
        if self._holds[s] != name:
            self.send(name, parts)
            self.stats.late_pieces += 1
        self.backend.wait("compute", self._ready[s])
        self.backend.use(self._slots[s])
        try:
            yield self._slots[s]
        finally:
            self.backend.done(self._slots[s])
            self.backend.record(self._free[s], "compute")
            self._holds[s] = None

    def settle(self, name: Name) -> None:
        """The host waits for the copies of a piece that was sent."""
        self.backend.synchronize(self._ready[name[1] % SLOTS])

    def keep(self, sources: list[torch.Tensor]) -> None:
        """Hold on to host memory until every copy that was enqueued so far has happened: page-locked memory must not be
        unlocked, or given to others, before."""
        event = self.backend.event()
        self.backend.record(event, "copy")
        self._kept.append((event, sources))
        self.sweep()

    def sweep(self) -> None:
        """Let go of what was kept and is over."""
        while self._kept and self.backend.happened(self._kept[0][0]):
            self._kept.popleft()

    def close(self) -> None:
        """Wait for all copies, and give everything back. It may be used again."""
        _settle(self.backend, [*self._ready, *self._free], self._slots, self._kept)
        self._holds, self.stats.slot_bytes = [None] * SLOTS, 0


def _settle(
    backend: Backend,
    events: list[Any],
    slots: list[torch.Tensor],
    kept: deque[tuple[Any, list[torch.Tensor]]],
) -> None:
    """Give all memory back, once no copy reads or writes it any more, and no computation on whatever stream."""
    for event in events:
        backend.synchronize(event)
    slots.clear()
    kept.clear()
