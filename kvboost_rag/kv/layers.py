"""A block that is read one layer at a time: the first layers can be used before the last have arrived."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvboost_rag.keys import block_key
from kvboost_rag.kv.block import Block, BlockHeader


class LayeredBlock:
    """Header, token ids and shape of a block, all verified, and its layers on demand.

    Args:
        header: what the block is.
        token_ids: of its chunk.
        shape: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``.
        dtype: of K and V.
        read: gives one layer, verified.
    """

    def __init__(
        self,
        header: BlockHeader,
        token_ids: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[int], torch.Tensor],
    ) -> None:
        self.header, self.token_ids, self.shape, self.dtype = header, token_ids, shape, dtype
        self.key = block_key(header.fingerprint, header.context, token_ids, header.salt)
        self._read = read

    @classmethod
    def of(cls, block: Block) -> LayeredBlock:
        """A block that is there already."""
        kv = block.kv
        return cls(block.header, block.token_ids, tuple(kv.shape), kv.dtype, lambda index: kv[index])

    @property
    def num_layers(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, all layers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def layer(self, index: int) -> torch.Tensor:
        """K (without rotation) and V of one layer, ``[2, num_kv_heads, num_tokens, head_dim]``; never write into it.

        Raises:
            IndexError: no such layer.
            BlockFormatError: its bytes are damaged: whoever began to use this block must do without it.
        """
        if not 0 <= index < self.num_layers:
            raise IndexError(f"layer {index} of {self.num_layers}")
        return self._read(index)
