"""Spread what the repair learns: correct the keys and values that stay stale by a regression over those that don't.

A stale key and value differ from what the prompt would have made of them, and part of the difference can be told from
the token's own stale key (value), from where it stands, and from its chunk. So inside the repairing forward, per layer
and head, a ridge regression from the stale to the fresh vectors of the recomputed tokens is solved in closed form and
applied to all that were not recomputed. Nothing is stored or trained, and no row is added to the forward.

Tokens that were recomputed because the question attends to them are unlike those that were not: what they share is not
what the others lack, and a prompt can go wrong by it. So part of the budget is an even sample (``Repair.sample``), and
the tokens that attention picked count for less. The ridge, and the shrinking of each chunk's own share, keep it from
exploding on few or odd teachers; only part of the estimate is applied (``strength``); and a chunk's first tokens, whose
error is of another kind and larger, teach nothing. ``docs/log.md`` has the measurements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost_rag.kv.rope import RopeTable, turn
from kvboost_rag.model.cache import KVCache

EDGE = 8  # tokens at a chunk's start that teach nothing
FEWEST = 8  # recomputed tokens below which nothing is spread
RIDGE = 0.2  # of the features' mean square
PICKED = 0.3  # the weight of a token that was picked, next to 1 for one of the sample
FIRM = 8.0  # a chunk's own share of the residual counts for half where so many tokens teach it
REACH = (16.0, 64.0)  # tokens over which the influence of a chunk's start fades


@dataclass(frozen=True, slots=True)
class Lesson:
    """Who teaches, and about what: positions ``teachers [n]`` (ascending) with their ``weights [n]``, in chunks
    ``spans``."""

    spans: Sequence[tuple[int, int]]
    teachers: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], positions: Sequence[int], sampled: frozenset[int]) -> Lesson | None:
        """From the ``positions`` that are recomputed, ``sampled`` of them evenly; None where they are too few."""
        inner = {p for start, end in spans for p in range(start + EDGE, end)}
        teachers = [p for p in positions if p in inner]
        if len(teachers) < FEWEST:
            return None
        weights = [1.0 if not sampled or p in sampled else PICKED for p in teachers]
        return cls(spans, torch.tensor(teachers), torch.tensor(weights))

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Where ``positions [n]`` stand, ``[n, 4]``: in the prompt (twice: as it is, and as a logarithm), and after
        their chunk's start (twice). Zeros outside the chunks."""
        total = float(self.spans[-1][1])
        places = torch.zeros(positions.numel(), 4, device=positions.device)
        for start, end in self.spans:
            inside = (positions >= start) & (positions < end)
            at = positions[inside].float()
            near = [torch.exp((start - at) / reach) for reach in REACH]
            places[inside] = torch.stack([at / total - 0.5, torch.log1p(at) - torch.tensor(total).log1p(), *near], -1)
        return places

    def chunks(self, positions: torch.Tensor) -> torch.Tensor:
        """Which chunk ``positions [n]`` stand in: ``[n, chunks]`` of 0 and 1."""
        starts = torch.tensor([s for s, _ in self.spans], device=positions.device)
        ends = torch.tensor([e for _, e in self.spans], device=positions.device)
        return ((positions[:, None] >= starts) & (positions[:, None] < ends)).float()

    def surroundings(self, positions: torch.Tensor) -> torch.Tensor:
        """All that is known of ``positions [n]`` but their keys and values: ``[n, 4 + 1 + chunks]``."""
        ones = torch.ones(positions.numel(), 1, device=positions.device)
        return torch.cat([self.places(positions), ones, self.chunks(positions)], -1)


class Spreader:
    """A reviser of caches. The lesson's teachers are recomputed by the coming forward; positions ``stale`` (ascending)
    are corrected, layer by layer, before that layer's attention reads them. Nothing here waits for the device once the
    forward has begun: what the host must know of positions, it knows before."""

    def __init__(
        self, rope: RopeTable, lesson: Lesson, stale: torch.Tensor, strength: float, device: torch.device
    ) -> None:
        self.teachers = lesson.teachers.to(device)
        self.strength = strength
        self._lesson = lesson
        self._rope = rope
        self._device = device
        self._known = lesson.surroundings(lesson.teachers).to(device)
        self._weights = lesson.weights.to(device)
        self._back = rope.at(self.teachers, back=True)
        self._whole = False  # everything between the first and the last stale position is corrected
        self._row_of: torch.Tensor | None = None
        self._correcting(stale.cpu())

    def _correcting(self, stale: torch.Tensor) -> None:
        self._places: list[int] = stale.tolist()
        self._stale = stale.to(self._device)
        self._tables = (self._rope.at(self._stale, back=True), self._rope.at(self._stale))
        self._around = self._lesson.surroundings(stale).to(self._device)

    def at(self, positions: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        self._row_of = torch.searchsorted(positions, self.teachers)
        if not self._whole:
            self._widen(positions.cpu())

    def _widen(self, rows: torch.Tensor) -> None:
        """Work on one slice, without gathering, where all else in it is written by this forward anyway."""
        first, end = self._places[0], self._places[-1] + 1
        if len(self._places) + int(((rows >= first) & (rows < end)).sum()) == end - first:
            self._whole = True
            self._correcting(torch.arange(first, end))

    def revise(self, cache: KVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        old_keys, old_values = cache.gather(layer, self.teachers)
        old = torch.cat([turn(old_keys, self._back), old_values.float()])
        new = torch.cat([turn(keys[:, self._row_of], self._back), values[:, self._row_of].float()])
        own, around = regress(old, self._known, new - old, self._weights)
        own, around = own * self.strength, around * self.strength
        first, end = self._places[0], self._places[-1] + 1
        for a, b, cached_keys, cached_values in cache.layer_stretches(layer, first, end, write=True):
            self._correct(a, b, cached_keys, cached_values, own, around)

    def _correct(
        self, a: int, b: int, keys: torch.Tensor, values: torch.Tensor, own: torch.Tensor, around: torch.Tensor
    ) -> None:
        """Correct what is stale of positions ``[a, b)``, whose ``keys, values [Hkv, b - a, D]`` these are."""
        heads, (back, to) = keys.shape[0], self._tables
        low, high = bisect_left(self._places, a), bisect_left(self._places, b)
        if low == high:
            return
        at: slice | torch.Tensor = self._stale[low:high] - a
        if self._whole:
            at = slice(self._places[low] - a, self._places[high - 1] + 1 - a)
        back, to = (back[0][low:high], back[1][low:high]), (to[0][low:high], to[1][low:high])
        moved = torch.matmul(self._around[low:high], around)  # [2 Hkv, m, D]
        _add(keys, at, turn(torch.baddbmm(moved[:heads], turn(keys[:, at], back), own[:heads]), to))
        _add(values, at, torch.baddbmm(moved[heads:], values[:, at].float(), own[heads:]))


def _add(target: torch.Tensor, at: slice | torch.Tensor, shift: torch.Tensor) -> None:
    if isinstance(at, slice):
        target[:, at].add_(shift)
    else:
        target.index_copy_(1, at, (target[:, at] + shift).to(target.dtype))


def regress(
    own: torch.Tensor, around: torch.Tensor, residual: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted ridge regression per head from vectors ``own [H, n, D]`` and their surroundings ``around [n, 5 + C]``
    (four numbers, a one, membership of C chunks) to ``residual [H, n, D]``; of what it leaves, each chunk's mean,
    shrunk. Returns ``[H, D, D]`` and ``[H, 5 + C, D]``: a vector ``x [H, m, D]`` in surroundings ``s [m, 5 + C]`` is
    expected to have the residual ``x @ first + s @ second``. ``weights [n]``. fp32."""
    dim, fixed = own.shape[-1], 5
    scale = own.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
    x = torch.cat([own / scale, around[:, :fixed].expand(own.shape[0], -1, -1)], -1)
    weighted = (x * weights[:, None]).transpose(1, 2)
    gram = weighted @ x + RIDGE * weights.sum() * torch.eye(x.shape[-1], device=x.device)
    # Half the time of an LU solve at this size. The ridge makes it definite: no check, for which a device would be
    # waited for.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(gram).L)
    solved: torch.Tensor = inverse @ (weighted @ residual)
    members = around[:, fixed:] * weights[:, None]
    means = members.T @ (residual - x @ solved) / (members.sum(0)[:, None] + FIRM)  # [H, C, D]
    return solved[:, :dim] / scale, torch.cat([solved[:, dim:], means], 1)
