"""Blocks, compressed: what a store that compresses keeps, and what it gives back."""

from __future__ import annotations

from dataclasses import replace

from kvboost_rag.kv.block import Block, BlockHeader
from kvboost_rag.kv.memory import within_memory
from kvboost_rag.kv.packing import layout_of
from kvboost_rag.kv.quantize import Packed, pack


@within_memory()
def compress(block: Block, compression: str, *, unpack: bool = True) -> Block:
    """``block`` as a store with ``compression`` will give it back, with its compressed form in ``packed``.

    The same block comes out of memory, disk and network then: an answer does not depend on which tier had it. A block
    that was compressed before stays as it is (a second rounding would only lose more), and so does one whose values do
    not fit: its header goes on saying "none", and it is stored exact.

    ``unpack=False`` leaves ``kv`` as it was, for whoever writes ``packed`` and hands the block to nobody.

    Raises:
        MemoryError: there is not enough.
    """
    if compression == "none" or block.header.compression != "none":
        return block
    packed = pack(block.kv, compression)
    if packed is None:
        return block
    if unpack:
        return unpacked(packed, block.token_ids, block.header, block.key)
    return replace(block, header=replace(block.header, compression=compression), packed=packed)


def rounded_bytes_per_token(compression: str, layers: int, heads: int, head_dim: int) -> int:
    """About how many bytes K and V of one token take as ``"int8"`` or ``"int4"``: scales of a chunk of 256 tokens
    included."""
    tokens = 256
    return layers * layout_of(compression, heads, tokens, head_dim).layer_bytes // tokens


@within_memory()
def unpacked(packed: Packed, token_ids: tuple[int, ...], header: BlockHeader, key: str = "") -> Block:
    """The block that ``packed`` holds.

    Raises:
        BlockFormatError: shapes disagree, or the scales are not finite.
        MemoryError: there is not enough.
    """
    if header.compression != packed.compression:
        header = replace(header, compression=packed.compression)
    return Block(packed.unpack(), token_ids, header, key, packed)
