"""Spread what the repair learns: correct the keys and values that stay stale by a regression over those that don't.

A stale key and value differ from what the prompt would have made of them, and part of the difference can be told from
the token's own stale key (value), from where it stands, and from its chunk. So inside the repairing forward, per layer
and head, a ridge regression from the stale to the fresh vectors of the recomputed tokens is solved in closed form and
applied to all that were not recomputed. Nothing is stored or trained, and no row is added to the forward.

Tokens that were recomputed because the question attends to them are unlike those that were not: what they share is not
what the others lack, and a prompt can go wrong by it. So part of the budget is an even sample (``Repair.sample``), and
the tokens that attention picked count for less. The ridge, and the shrinking of each chunk's own share, keep it from
exploding on few or odd teachers; only part of the estimate is applied (``strength``); and a chunk's first tokens, whose
error is of another kind and larger, teach nothing. In the upper layers a token unlike its teachers (by its leverage in
the regression: a number among prose) is corrected less: being unlike the others is what it is there for.
``docs/log.md`` has the measurements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost_rag.kv.rope import RopeTable, turn
from kvboost_rag.model.cache import KVCache

FIXED = 5  # surroundings that are the same for all prompts: four of the place, and a one
EDGE = 8  # tokens at a chunk's start that teach nothing
FEWEST = 8  # recomputed tokens below which nothing is spread
RIDGE = 0.2  # of the features' mean square
PICKED = 0.3  # the weight of a token that was picked, next to 1 for one of the sample
FIRM = 8.0  # a chunk's own share of the residual counts for half where so many tokens teach it
GUARDED_FROM = 1 / 2  # of the depth: below, correcting what is unlike its teachers does no harm
ENOUGH = 2.0  # teachers per feature from which leverage is known well enough to be squared
TEMPORARY = 16 << 20  # bytes of what is corrected at a time, in fp32; about six times as much is alive
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
        self,
        rope: RopeTable,
        lesson: Lesson,
        stale: torch.Tensor,
        strength: float,
        num_layers: int,
        device: torch.device,
    ) -> None:
        self.teachers = lesson.teachers.to(device)
        self.strength = strength
        self._lesson = lesson
        self._rope = rope
        self._device = device
        self._guarded_from = int(num_layers * GUARDED_FROM)
        self._taught = float(lesson.weights.sum())
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
        fit = regress(old, self._known, new - old, self._weights)
        trust = self._trust(fit, old) if layer >= self._guarded_from else None
        first, end = self._places[0], self._places[-1] + 1
        for a, b, cached_keys, cached_values in cache.layer_stretches(layer, first, end, write=True):
            self._correct(a, b, cached_keys, cached_values, fit, trust)

    def _trust(self, fit: Fit, teachers: torch.Tensor) -> Trust:
        """How far tokens unlike the ``teachers [2 Hkv, n, D]`` may be corrected."""
        leverage = fit.leverage(teachers, self._known)
        left_out = leverage / (1 - self._weights * leverage).clamp_min(0.02)  # as if it were not among its teachers
        usual = (left_out * self._weights).sum(1, keepdim=True) / self._taught
        power = 2.0 if self._taught >= ENOUGH * fit.inverse.shape[-1] else 1.0
        return Trust(usual, power)

    def _correct(self, a: int, b: int, keys: torch.Tensor, values: torch.Tensor, fit: Fit, trust: Trust | None) -> None:
        """Correct what is stale of positions ``[a, b)``, whose ``keys, values [Hkv, b - a, D]`` these are."""
        low, high = bisect_left(self._places, a), bisect_left(self._places, b)
        step = max(1, TEMPORARY // (2 * keys.shape[0] * keys.shape[2] * 4))
        for i in range(low, high, step):
            self._correct_rows(i, min(i + step, high), a, keys, values, fit, trust)

    def _correct_rows(
        self, low: int, high: int, a: int, keys: torch.Tensor, values: torch.Tensor, fit: Fit, trust: Trust | None
    ) -> None:
        """The same for the stale positions from number ``low`` to ``high``, where ``a`` is the position of the first
        key."""
        heads, (back, to) = keys.shape[0], self._tables
        at: slice | torch.Tensor = self._stale[low:high] - a
        if self._whole:
            at = slice(self._places[low] - a, self._places[high - 1] + 1 - a)
        back, to = (back[0][low:high], back[1][low:high]), (to[0][low:high], to[1][low:high])
        around = self._around[low:high]
        stale = torch.cat([turn(keys[:, at], back), values[:, at].float()])  # [2 Hkv, m, D]
        moved = fit.residual(stale, around).mul_(self.strength)
        if trust is not None:
            moved.mul_(trust.of(fit.leverage(stale, around))[..., None])
        _add(keys, at, turn(moved[:heads], to))
        _add(values, at, moved[heads:])


@dataclass(frozen=True, slots=True)
class Trust:
    """What the leverage of a token says of its correction; ``usual [H, 1]`` is its teachers' own, left out."""

    usual: torch.Tensor
    power: float

    def of(self, leverage: torch.Tensor) -> torch.Tensor:
        """The share of the correction, from ``leverage [H, m]``: 1 for what is like the teachers."""
        return (self.usual / torch.maximum(leverage, self.usual)).pow_(self.power)


def _add(target: torch.Tensor, at: slice | torch.Tensor, shift: torch.Tensor) -> None:
    if isinstance(at, slice):
        target[:, at].add_(shift)
    else:
        target.index_copy_(1, at, (target[:, at] + shift).to(target.dtype))


@dataclass(frozen=True, slots=True)
class Fit:
    """A regression: ``own [H, D, D]`` and ``around [H, 5 + C, D]`` map vectors and their surroundings to residuals;
    ``inverse [H, D + 5, D + 5]`` of the features' Gram matrix, of vectors over ``scale [H, 1, 1]``."""

    own: torch.Tensor
    around: torch.Tensor
    inverse: torch.Tensor
    scale: torch.Tensor

    def residual(self, vectors: torch.Tensor, surroundings: torch.Tensor) -> torch.Tensor:
        """What ``vectors [H, m, D]`` in ``surroundings [m, 5 + C]`` are expected to lack, ``[H, m, D]``."""
        return torch.baddbmm(torch.matmul(surroundings, self.around), vectors, self.own)

    def leverage(self, vectors: torch.Tensor, surroundings: torch.Tensor) -> torch.Tensor:
        """How unlike the teachers they are, ``[H, m]``."""
        x = _features(vectors, surroundings, self.scale)
        return (x @ self.inverse).mul_(x).sum(-1)


def _features(vectors: torch.Tensor, surroundings: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.cat([vectors / scale, surroundings[:, :FIXED].expand(vectors.shape[0], -1, -1)], -1)


def regress(own: torch.Tensor, around: torch.Tensor, residual: torch.Tensor, weights: torch.Tensor) -> Fit:
    """Weighted ridge regression per head from vectors ``own [H, n, D]`` and their surroundings ``around [n, 5 + C]``
    (four numbers, a one, membership of C chunks) to ``residual [H, n, D]``; of what it leaves, each chunk's mean,
    shrunk. ``weights [n]``. fp32."""
    dim = own.shape[-1]
    scale = own.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
    x = _features(own, around, scale)
    weighted = (x * weights[:, None]).transpose(1, 2)
    gram = weighted @ x + RIDGE * weights.sum() * torch.eye(x.shape[-1], device=x.device)
    # Half the time of an LU solve at this size. The ridge makes it definite: no check, for which a device would be
    # waited for.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(gram).L)
    solved: torch.Tensor = inverse @ (weighted @ residual)
    members = around[:, FIXED:] * weights[:, None]
    means = members.T @ (residual - x @ solved) / (members.sum(0)[:, None] + FIRM)  # [H, C, D]
    return Fit(solved[:, :dim] / scale, torch.cat([solved[:, dim:], means], 1), inverse, scale)
