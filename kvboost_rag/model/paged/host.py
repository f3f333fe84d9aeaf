"""Host memory for spilled pages: segments of many positions at all layers, page-locked where possible, or in a file.

A segment is ``[num_layers, 2, num_kv_heads, segment_tokens, head_dim]``: one layer of it is one piece, to be
attended to by the CPU in one call, and to be copied to the device in one copy.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.model.paged.stats import PagedStats
from kvboost_rag.model.streaming.backend import Backend
from kvboost_rag.model.streaming.slab import HostSlab
from kvboost_rag.plan import KVBudget, available_host_memory
from kvboost_rag.plan.memory import gib

logger = logging.getLogger(__name__)

HEADROOM = 512 << 20  # of the machine's memory that is left alone
KEPT = 4  # free segments that are kept for the next request: page-locking is slow


class Segment:
    """``kv [num_layers, 2, num_kv_heads, segment_tokens, head_dim]`` in host memory, or mapped from a file."""

    def __init__(self, kv: torch.Tensor, slab: HostSlab | None, on_disk: bool) -> None:
        self.kv = kv
        self.on_disk = on_disk
        self._slab = slab  # keeps the memory locked

    @property
    def nbytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()


class HostMemory:
    """Gives and takes back segments of one ``shape`` within the budget of host memory."""

    def __init__(
        self, backend: Backend, shape: tuple[int, ...], dtype: torch.dtype, budget: KVBudget, stats: PagedStats
    ) -> None:
        self.backend, self.shape, self.dtype, self.budget, self.stats = backend, shape, dtype, budget, stats
        self._nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._free: list[Segment] = []

    def take(self) -> Segment:
        """A segment of memory that holds anything. Raises CapacityError: neither memory nor disk may take more."""
        if self._free:
            return self._free.pop()
        room = self._room()
        with torch.inference_mode(False):  # whatever mode the caller is in: others write here in others
            if room is None or room >= self._nbytes:
                return self._memory()
            if self.budget.disk is not None:
                return self._file(Path(self.budget.disk))
        raise CapacityError(
            f"KV beyond the device needs {gib(self.stats.host_bytes + self._nbytes)} of host memory, "
            f"{gib(self.stats.host_bytes + room)} may be taken",
            hint="a shorter request, a larger kv_vram, or KVBudget(disk=…)",
        )

    def give(self, segment: Segment) -> None:
        """Take a segment back."""
        if len(self._free) < KEPT and not segment.on_disk:
            self._free.append(segment)
        elif segment.on_disk:
            self.stats.disk_bytes -= segment.nbytes
        else:
            self.stats.host_bytes -= segment.nbytes

    def _room(self) -> int | None:
        """Bytes that may still be taken; None: unknown, so go on."""
        found = available_host_memory()
        machine = None if found is None else max(0, found - HEADROOM)
        if self.budget.host is None:
            return machine
        own = self.budget.host - self.stats.host_bytes
        return own if machine is None else min(own, machine)

    def _memory(self) -> Segment:
        slab = HostSlab(self.backend, [self._nbytes], warn=not self.stats.pinned)  # once
        self.stats.pinned = slab.pinned
        self.stats.host_bytes += self._nbytes
        return Segment(self._shaped(slab.blocks[0]), slab, on_disk=False)

    def _file(self, folder: Path) -> Segment:
        """Mapped from a file that has no name any more: nothing is left behind, whatever happens."""
        try:
            handle, name = tempfile.mkstemp(prefix="kvboost-kv-", dir=folder)
            try:
                _reserve(handle, self._nbytes)
                raw = torch.from_file(name, shared=True, size=self._nbytes, dtype=torch.uint8)
            finally:
                os.close(handle)
                os.unlink(name)
        except (OSError, RuntimeError) as e:
            raise CapacityError(f"{gib(self._nbytes)} for spilled KV could not be taken in {folder}: {e}") from e
        self.stats.disk_bytes += self._nbytes
        return Segment(self._shaped(raw), None, on_disk=True)

    def _shaped(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.view(self.dtype).view(self.shape)


def _reserve(handle: int, nbytes: int) -> None:
    """A full disk is found here, not by a bus error later (where the system can tell)."""
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is not None:
        allocate(handle, 0, nbytes)
    else:
        os.ftruncate(handle, nbytes)
