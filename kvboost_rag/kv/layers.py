"""A block that is read one layer at a time: the first layers can be used before the last have arrived."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvboost_rag.keys import block_key
from kvboost_rag.kv.block import Block, BlockHeader


class LayeredBlock:
    """Header, token ids and shape of a block, all verified, and its layers on demand.

    Args:
        header: what the block is.
        token_ids: of its chunk.
        kv: ``[num_layers, 2, num_kv_heads, num_tokens, head_dim]``: where K and V come to lie.
        read: brings one layer there, verified; may be called for several layers at once, from several threads.
        whole: gives the block, once every layer has been read; by default it is made of the above.
    """

    def __init__(
        self,
        header: BlockHeader,
        token_ids: tuple[int, ...],
        kv: torch.Tensor,
        read: Callable[[int], None],
        whole: Callable[[], Block] | None = None,
    ) -> None:
        self.header, self.token_ids, self.kv = header, token_ids, kv
        self.key = block_key(header.fingerprint, header.context, token_ids, header.salt)
        self._read = read
        self._whole = whole or (lambda: Block(kv, token_ids, header, self.key))

    @classmethod
    def of(cls, block: Block) -> LayeredBlock:
        """A block that is there already."""
        return cls(block.header, block.token_ids, block.kv, lambda index: None, lambda: block)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.kv.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.kv.dtype

    @property
    def num_layers(self) -> int:
        return int(self.kv.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.kv.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, all layers."""
        return self.kv.numel() * self.kv.element_size()

    def layer(self, index: int) -> torch.Tensor:
        """K (without rotation) and V of one layer, ``[2, num_kv_heads, num_tokens, head_dim]``; never write into it.

        Raises:
            IndexError: no such layer.
            BlockFormatError: its bytes are damaged: whoever began to use this block must do without it.
        """
        if not 0 <= index < self.num_layers:
            raise IndexError(f"layer {index} of {self.num_layers}")
        self._read(index)
        return self.kv[index]

    def whole(self) -> Block:
        """The block. Every layer must have been read."""
        return self._whole()
