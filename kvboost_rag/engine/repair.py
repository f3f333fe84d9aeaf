"""Choose which tokens of reused chunks to recompute.

Everything here only *names positions*; the recomputation itself is one exact masked forward (``prefill.py``). The
budget is a total: boundary tokens first, then the scored ones, never more than ``cap`` of the context. Of a budget that
is too small for both, boundary tokens get a share only: where chunks are short they would take all of it, and nothing
would be left to repair what the question is about, nor to teach what is spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvboost_rag.config import Repair
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.model.attention import Plan, RowsPlan
from kvboost_rag.model.cache import KVCache, LayerStretch, StopForward
from kvboost_rag.model.paged.attention import PagedPlan
from kvboost_rag.model.paged.cache import PagedCache

SCORE_FROM, SCORE_TO = 1 / 2, 1.0  # scores come from the layers between these shares of the depth
CHECK_LAYER = 1  # CacheBlend's check layer
MAX_QUESTION_ROWS = 256
EDGES_SHARE = 0.5  # of a budget that is too small for boundary and scored tokens: the boundary's


@dataclass(frozen=True, slots=True)
class ReusedSpan:
    """Positions ``[start, end)`` that were composed from a block; ``exact`` ones need no repair."""

    start: int
    end: int
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Positions to recompute, ascending; ``sampled`` of them were not chosen for what they are."""

    positions: list[int]
    sampled: frozenset[int] = frozenset()


def boundary_positions(spans: Sequence[ReusedSpan], repair: Repair, most: int | None = None) -> list[int]:
    """The first and last tokens of every span; ``most`` of them: the outermost of all spans."""
    depth: dict[int, int] = {}
    for s in spans:
        for p in range(s.start, min(s.end, s.start + repair.first)):
            depth[p] = p - s.start
        for p in range(max(s.start, s.end - repair.last), s.end):
            depth[p] = min(depth.get(p, s.end), s.end - 1 - p)
    return sorted(sorted(depth, key=lambda p: (depth[p], p))[:most])


def boundary_budget(repair: Repair, context: int) -> int:
    """How many boundary tokens there may be."""
    total = int(repair.cap * context)
    return max(int(EDGES_SHARE * total), total - round((repair.query + repair.blend) * context))


class AttentionScores:
    """Collects, over the late half of the layers, how much attention the question's rows give to each position.

    ``hidden [capacity]`` marks positions whose KV is not computed yet. The sum is over rows and heads.
    """

    def __init__(self, num_layers: int, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        self.first_layer = int(num_layers * SCORE_FROM)
        self.last_layer = max(self.first_layer, int(num_layers * SCORE_TO) - 1)
        self.positions = positions
        self.hidden = hidden
        self.total: torch.Tensor | None = None  # [kv]
        self._blocked: torch.Tensor | None = None  # [rows, kv], the same in every layer

    def observe(self, query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
        """Add one layer's attention; returns it, ``[num_kv_heads, group, rows, kv]``."""
        _, heads, rows, dim = query.shape
        kv_heads, kv = key.shape[1], key.shape[2]
        q = query[0].reshape(kv_heads, heads // kv_heads * rows, dim).float()
        scores = torch.matmul(q, key[0].float().transpose(1, 2)).mul_(scaling)  # [Hkv, G * rows, kv]
        if self._blocked is None or self._blocked.shape[1] != kv:
            self._blocked = torch.arange(kv, device=key.device)[None] > self.positions[:, None]
            self._blocked |= self.hidden[None, :kv]
        weights = scores.reshape(kv_heads, -1, rows, kv).masked_fill_(self._blocked, float("-inf")).softmax(-1)
        seen = weights.sum((0, 1, 2))
        self.total = seen if self.total is None else self.total + seen
        return weights

    def add(
        self, layer: int, query: torch.Tensor, parts: Iterable[LayerStretch], scaling: float, lse: torch.Tensor
    ) -> None:
        """:meth:`observe` over keys that come in parts, given the rows' log-sum-exp ``lse [Hkv, G, q]`` over all."""
        if layer < self.first_layer:
            return
        _, heads, rows, dim = query.shape
        kv_heads = lse.shape[0]
        if self.total is None:
            self.total = torch.zeros(int(self.positions[-1]) + 1, device=query.device)
        q = query[0].reshape(kv_heads, heads // kv_heads * rows, dim).float()
        for start, end, keys, _ in parts:
            scores = torch.matmul(q, keys.float().transpose(1, 2)) * scaling
            at = torch.arange(start, end, device=keys.device)
            blocked = (at[None] > self.positions[:, None]) | self.hidden[None, start:end]
            scores = scores.reshape(kv_heads, -1, rows, end - start).masked_fill_(blocked, float("-inf"))
            self.total[start:end] += (scores - lse[..., None]).exp_().sum((0, 1, 2))


class PagedScoringPlan(PagedPlan):
    """:class:`MaskedRowsPlan` over pages: each layer's keys pass twice, for the attention and for the scores."""

    def __init__(
        self, cache: PagedCache, positions: torch.Tensor, hidden: torch.Tensor, scores: AttentionScores
    ) -> None:
        super().__init__(cache, positions, hidden=hidden)
        self.scores = scores

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        out, lse = self.run(layer, query, scaling)
        self.scores.add(layer, query, self.cache.layer_stretches(layer, 0, self.kv_length), scaling, lse)
        if layer >= self.scores.last_layer:
            raise StopForward
        return out


class MaskedRowsPlan(RowsPlan):
    """Rows that must not see ``hidden`` positions (their KV is not there yet)."""

    def __init__(self, positions: torch.Tensor, hidden: torch.Tensor, scores: AttentionScores) -> None:
        super().__init__(positions)
        self.hidden = hidden
        self.scores = scores
        self.is_full = False

    def _hidden(self, index: int, device: torch.device) -> torch.Tensor:
        later = super()._hidden(index, device)
        return later | self.hidden[None, : later.shape[1]]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if layer < self.scores.first_layer:
            return self._tiled(layer, query, key, value, scaling, query.shape[1] // key.shape[1])
        weights = self.scores.observe(query, key, scaling)
        if layer >= self.scores.last_layer:
            raise StopForward  # nothing behind this layer's queries and keys is of use
        out = torch.matmul(weights.flatten(1, 2).to(value.dtype), value[0])  # the weights are here: no second attention
        return out.view(*weights.shape[:3], -1).permute(2, 0, 1, 3).reshape(1, query.shape[2], query.shape[1], -1)


def scoring_plan(cache: KVCache, question: torch.Tensor, seen: torch.Tensor, scores: AttentionScores) -> Plan:
    """The plan that scores over ``cache``, which holds the question's positions already."""
    if isinstance(cache, PagedCache) and not cache.whole:
        return PagedScoringPlan(cache, question, seen, scores)
    return MaskedRowsPlan(question, seen, scores)


def question_scores(
    adapter: ModelAdapter,
    cache: KVCache,
    token_ids: torch.Tensor,
    question: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Attention of the rows at ``question [q]`` to every position, over the composed (unrepaired) cache.

    ``hidden [n]`` positions take no part; their KV must be finite all the same: an additive mask lets NaN through.
    Costs a forward of the question's rows up to the last layer that is scored (counted). Their KV is written, and
    overwritten by the main forward.
    """
    question = question[-MAX_QUESTION_ROWS:]
    seen = hidden.clone()
    seen[question] = False
    scores = AttentionScores(adapter.spec.num_layers, question, seen)
    before = cache.rows
    with cache.lock:
        cache.extend(int(question[-1]) + 1)
        plan = scoring_plan(cache, question, seen, scores)
        adapter.probe(token_ids[question], question, cache, plan, layers=scores.last_layer + 1)
    cache.scoring_rows += cache.rows - before
    assert scores.total is not None, "late layers must have been observed"
    return scores.total


class _Deviation:
    """Measures ``|K_new - K_old|^2`` at the check layer, keeps the fresh K and V, and ends the forward there."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.found = torch.zeros(num_tokens, device=device)

    def at(self, positions: torch.Tensor) -> None:
        """Every position is a row."""

    def revise(self, cache: KVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        if layer == CHECK_LAYER:
            for a, b, old, _ in cache.layer_stretches(layer, 0, self.found.numel()):
                self.found[a:b] = (keys[:, a:b].float() - old.float()).square().sum((0, 2))
            cache.write(layer, keys, values)
            raise StopForward


def key_deviation(adapter: ModelAdapter, cache: KVCache, token_ids: torch.Tensor) -> torch.Tensor:
    """CacheBlend's score: deviation of K at the check layer, per position; runs ``CHECK_LAYER`` layers on all rows
    (attention of layers below is full and causal) and leaves the fresh K and V of those layers in the cache."""
    deviation = _Deviation(token_ids.numel(), token_ids.device)
    positions = torch.arange(token_ids.numel(), device=token_ids.device)
    before = cache.rows
    with cache.lock, cache.revised_by(deviation):
        adapter.probe(token_ids, positions, cache, None, layers=CHECK_LAYER + 1)
    cache.scoring_rows += cache.rows - before
    return deviation.found


def budget(repair: Repair, share: float, context: int, taken: int) -> int:
    """How many more tokens a scored policy may add: its share, within what ``cap`` leaves."""
    return max(0, min(round(share * context), int(repair.cap * context) - taken))


def top_positions(scores: torch.Tensor, candidates: list[int], count: int) -> list[int]:
    """The ``count`` candidates with the highest score."""
    if count <= 0 or not candidates:
        return []
    index = torch.tensor(candidates, device=scores.device)
    best = scores[index].topk(min(count, len(candidates))).indices
    return sorted(index[best].tolist())


def even_positions(candidates: list[int], count: int) -> list[int]:
    """``count`` of the candidates, evenly spaced: a sample that does not depend on what they are."""
    count = min(count, len(candidates))
    return [candidates[(2 * i + 1) * len(candidates) // (2 * count)] for i in range(count)]
