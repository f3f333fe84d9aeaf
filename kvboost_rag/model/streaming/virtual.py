"""A stand-in device on the CPU that gives races no luck.

The compute stream runs as it is called (torch on a CPU does); copies wait in a queue and run in a legal order of
choice: as late as events allow, at once, or at random. A slot is poisoned as soon as a copy to it may begin. Vector
clocks check that each read of a slot happens after the copy that filled it, and each copy to it after every read of
what it replaces: a wait that is missing is found even where the data came out right.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.model.streaming.backend import Stream

POISON = 0xFF  # bytes of NaN in every float format, -1 in integers


class RaceError(AssertionError):
    """Two uses of a slot that no event orders."""


@dataclass(slots=True, eq=False)
class VirtualEvent:
    """``clock`` is what its stream had seen when it was recorded; ``ticket`` its place in the copy queue."""

    clock: dict[str, int] | None = None
    ticket: int = -1
    at: float | None = None


@dataclass(slots=True)
class _Slot:
    written: int = 0  # on the copy stream's clock
    read: int = 0  # on the compute stream's clock
    fetched: int = 0  # on the copy stream's clock: a copy to the host reads it
    open: bool = False


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """Contiguous host memory that nobody is kept from giving back."""

    address: int
    dtype: torch.dtype
    shape: torch.Size

    def tensor(self) -> torch.Tensor:
        nbytes = self.shape.numel() * self.dtype.itemsize
        raw = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(self.address), dtype=torch.uint8)
        return raw.view(self.dtype).view(self.shape)


@dataclass(slots=True)
class _Op:
    ticket: int
    target: torch.Tensor | None = None
    source: torch.Tensor | _Borrowed | None = None
    event: VirtualEvent | None = None


@dataclass(slots=True)
class VirtualBackend:
    """``order``: when copies run. ``check=False`` leaves only the poison. ``limit``: bytes of device memory.
    ``lock_each`` and ``lock_total``: bytes that one page-locking, and all together, may take; ``lock_new``: whether new
    pinned memory is given. A copy from page-locked memory does not keep it alive: one that still waits when the memory
    is unlocked is noted in ``races``. It is used under a lock, as the streamer; but for page-locking."""

    order: Literal["late", "early", "random"] = "late"
    seed: int = 0
    check: bool = True
    limit: int | None = None
    lock_each: int | None = None
    lock_total: int | None = None
    lock_new: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    allocated: int = 0
    locked: int = 0
    races: list[str] = field(default_factory=list)  # found where raising would reach nobody: in a finalizer
    _locked: dict[int, int] = field(default_factory=dict)  # address → bytes
    _queue: deque[_Op] = field(default_factory=deque)
    _tickets: int = 0
    _done: int = 0
    _clocks: dict[str, dict[str, int]] = field(
        default_factory=lambda: {s: {"compute": 0, "copy": 0} for s in ("compute", "copy")}
    )
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    # -- memory --------------------------------------------------------------------------------------------------------

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.limit is not None and self.allocated + nbytes > self.limit:
            raise CapacityError(f"{nbytes} bytes on a virtual device of {self.limit}, {self.allocated} are taken")
        self.allocated += nbytes
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def register(self, block: torch.Tensor) -> bool:
        each = block.numel() if self.lock_each is None else self.lock_each
        total = self.locked + block.numel() if self.lock_total is None else self.lock_total
        if block.numel() > each or self.locked + block.numel() > total:
            return False
        self.locked += block.numel()
        self._locked[block.data_ptr()] = block.numel()
        return True

    def unregister(self, block: torch.Tensor) -> None:
        self.locked -= block.numel()
        start = block.data_ptr()
        stop = start + self._locked.pop(start, 0)
        for op in list(self._queue):
            if isinstance(op.source, _Borrowed) and start <= op.source.address < stop:
                op.source = op.source.tensor().clone()  # so that the process lives to tell
                self.races.append("memory is unlocked while a copy from it may still run")

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        return torch.empty(nbytes, dtype=torch.uint8) if self.lock_new else None

    def memory(self) -> tuple[int, int] | None:
        return None if self.limit is None else (self.limit - self.allocated, self.limit)

    # -- order ---------------------------------------------------------------------------------------------------------

    def event(self) -> VirtualEvent:
        return VirtualEvent()

    def record(self, event: VirtualEvent, stream: Stream) -> None:
        self._tick(stream)
        event.clock = dict(self._clocks[stream])
        event.ticket, event.at = -1, None
        if stream == "copy":
            self._enqueue(_Op(0, event=event))
        else:
            event.at = time.perf_counter()

    def wait(self, stream: Stream, event: VirtualEvent) -> None:
        if event.clock is None:
            return
        own = self._clocks[stream]
        for name, value in event.clock.items():
            own[name] = max(own[name], value)
        if stream == "compute":
            self._run_to(event.ticket)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._tick("copy")
        slot = self._slot(target)
        needed = self._clocks["compute"]["compute"] if slot.open else slot.read
        if self.check and self._clocks["copy"]["compute"] < needed:
            raise RaceError("a copy may overwrite a slot that is still being read")
        slot.written, slot.open = self._clocks["copy"]["copy"], False
        target.fill_(POISON)  # from here on the copy may have begun
        self._enqueue(_Op(0, target, self._borrowed(source)))

    def _borrowed(self, source: torch.Tensor) -> torch.Tensor | _Borrowed:
        """``source``; where it lies in page-locked memory, without keeping it alive: neither does a real device."""
        first = source.data_ptr()
        if not source.is_contiguous() or not any(a <= first < a + n for a, n in list(self._locked.items())):
            return source
        return _Borrowed(first, source.dtype, source.shape)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._tick("copy")
        slot = self._slot(source)
        if self.check and (slot.open or self._clocks["copy"]["compute"] < slot.read):
            raise RaceError("a copy to the host may begin before what it copies is complete")
        slot.fetched = self._clocks["copy"]["copy"]
        target.fill_(POISON)
        self._enqueue(_Op(0, target, source))

    def synchronize(self, event: VirtualEvent) -> None:
        self.wait("compute", event)  # what the host enqueues from here on comes after the event as well

    def happened(self, event: VirtualEvent) -> bool:
        return event.clock is None or event.at is not None

    def use(self, slot: torch.Tensor) -> None:
        self._tick("compute")
        found = self._slot(slot)
        if self.check and self._clocks["compute"]["copy"] < found.written:
            raise RaceError("a slot is read before the copy that fills it is waited for")
        if self.check and self._clocks["compute"]["copy"] < found.fetched:
            raise RaceError("a slot is written while a copy to the host still reads it")
        found.open, found.read = True, self._clocks["compute"]["compute"]

    def done(self, slot: torch.Tensor) -> None:
        self._tick("compute")
        found = self._slot(slot)
        found.open, found.read = False, self._clocks["compute"]["compute"]

    def _tick(self, stream: Stream) -> None:
        self._clocks[stream][stream] += 1

    def _slot(self, tensor: torch.Tensor) -> _Slot:
        """The slot that ``tensor`` is, or is a part of."""
        return self._slots.setdefault(tensor.untyped_storage().data_ptr(), _Slot())

    # -- the copy queue ------------------------------------------------------------------------------------------------

    def _enqueue(self, op: _Op) -> None:
        self._tickets += 1
        op.ticket = self._tickets
        if op.event is not None:
            op.event.ticket = op.ticket  # before it runs, which may be at once
        self._queue.append(op)
        if self.order == "early":
            self._run_to(self._tickets)
        elif self.order == "random":
            self._run_to(self._random.randint(self._done, self._tickets))

    def _run_to(self, ticket: int) -> None:
        while self._queue and self._queue[0].ticket <= ticket:
            op = self._queue.popleft()
            self._done = op.ticket
            if op.target is not None and op.source is not None:
                op.target.copy_(op.source.tensor() if isinstance(op.source, _Borrowed) else op.source)
            # An event that was recorded again since then belongs to its later record.
            if op.event is not None and op.event.ticket == op.ticket:
                op.event.at = time.perf_counter()

    # -- time ----------------------------------------------------------------------------------------------------------

    def seconds(self, start: VirtualEvent, end: VirtualEvent) -> float | None:
        return None if start.at is None or end.at is None else end.at - start.at

    def measure(self, target: torch.Tensor, source: torch.Tensor) -> float | None:
        return None
