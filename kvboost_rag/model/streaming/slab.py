"""Host memory for streamed layers: one anonymous mapping, page-locked in place, one page-aligned block per layer.

Page-locking the mapping itself takes exactly its size. An allocator of pinned memory rounds every request up (torch's
to a power of two: a 32B model pinned tensor by tensor takes 1.8 times its size).
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Sequence
from typing import Literal

import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.model.streaming.backend import Backend

logger = logging.getLogger(__name__)

PAGE = 4096
Pinned = Literal["whole", "blocks", "torch", "pageable"]


class HostSlab:
    """Blocks of host memory (uint8) to copy from. ``pinned`` tells which way of page-locking worked.

    Tried in turn: the whole mapping; each block by itself (WSL and containers refuse large ones); torch's pinned
    allocator; none, with a warning, since copies from pageable memory are several times slower.

    Raises:
        CapacityError: the memory is not there.
    """

    def __init__(self, backend: Backend, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.pinned: Pinned = "pageable"
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // PAGE) * PAGE
        self.nbytes = total
        self.blocks: list[torch.Tensor] = []
        if not total:
            return
        try:
            whole = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8)
        except (OSError, ValueError, OverflowError) as e:
            raise CapacityError(f"{total / 2**30:.2f} GiB of host memory are not there: {e}") from e
        self.blocks = [whole[a : a + n] for a, n in zip(starts, self.sizes, strict=True)]
        self._pin(backend, whole)

    def _pin(self, backend: Backend, whole: torch.Tensor) -> None:
        if backend.register(whole):
            self.pinned = "whole"
            self._locked(backend, [whole])
        elif _register_all(backend, self.blocks):
            self.pinned = "blocks"
            self._locked(backend, self.blocks)
        elif (fresh := _pinned_all(backend, self.sizes)) is not None:
            self.pinned, self.blocks = "torch", fresh
        else:
            logger.warning(
                "host memory could not be page-locked: %.2f GiB are copied from pageable memory, several "
                "times more slowly (in containers and WSL, raise the limit of locked memory)",
                self.nbytes / 2**30,
            )

    def _locked(self, backend: Backend, blocks: list[torch.Tensor]) -> None:
        """Unlock before the memory goes back."""
        self._finalizer = weakref.finalize(self, _unregister_all, backend, list(blocks))


def _register_all(backend: Backend, blocks: Sequence[torch.Tensor]) -> bool:
    locked: list[torch.Tensor] = []
    for block in blocks:
        if not backend.register(block):
            _unregister_all(backend, locked)
            return False
        locked.append(block)
    return True


def _unregister_all(backend: Backend, blocks: Sequence[torch.Tensor]) -> None:
    for block in blocks:
        backend.unregister(block)


def _pinned_all(backend: Backend, sizes: Sequence[int]) -> list[torch.Tensor] | None:
    blocks = []
    for size in sizes:
        block = backend.pinned(size)
        if block is None:
            return None
        blocks.append(block)
    return blocks
