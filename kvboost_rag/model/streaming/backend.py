"""What the streamer needs of a device: two queues, events between them, copies, and memory that copies run from.

The streamer is written against this alone. :class:`~kvboost_rag.model.streaming.cuda.CudaBackend` is the real one;
:class:`~kvboost_rag.model.streaming.virtual.VirtualBackend` runs the same schedule on a CPU in the worst legal order
and checks it.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

Stream = Literal["compute", "copy"]


class Backend(Protocol):
    """One device. Everything is enqueued from the thread that runs the forward."""

    device: torch.device

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised device memory: uint8 ``[nbytes]``. Raises CapacityError."""
        ...

    def register(self, block: torch.Tensor) -> bool:
        """Page-lock host memory in place; False where that is refused."""
        ...

    def unregister(self, block: torch.Tensor) -> None:
        """Undo :meth:`register`."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        """New page-locked host memory, or None where that is refused."""
        ...

    def event(self) -> Any:
        """A new event. Waiting for one that was never recorded is no wait."""
        ...

    def record(self, event: Any, stream: Stream) -> None:
        """The event happens when everything enqueued on ``stream`` so far is done."""
        ...

    def wait(self, stream: Stream, event: Any) -> None:
        """What is enqueued on ``stream`` from now on starts after ``event`` as recorded last. The host goes on."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy from host memory to the device on the copy stream. ``target``: a slot, or a part of one.
        Nothing here keeps ``source`` alive or locked until it has happened: whoever calls does."""
        ...

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy from the device to host memory on the copy stream; read ``target`` after
        :meth:`synchronize` on an event recorded behind it."""
        ...

    def synchronize(self, event: Any) -> None:
        """The host waits for ``event`` as recorded last."""
        ...

    def happened(self, event: Any) -> bool:
        """Whether ``event`` as recorded last is over (or was never recorded). Never waits."""
        ...

    def use(self, slot: torch.Tensor) -> None:
        """The compute stream reads or fills ``slot`` from here on (for checking)."""
        ...

    def done(self, slot: torch.Tensor) -> None:
        """The compute stream has enqueued its last use of ``slot`` (for checking)."""
        ...

    def seconds(self, start: Any, end: Any) -> float | None:
        """Time between two recorded events, or None while ``end`` has not happened. Never waits."""
        ...

    def measure(self, target: torch.Tensor, source: torch.Tensor) -> float | None:
        """Seconds that one copy takes (may wait; used once, while loading), or None where that means nothing."""
        ...

    def memory(self) -> tuple[int, int] | None:
        """(free, total) bytes of the device, or None where that means nothing."""
        ...
