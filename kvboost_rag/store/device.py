"""Blocks in the memory of the device that computes: what they are put together from does not cross the bus."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

import torch

from kvboost_rag.kv.block import Block
from kvboost_rag.plan.memory import parse_bytes
from kvboost_rag.store.device_memory import DeviceMemory
from kvboost_rag.store.held import Held
from kvboost_rag.store.memory import MemoryStore
from kvboost_rag.store.tiered import Deletions


class DeviceStore(MemoryStore):
    """Blocks held on a device, least recently used out first. Those that were rounded lie there as what comes back, in
    the model's dtype: a hit takes no memory beyond the limit then, and no kernels.

    A block that the device has no memory for is not kept, whatever the limit says: ``skipped_writes`` counts it.

    Args:
        limit_bytes: most bytes of K and V held at once (also as text, ``"2GiB"``).
        device: where; a CPU (host memory) stands in for a device in tests, and so does a :class:`DeviceMemory`.
        keep_text, ttl_s, tenant_bytes: as for :class:`MemoryStore`.

    Raises:
        UsageError: an argument makes no sense.
    """

    kind = "vram"

    def __init__(
        self,
        limit_bytes: int | str,
        device: torch.device | str | DeviceMemory = "cuda",
        *,
        keep_text: bool = False,
        ttl_s: float | None = None,
        tenant_bytes: int | None = None,
    ) -> None:
        limit_bytes = limit_bytes if isinstance(limit_bytes, int) else parse_bytes(limit_bytes)
        super().__init__(limit_bytes, keep_text=keep_text, ttl_s=ttl_s, tenant_bytes=tenant_bytes)
        self._memory = device if isinstance(device, DeviceMemory) else DeviceMemory(device)
        self.device: torch.device = self._memory.device
        self.deleted = Deletions()  # through whichever store it stands in front of
        self._putting = threading.RLock()  # one block at a time: what is made room for is not taken by another

    def _take(self, block: Block, held: Held, started: float) -> bool:
        """Room first, then memory, so that the limit holds at every moment; looking up goes on meanwhile. The block can
        be found when its copy is enqueued, not before."""
        made = block.device_kv
        made = made if made is not None and made.device == self.device else None
        with self._putting:
            with self._lock:
                if block.key in self._blocks:
                    return True
                if not self._make_room(held):
                    return False
            try:
                contents, ready = self._memory.own(block.kv if made is None else made, adopt=made is not None)
            except torch.OutOfMemoryError:
                return self._counters.skip("device memory", f"out of memory on {self.device}: give store_vram= less")
            with self._lock:
                return self._insert(block.key, replace(held, contents=contents, ready=ready), started)

    def _lend(self, key: str, held: Held) -> Block:
        assert isinstance(held.contents, torch.Tensor), "nothing is packed here"
        self._memory.lend(held.contents, held.ready)
        return held.block(key)

    def taken_by(self, used: Iterable[str]) -> int:
        """Bytes of what nothing drives out: blocks that are pinned, and ``used``."""
        with self._lock:
            return self.size_of({*used, *self._pinned})

    def device_room(self, salt: str) -> int:
        with self._lock:
            room = self.limit_bytes - self._bytes
            if self.tenant_bytes is not None:
                room = min(room, self.tenant_bytes - self._held[salt])
            return max(0, room)

    def fill(self, block: Block) -> bool:
        """:meth:`put`, if nobody has to go for it. Whether the block is here."""
        with self._putting:
            if self.contains(block.key) or block.nbytes <= self.device_room(block.header.salt):
                return self.put(block)
            return False

    def close(self) -> None:
        """Give the memory back."""
        with self._putting, self._lock:
            self._drop_blocks()
