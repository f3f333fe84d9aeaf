"""Attention over a part of the keys, and the merge of parts.

A part gives its output ``o`` and ``l``, the log of the sum of exponentials of its scores. Two parts make

    l = log(exp(l1) + exp(l2)),   o = o1 * exp(l1 - l) + o2 * exp(l2 - l)

which is the attention over both, exactly; in fp32, whatever the inputs are. A row that sees nothing of a part has
``l = -inf`` there.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)

ALIGNED = 16
Kind = Literal["open", "masked", "causal"]  # all rows see all keys; a mask; row i sees keys up to i
Partial = tuple[torch.Tensor, torch.Tensor]  # o [Hkv, G, R, D], l [Hkv, G, R], both fp32


def attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    hidden: torch.Tensor | None = None,
    *,
    causal: bool = False,
) -> Partial:
    """``query [Hkv, G, R, D]`` over ``key, value [Hkv, m, D]``; ``hidden [R, m]`` (bool) masks keys per row. Rows
    without any key get zeros and ``-inf``. ``causal`` (R = m, nothing else hidden): row i sees keys up to i."""
    kind: Kind = "causal" if causal else "masked" if hidden is not None else "open"
    if _fused_is_right(query.device, query.dtype, kind):
        out, lse = _fused(query, key, value, scaling, hidden, causal)
    else:
        if causal:
            hidden = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool, device=key.device).triu_(1)
        out, lse = _eager(query, key, value, scaling, hidden)
    if hidden is not None and not causal:
        blind = hidden.all(-1)  # kernels differ in what they make of such rows
        out, lse = out.masked_fill(blind[:, None], 0.0), lse.masked_fill(blind, float("-inf"))
    return out, lse


class Merge:
    """Collects parts for rows ``[0, R)``."""

    def __init__(self, heads: int, groups: int, rows: int, dim: int, device: torch.device) -> None:
        self.out = torch.zeros(heads, groups, rows, dim, device=device)
        self.lse = torch.full((heads, groups, rows), float("-inf"), device=device)

    def add(self, part: Partial, start: int = 0) -> None:
        """Add a part that covers the rows from ``start`` on."""
        out, lse = part
        end = start + lse.shape[-1]
        old = self.lse[..., start:end]
        both = torch.logaddexp(old, lse)
        before, now = (torch.exp(x - both).nan_to_num_(0.0)[..., None] for x in (old, lse))  # -inf - -inf
        self.out[:, :, start:end].mul_(before).addcmul_(out, now)
        old.copy_(both)


def _eager(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, hidden: torch.Tensor | None
) -> Partial:
    heads, groups, rows, dim = query.shape
    folded = query.float().reshape(heads, groups * rows, dim)
    scores = (folded @ key.float().transpose(1, 2) * scaling).view(heads, groups, rows, -1)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).view(heads, groups * rows, -1)
    return (weights @ value.float()).view(heads, groups, rows, dim), lse


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    hidden: torch.Tensor | None,
    causal: bool = False,
) -> Partial:
    """torch's own kernels, which know their log-sum-exp but have no public function that returns it."""
    aten: Any = torch.ops.aten
    groups, rows = query.shape[1], query.shape[2]
    fold = hidden is None and not causal
    if fold:  # the rows of a group share their keys: one longer query
        query, key, value = query.flatten(1, 2)[None], key[None], value[None]
    else:
        key, value = (x.unsqueeze(1).expand(-1, groups, -1, -1) for x in (key, value))
    mask = None if hidden is None else _additive(hidden, query.dtype)
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
        )
    else:
        if mask is not None:
            mask = mask.expand(query.shape[0], groups, -1, -1)
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, 0.0, causal, scale=scaling
        )
        lse = lse[..., : query.shape[2]]  # padded
    if fold:
        out, lse = out[0].unflatten(1, (groups, rows)), lse[0].unflatten(1, (groups, rows))
    return out.float(), lse.float()


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[1, 1, R, m]``: minus infinity where ``hidden [R, m]``; rows begin at multiples of 16 values, as the device's
    kernel wants them."""
    rows, keys = hidden.shape
    whole = torch.zeros(rows, -(-keys // ALIGNED) * ALIGNED, dtype=dtype, device=hidden.device)
    return whole[:, :keys].masked_fill_(hidden, float("-inf"))[None, None]


@lru_cache
def _fused_is_right(device: torch.device, dtype: torch.dtype, kind: Kind = "open") -> bool:
    """Ask once per device and kind of call: those functions may change with torch's version."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = (75, 75) if kind == "causal" else (70, 187)
    shapes = ((3, rows), (keys,), (keys,))
    query, key, value = (torch.randn(2, *shape, 64, generator=generator).to(device, dtype) for shape in shapes)
    hidden = None
    if kind == "causal":
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu_(1).to(device)
    elif kind == "masked":
        hidden = torch.rand(rows, keys, generator=generator) < 0.5
        hidden[5:9, :150] = True  # nothing of the first keys, which kernels take a block at a time
        hidden = hidden.to(device)
    expected = _eager(query, key, value, 0.125, hidden)
    try:
        found = _fused(query, key, value, 0.125, None if kind == "causal" else hidden, kind == "causal")
    except (AttributeError, RuntimeError, TypeError, ValueError) as e:
        logger.info("torch's fused attention (%s) is not used over parts of the keys on %s: %s", kind, device, e)
        return False
    return all(
        torch.allclose(a, b, atol=1e-4 if dtype == torch.float32 else 2e-2)
        for a, b in zip(found, expected, strict=True)
    )
