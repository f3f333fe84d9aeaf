"""A block as a store holds it in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvboost_rag.keys import block_key
from kvboost_rag.kv.block import Block, BlockHeader
from kvboost_rag.kv.compress import unpacked
from kvboost_rag.kv.memory import within_memory
from kvboost_rag.kv.quantize import Packed
from kvboost_rag.store.base import Allocate


@dataclass(frozen=True, slots=True)
class Held:
    """A block as it lies in memory: its tensor, or its compressed form."""

    contents: torch.Tensor | Packed
    token_ids: tuple[int, ...]
    header: BlockHeader
    ready: Any = None  # on a device: what to wait for before the tensor is read

    @staticmethod
    def of(block: Block, compression: str) -> Held:
        packed = block.packed if compression != "none" else None  # else unpacked once, for fast hits
        return Held(block.kv if packed is None else packed, block.token_ids, block.header)

    @property
    def nbytes(self) -> int:
        return self.contents.nbytes

    def derived_key(self) -> str:
        return block_key(self.header.fingerprint, self.header.context, self.token_ids, self.header.salt)

    def block(self, key: str) -> Block:
        if isinstance(self.contents, Packed):
            return unpacked(self.contents, self.token_ids, self.header, key)
        return Block(self.contents, self.token_ids, self.header, key)

    @within_memory()
    def owned(self, allocate: Allocate | None) -> Held:
        """The same with memory that pins no more than its own bytes and is host memory, such as a device copies from
        fast where ``allocate`` gives it."""
        if isinstance(self.contents, Packed):
            return replace(self, contents=replace(self.contents, data=_own(self.contents.data)))
        return replace(self, contents=_own(self.contents, allocate))


def owns_its_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` keeps little more alive than its own bytes: a slice would keep the whole of what it was cut
    from, uncounted."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() <= tensor.nbytes + tensor.nbytes // 4 + 4096


def _own(tensor: torch.Tensor, allocate: Allocate | None = None) -> torch.Tensor:
    own = tensor.detach()
    if allocate is not None and not (own.is_pinned() and owns_its_memory(own)):
        return allocate(own.nbytes).view(own.dtype).view(own.shape).copy_(own)
    own = own.cpu().contiguous()
    return own if owns_its_memory(own) else own.clone()
