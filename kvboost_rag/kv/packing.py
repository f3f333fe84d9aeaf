"""The bytes of one layer of a compressed block: where scales and codes lie. Part of :mod:`~kvboost_rag.kv.quantize`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

COMPRESSIONS = ("none", "int8", "int4")
_BITS = {"int8": 8, "int4": 4}
_GROUP = {"int8": 0, "int4": 32}  # values along the grouped axis that share a scale; 0: all of them
_LINE = 64  # bytes; every part of a layer starts at a multiple of this


@dataclass(frozen=True, slots=True)
class Part:
    """Where K or V of one layer lies. Codes have shape ``[heads, tokens, head_dim]``."""

    params_at: int  # bytes from the layer's start; zeros, then scales, float16
    codes_at: int
    axis: int  # of [heads, tokens, head_dim]: the one that groups run along
    groups: int  # along that axis
    group: int  # values in a group; the last one may be shorter


@dataclass(frozen=True, slots=True)
class Layout:
    """The bytes of one layer of a compressed block; follows from the compression and the shape alone."""

    bits: int
    heads: int
    tokens: int
    head_dim: int
    key: Part
    value: Part
    layer_bytes: int


@lru_cache(maxsize=256)
def layout_of(compression: str, heads: int, tokens: int, head_dim: int) -> Layout:
    """How a layer of ``heads × tokens × head_dim`` is laid out under ``"int8"`` or ``"int4"``."""
    bits, shape = _BITS[compression], (heads, tokens, head_dim)
    sizes, shares = [], []
    for axis in (1, 2):
        group = min(_GROUP[compression] or shape[axis], shape[axis])
        groups = -(-shape[axis] // group)
        sizes.append(4 * groups * math.prod(shape) // shape[axis])
        shares.append((axis, groups, group))
    codes = heads * -(-tokens * head_dim * bits // 8)
    starts = [0]
    for size in (*sizes, codes, codes):
        starts.append(starts[-1] + -(-size // _LINE) * _LINE)
    key, value = (Part(starts[i], starts[2 + i], *shares[i]) for i in (0, 1))
    return Layout(bits, heads, tokens, head_dim, key, value, starts[-1])
