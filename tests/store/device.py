"""Stand-ins for the memory of a device."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from kvboost_rag.store.device_memory import DeviceMemory


class LateMemory(DeviceMemory):
    """Copies run as late as is legal, when what they fill is lent to a reader; before that there is NaN. Knows what is
    alive, and has no more than ``nbytes``."""

    def __init__(self, nbytes: int = 1 << 40) -> None:
        super().__init__("cpu")
        self.nbytes = nbytes
        self.alive = self.peak = 0  # bytes
        self.copied = self.adopted = self.refused = 0  # blocks
        self._lock = threading.RLock()

    def own(self, source: torch.Tensor, *, adopt: bool = False) -> tuple[torch.Tensor, Any]:
        with self._lock:
            if self.alive + source.nbytes > self.nbytes:
                self.refused += 1
                raise torch.OutOfMemoryError("out of memory")
            self.alive += source.nbytes
            self.peak = max(self.peak, self.alive)
        own, _ = super().own(source, adopt=adopt)
        weakref.finalize(own, self._free, source.nbytes)
        if adopt and own.data_ptr() == source.data_ptr():
            self.adopted += 1
            return own, [None]
        self.copied += 1
        own.fill_(float("nan"))
        return own, [source.detach()]

    def lend(self, tensor: torch.Tensor, ready: Any) -> None:
        with self._lock:
            source, ready[0] = ready[0], None
            if source is not None:
                tensor.copy_(source)

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self.alive -= nbytes
