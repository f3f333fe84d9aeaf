"""Page-locked memory for whoever keeps tensors of its own: one page-aligned block per request, given back by itself."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.kv.memory import within_memory
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

    Where page-locking is refused, or there are too many mappings, the memory is ordinary, with one warning. Raises
    MemoryError: there is none.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._once = Once(__name__)
        self._lock = threading.RLock()  # a finalizer may run in the middle of anything
        self._held: Counter[str] = Counter()  # bytes, by the way of page-locking

    def __call__(self, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        slab = self._slab(nbytes)
        if slab is None or slab.pinned == "pageable":
            self._once.warn("refused", REFUSED)
        memory = _ordinary(nbytes) if slab is None else slab.blocks[0]
        way, held = ("pageable", nbytes) if slab is None else (slab.pinned, slab.nbytes)
        self._count(way, held)
        # Tensors over this memory hold the array, and nobody else does. It goes before the memory, which the slab has.
        array = memory.numpy()
        weakref.finalize(array, self._count, way, -held, slab).atexit = False
        return torch.from_numpy(array)

    def _slab(self, nbytes: int) -> HostSlab | None:
        try:
            return HostSlab(self._backend, [nbytes], warn=False)
        except CapacityError:
            return None

    def _count(self, way: str, nbytes: int, slab: HostSlab | None = None) -> None:
        """``slab``: the memory goes back once this has returned."""
        with self._lock:
            self._held[way] += nbytes

    def held(self) -> dict[str, int]:
        """Bytes that are out now, page-locked and not."""
        with self._lock:
            pageable = self._held["pageable"]
            return {"page_locked_bytes": self._held.total() - pageable, "pageable_bytes": pageable}


@within_memory()
def _ordinary(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
