"""Spread what the repair learns: correct the keys and values that stay stale by a regression over those that don't.

A stale key and value differ from what the prompt would have made of them, and part of the difference is a linear
function of the token's own stale key (value), the same for all chunks of this prompt. So inside the repairing forward,
per layer and head, a ridge regression from the stale to the fresh vectors of the recomputed tokens is solved in closed
form and applied to all that were not recomputed. Nothing is stored or trained, and no row is added to the forward.

The ridge keeps it from exploding on few or odd probes; only part of the estimate is applied (``strength``), because
tokens picked by attention are a biased sample; and a chunk's first tokens, whose error is of another kind and larger,
teach nothing. ``docs/log.md`` has the measurements.
"""

from __future__ import annotations

from typing import Any

import torch

from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.cache import RequestCache

EDGE = 8  # tokens at a chunk's start that teach nothing
FEWEST = 8  # recomputed tokens below which nothing is spread
RIDGE = 0.1  # of the features' mean square


class SpreadingCache(RequestCache):
    """Writes into ``base``'s buffers. Rows at ``teachers`` are recomputed by the coming forward; positions ``stale``
    are corrected, layer by layer, before that layer's attention reads them. Both ascending."""

    def __init__(
        self, base: RequestCache, rope: RopeTable, teachers: torch.Tensor, stale: torch.Tensor, strength: float
    ) -> None:
        super().__init__(base.kv, base.length)
        self.rope = rope
        self.teachers = teachers.to(base.kv.device)
        self.stale = stale.to(base.kv.device)
        self.strength = strength
        self._row_of: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> None:
        super().at(positions)
        self._row_of = torch.searchsorted(positions, self.teachers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.kv[layer_idx, 0], self.kv[layer_idx, 1]  # [Hkv, capacity, D]
        rope, teachers, stale = self.rope, self.teachers, self.stale
        old = rope.unrotate_at(keys[:, teachers].float(), teachers)
        new = rope.unrotate_at(key_states[0][:, self._row_of].float(), teachers)
        own = keys[:, stale].float()
        moved = regress(old, new - old, rope.unrotate_at(own, stale))
        keys.index_copy_(1, stale, (own + self.strength * rope.rotate_at(moved, stale)).to(keys.dtype))
        old = values[:, teachers].float()
        own = values[:, stale].float()
        moved = regress(old, value_states[0][:, self._row_of].float() - old, own)
        values.index_copy_(1, stale, (own + self.strength * moved).to(values.dtype))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def regress(known: torch.Tensor, residual: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Ridge regression per head: from ``known → residual`` (``[H, n, D]`` both) to the residuals of ``others
    [H, m, D]``. Returns ``[H, m, D]``, fp32."""
    scale = known.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
    x, y = _with_constant(known / scale), _with_constant(others / scale)
    n, features = x.shape[1:]
    gram = x.transpose(1, 2) @ x + RIDGE * n * torch.eye(features, device=x.device)
    weights: torch.Tensor = torch.linalg.solve(gram, x.transpose(1, 2) @ residual)
    return y @ weights


def _with_constant(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)
