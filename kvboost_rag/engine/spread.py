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

import torch

from kvboost_rag.kv.rope import RopeTable, turn
from kvboost_rag.model.cache import KVCache

EDGE = 8  # tokens at a chunk's start that teach nothing
FEWEST = 8  # recomputed tokens below which nothing is spread
RIDGE = 0.1  # of the features' mean square


class Spreader:
    """A reviser of caches. Rows at ``teachers`` are recomputed by the coming forward; positions ``stale`` are
    corrected, layer by layer, before that layer's attention reads them. Both ascending."""

    def __init__(
        self, rope: RopeTable, teachers: torch.Tensor, stale: torch.Tensor, strength: float, device: torch.device
    ) -> None:
        self.teachers = teachers.to(device)
        self.strength = strength
        self._stale = stale.to(device)
        self._whole = False  # everything between the first and the last stale position is corrected
        self._tables = (rope.at(self.teachers, back=True), rope.at(self._stale, back=True), rope.at(self._stale))
        self._rope = rope
        self._row_of: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        self._row_of = torch.searchsorted(positions, self.teachers)
        if not self._whole:
            self._widen(self._stale, positions)

    def _widen(self, stale: torch.Tensor, rows: torch.Tensor) -> None:
        """Work on one slice, without gathering, where all else in it is written by this forward anyway."""
        first, end = int(stale[0]), int(stale[-1]) + 1
        if stale.numel() + int(((rows >= first) & (rows < end)).sum()) == end - first:
            self._whole = True
            self._stale = torch.arange(first, end, device=stale.device)
            self._tables = (self._tables[0], self._rope.at(self._stale, back=True), self._rope.at(self._stale))

    def revise(self, cache: KVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        teachers_back = self._tables[0]
        old_keys, old_values = cache.gather(layer, self.teachers)
        old = torch.cat([turn(old_keys, teachers_back), old_values.float()])
        new = torch.cat([turn(keys[:, self._row_of], teachers_back), values[:, self._row_of].float()])
        weights, offset = regress(old, new - old)
        weights, offset = weights * self.strength, offset * self.strength
        first, end = int(self._stale[0]), int(self._stale[-1]) + 1
        for a, b, cached_keys, cached_values in cache.layer_stretches(layer, first, end, write=True):
            self._correct(a, b, cached_keys, cached_values, weights, offset)

    def _correct(
        self, a: int, b: int, keys: torch.Tensor, values: torch.Tensor, weights: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """Correct what is stale of positions ``[a, b)``, whose ``keys, values [Hkv, b - a, D]`` these are."""
        heads, (_, back, to) = keys.shape[0], self._tables
        low, high = (int(i) for i in torch.searchsorted(self._stale, torch.tensor([a, b], device=self._stale.device)))
        if low == high:
            return
        at: slice | torch.Tensor = self._stale[low:high] - a
        if self._whole:
            at = slice(max(a, int(self._stale[0])) - a, min(b, int(self._stale[-1]) + 1) - a)
        back, to = (back[0][low:high], back[1][low:high]), (to[0][low:high], to[1][low:high])
        moved = torch.baddbmm(offset[:heads], turn(keys[:, at], back), weights[:heads])
        _add(keys, at, turn(moved, to))
        _add(values, at, torch.baddbmm(offset[heads:], values[:, at].float(), weights[heads:]))


def _add(target: torch.Tensor, at: slice | torch.Tensor, shift: torch.Tensor) -> None:
    if isinstance(at, slice):
        target[:, at].add_(shift)
    else:
        target.index_copy_(1, at, (target[:, at] + shift).to(target.dtype))


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
