"""Page-locked memory for whoever keeps tensors of its own: one page-aligned block per request, given back by itself."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.model.streaming.backend import Backend
from kvboost_rag.model.streaming.slab import HostSlab
from kvboost_rag.once import Once

REFUSED = (
    "blocks in memory could not be page-locked: they are copied to the device from ordinary memory, several times more "
    "slowly (in containers and WSL, raise the limit of locked memory)"
)


class PageLocked:
    """Call it with a number of bytes: uint8 ``[nbytes]`` of host memory, page-locked in one of the ways of
    :class:`HostSlab`. It is unlocked, and given back, when the last tensor over it is gone. Thread-safe.

    Where page-locking is refused, the memory is ordinary, with one warning. Raises MemoryError: there is none.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._once = Once(__name__)
        self._lock = threading.RLock()  # a finalizer may run in the middle of anything
        self._held: Counter[str] = Counter()  # bytes, by the way of page-locking

    def __call__(self, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            slab = HostSlab(self._backend, [nbytes], warn=False)
        except CapacityError as error:
            raise MemoryError("out of memory") from error
        if slab.pinned == "pageable":
            self._once.warn("refused", REFUSED)
        self._count(slab, 1)
        # Tensors over this memory hold the array, and nobody else does. It goes before the memory, which the slab has.
        array = slab.blocks[0].numpy()
        weakref.finalize(array, self._count, slab, -1).atexit = False
        return torch.from_numpy(array)

    def _count(self, slab: HostSlab, sign: int) -> None:
        with self._lock:
            self._held[slab.pinned] += sign * slab.nbytes

    def held(self) -> dict[str, int]:
        """Bytes that are out now, page-locked and not."""
        with self._lock:
            pageable = self._held["pageable"]
            return {"page_locked_bytes": self._held.total() - pageable, "pageable_bytes": pageable}
