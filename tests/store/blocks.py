"""Small blocks to store."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import Block, BlockHeader
from kvboost_rag.kv.codec import decode_block


def make_block(
    seed: int = 0,
    *,
    tokens: int = 6,
    layers: int = 2,
    heads: int = 1,
    head_dim: int = 4,
    dtype: torch.dtype = torch.float32,
    **header: object,
) -> Block:
    """A block of random contents, the same for the same arguments. 2 layers × 1 head × 6 tokens × 4: 384 bytes."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(layers, 2, heads, tokens, head_dim, generator=generator).to(dtype)
    ids = tuple(torch.randint(0, 50_000, (tokens,), generator=generator).tolist())
    fields = {"fingerprint": "fp1:test", "context": "c0", "context_kind": "canonical", **header}
    return Block(kv, ids, BlockHeader(**fields))  # type: ignore[arg-type]


def same(found: object, block: Block) -> bool:
    """Whether ``found`` is ``block``, bit for bit (its text aside)."""
    return (
        isinstance(found, Block)
        and (found.key, found.token_ids, found.kv.dtype) == (block.key, block.token_ids, block.kv.dtype)
        and torch.equal(found.kv.view(torch.uint8), block.kv.contiguous().view(torch.uint8))
    )


def refused_cheaply(hostile: bytes) -> None:
    """These bytes are no block, and finding that out takes no more memory than they do, many times over."""
    tracemalloc.start()
    with pytest.raises(BlockFormatError):
        decode_block(hostile)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 * len(hostile) + (1 << 20)
