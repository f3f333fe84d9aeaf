"""A tier of device memory in front of any store.

::

    look-up                     device → store below (in its own order)
    put (warm-up, a miss)       store below, and the device while there is room
    promote (after the answer)  what the request used → device, least recently used out

What is found below does not go up at once, as between other tiers: the request would wait for the copy. It lays the
block from where it was found, layer by layer where that is how blocks come, and the copy is made when the answer is
there. That is one more transfer for a block that is used again, and the first token never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from kvboost_rag.errors import CapacityError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.compress import compress
from kvboost_rag.plan.memory import gib, parse_bytes
from kvboost_rag.store.base import BlockStore
from kvboost_rag.store.device import DeviceStore
from kvboost_rag.store.device_memory import DeviceMemory
from kvboost_rag.store.null import NullStore
from kvboost_rag.store.tiered import TieredStore


class DeviceTieredStore(TieredStore):
    """``near`` in front of ``below``; both are closed with this one. Delete here: ``below`` does not know what lies in
    front of it.

    Raises:
        UsageError: there is a device tier in ``below`` already.
    """

    def __init__(self, near: DeviceStore, below: BlockStore) -> None:
        if below.device is not None:
            raise UsageError("this store has a device tier already", hint="leave store_vram= out")
        super().__init__([near, below])
        self.near, self.below = near, below
        self._deleted = near.deleted  # who shares the tier must know what others delete
        self.device = near.device

    def _spread(self, block: Block, depth: int) -> None:
        if depth == 0:
            self.below.touch(block.key)

    def put(self, block: Block) -> bool:
        """Into the store below; on the device too, if nobody has to go for it: a warm-up of a large corpus fills the
        tier once and then leaves it alone."""
        started = time.perf_counter()
        try:
            block = compress(block, self.compression)
        except MemoryError as error:
            return self._counters.unfit(error)
        kept = [self.below.put(replace(block, device_kv=None)), self.near.fill(block)]
        if any(kept):
            return self._counters.wrote(time.perf_counter() - started)
        self._counters.count("skipped_writes")
        return False

    def device_room(self, salt: str) -> int:
        return self.near.device_room(salt)

    def promote(self, blocks: Iterable[Block], since: int, used: Iterable[str] = ()) -> int:
        near = self.near
        fresh = list({block.key: block for block in blocks if not near.contains(block.key)}.values())
        most = min(near.limit_bytes, near.tenant_bytes or near.limit_bytes)
        room = most - near.taken_by(used)
        moved: list[str] = []
        for block in fresh:
            if block.nbytes > most:
                self._put_near(block)  # refused there, and said
            elif block.nbytes <= room:  # beyond, it would drive out what this request needs as well
                if not self._put_near(block):
                    break  # the device has no memory
                room -= block.nbytes
                moved.append(block.key)
        if self.deletions != since:  # after the copies: a deletion from here on finds them
            for key in moved:
                near.delete(key)
            return 0
        return len(moved)

    def _put_near(self, block: Block) -> bool:
        try:
            return self.near.put(compress(block, self.compression))  # as the store below gives it back
        except MemoryError as error:
            return self._counters.unfit(error)


def bytes_of(vram: str | int | DeviceStore | None) -> int:
    """What ``store_vram=`` asks for, in bytes; 0 for None.

    Raises:
        UsageError: it is no size.
    """
    if vram is None:
        return 0
    if isinstance(vram, DeviceStore):
        return vram.limit_bytes
    return parse_bytes(vram)


def with_device(
    vram: str | int | DeviceStore, below: BlockStore, device: torch.device, *, keep_text: bool = False
) -> BlockStore:
    """``below`` with a tier of ``vram`` bytes on ``device`` in front, see :func:`tier_for`. A :class:`DeviceStore` is
    taken as it is.

    Raises:
        UsageError: it is no size, ``device`` is no CUDA device, nothing is below, or there is such a tier already.
        CapacityError: the device has less.
    """
    nbytes = bytes_of(vram)
    if isinstance(below, NullStore):
        raise UsageError("store_vram= without a store", hint='store="memory" keeps blocks in this process')
    if isinstance(vram, DeviceStore):
        if "cpu" not in (vram.device.type, device.type) and vram.device != device:
            raise UsageError(f"the device tier lies on {vram.device}, the model on {device}", hint="the model's device")
        return DeviceTieredStore(vram, below)
    if device.type != "cuda":
        raise UsageError(
            f"store_vram= is for CUDA devices, this is {device.type}", hint="memory_bytes= is the budget of host memory"
        )
    total = torch.cuda.mem_get_info(device)[1]
    if nbytes > total:
        raise CapacityError(f"store_vram of {gib(nbytes)} on {device}, which has {gib(total)}", hint="give less")
    return DeviceTieredStore(tier_for(below, nbytes, device, keep_text=keep_text), below)


def tier_for(
    below: BlockStore, nbytes: int, device: torch.device | DeviceMemory, *, keep_text: bool = False
) -> DeviceStore:
    """A tier of ``nbytes`` in front of ``below``, under the same time to live; tenants have the same share of it."""
    found = below.quick_stats()
    share = found.tenant_bytes
    if share is not None and found.limit_bytes:
        share = max(1, nbytes * min(share, found.limit_bytes) // found.limit_bytes)
    return DeviceStore(nbytes, device, keep_text=keep_text, ttl_s=found.ttl_s, tenant_bytes=share)
