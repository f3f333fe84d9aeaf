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

from kvboost_rag.kv.rope import RopeTable, turn
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
        self.teachers = teachers.to(base.kv.device)
        self.strength = strength
        self._stale: slice | torch.Tensor = stale.to(base.kv.device)
        self._tables = (rope.at(self.teachers, back=True), rope.at(self._stale, back=True), rope.at(self._stale))
        self._rope = rope
        self._row_of: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> None:
        super().at(positions)
        self._row_of = torch.searchsorted(positions, self.teachers)
        if isinstance(self._stale, torch.Tensor):
            self._widen(self._stale, positions)

    def _widen(self, stale: torch.Tensor, rows: torch.Tensor) -> None:
        """Work on one slice, without gathering, where all else in it is written by this forward anyway."""
        first, end = int(stale[0]), int(stale[-1]) + 1
        if stale.numel() + int(((rows >= first) & (rows < end)).sum()) == end - first:
            whole = torch.arange(first, end, device=stale.device)
            self._stale = slice(first, end)
            self._tables = (self._tables[0], self._rope.at(whole, back=True), self._rope.at(whole))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.kv[layer_idx, 0], self.kv[layer_idx, 1]  # [Hkv, capacity, D]
        heads, (teachers_back, back, to) = keys.shape[0], self._tables
        old = torch.cat([turn(keys[:, self.teachers], teachers_back), values[:, self.teachers].float()])
        new_keys = turn(key_states[0][:, self._row_of], teachers_back)
        weights, offset = regress(old, torch.cat([new_keys, value_states[0][:, self._row_of].float()]) - old)
        weights, offset = weights * self.strength, offset * self.strength
        moved = torch.baddbmm(offset[:heads], turn(keys[:, self._stale], back), weights[:heads])
        self._add(keys, turn(moved, to))
        self._add(values, torch.baddbmm(offset[heads:], values[:, self._stale].float(), weights[heads:]))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _add(self, target: torch.Tensor, shift: torch.Tensor) -> None:
        if isinstance(self._stale, slice):
            target[:, self._stale].add_(shift)
        else:
            target.index_copy_(1, self._stale, (target[:, self._stale] + shift).to(target.dtype))


def regress(known: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ridge regression per head from ``known`` to ``residual`` (``[H, n, D]`` both). Returns weights ``[H, D, D]`` and
    offset ``[H, 1, D]``: a vector ``x [H, m, D]`` is expected to have the residual ``x @ weights + offset``. fp32."""
    scale = known.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
    x = torch.cat([known / scale, torch.ones_like(known[..., :1])], -1)
    n, features = x.shape[1:]
    gram = x.transpose(1, 2) @ x + RIDGE * n * torch.eye(features, device=x.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))  # half the time of an LU solve at this size
    solved: torch.Tensor = inverse @ (x.transpose(1, 2) @ residual)
    return solved[:, :-1] / scale, solved[:, -1:]
