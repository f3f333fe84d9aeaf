"""APE (2502.05431): temperature and scale on the context's part of attention, on aligned or on shared positions.

Rows of the question and of the answer attend to the context (all chunks, with the separators between them) and to
everything else (head, question, answer) apart, and merge the two by their log-sum-exps, as the authors' code does::

    o_c, lse_c = attention(Q, K_context, 1 / (sqrt(d) T))        o_o, lse_o = attention(Q, K_other, 1 / sqrt(d))
    out = w_c o_c + w_o o_o,   w = softmax([T S lse_c, lse_o])

With T = S = 1 that is plain attention. *Aligned*: chunks stand one behind the other, as in the engine. *Shared*: as in the
paper, every chunk stands where the first one does, the question follows the longest, and no chunk sees another; since
rotary attention knows distances alone, queries are turned by how far a chunk is from there, and the cache stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rival_prompt import Laid, Spans


@dataclass(frozen=True, slots=True)
class Group:
    """Positions ``[start, end)`` that stand ``shift`` further left than the cache says."""

    start: int
    end: int
    shift: int


def groups_of(spans: Spans, *, shared: bool) -> tuple[Group, ...]:
    """Head, each chunk with the separator behind it, question (open to the right)."""
    starts = [s for s, _ in spans.chunks]
    first, question = starts[0], spans.question
    ends = [*starts[1:], question]
    longest = max(e - s for s, e in zip(starts, ends, strict=True)) if shared else question - first
    chunks = [Group(s, e, s - first if shared else 0) for s, e in zip(starts, ends, strict=True)]
    return (Group(0, first, 0), *chunks, Group(question, 1 << 40, question - first - longest))


@dataclass(frozen=True, slots=True)
class Ape:
    """The method. ``first``: recompute this many tokens of each chunk on top (aligned only), which is our reading of PSR
    (2603.20218): prefix, scale, recompute."""

    temperature: float = 0.9
    scale: float = 0.9
    shared: bool = False
    first: int = 0

    def choose(self, laid: Laid) -> list[int]:
        """See :class:`rival_prompt.Method`."""
        return [p for s, e in laid.spans.chunks for p in range(s, min(e, s + self.first))]

    def reviser(self, laid: Laid, chosen: list[int]) -> None:
        """See :class:`rival_prompt.Method`."""

    def plan(self, laid: Laid, positions: torch.Tensor) -> ApePlan:
        """See :class:`rival_prompt.Method`."""
        return ApePlan(self, groups_of(laid.spans, shared=self.shared), positions, laid.adapter.rope)


class ApePlan:
    """A plan for rows at ``positions [q]``; rows in front of the question attend plainly to what they may see."""

    def __init__(self, method: Ape, groups: tuple[Group, ...], positions: torch.Tensor, rope: object) -> None:
        self.method, self.groups, self.positions, self.rope = method, groups, positions, rope
        starts = torch.tensor([g.start for g in groups], device=positions.device)
        self.group_of_row = torch.bucketize(positions, starts, right=True) - 1
        self.asks = positions >= groups[-1].start  # question and answer
        self.context = slice(groups[1].start, groups[-1].start)
        self._visible: torch.Tensor | None = None

    def visible(self, keys: int) -> torch.Tensor:
        """bool ``[rows, keys]``: causal; on shared positions, a chunk's rows see the head and their chunk."""
        if self._visible is None or self._visible.shape[1] != keys:
            at = torch.arange(keys, device=self.positions.device)
            seen = at[None] <= self.positions[:, None]
            if self.method.shared:
                starts = torch.tensor([g.start for g in self.groups], device=at.device)
                group = torch.bucketize(at, starts, right=True) - 1
                own = (group[None] == 0) | (group[None] == self.group_of_row[:, None]) | self.asks[:, None]
                seen = seen & own
            self._visible = seen
        return self._visible

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """``query [1, H, q, D]``, ``key/value [1, Hkv, kv, D]`` → ``[1, q, H, D]``."""
        _, heads, rows, dim = query.shape
        kv_heads, n = key.shape[1], key.shape[2]
        q = query[0].float().view(kv_heads, heads // kv_heads, rows, dim)
        scores = self._scores(q, key[0].float()) * scaling
        scores = scores.masked_fill(~self.visible(n), float("-inf"))
        v = value[0].float()[:, None]  # [Hkv, 1, kv, D]
        out = torch.matmul(scores.softmax(-1), v)
        if bool(self.asks.any()):
            out[:, :, self.asks] = self._merged(scores[:, :, self.asks], v)
        return out.reshape(heads, rows, dim).transpose(0, 1)[None].to(query.dtype)

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """``q [Hkv, G, rows, D]``, ``k [Hkv, kv, D]`` → ``[Hkv, G, rows, kv]``, distances as the groups say."""
        if not any(g.shift for g in self.groups):
            return torch.matmul(q, k[:, None].transpose(2, 3))
        n = k.shape[1]
        out = torch.zeros(*q.shape[:3], n, device=q.device)
        for r in self.group_of_row.unique().tolist():
            rows = self.group_of_row == r
            for i, g in enumerate(self.groups):
                if r < len(self.groups) - 1 and i not in (0, r):
                    continue  # on shared positions a chunk's rows see no other chunk
                keys = slice(g.start, min(g.end, n))
                turned = self._turn(q[:, :, rows], self.groups[r].shift - g.shift)
                out[:, :, rows, keys] = torch.matmul(turned, k[:, None, keys].transpose(2, 3))
        return out

    def _turn(self, q: torch.Tensor, left: int) -> torch.Tensor:
        """Queries as if they stood ``left`` positions further left (a table's attention factor is divided out)."""
        at = torch.full((q.shape[2],), abs(left), device=q.device)
        factor = self.rope.scaling  # type: ignore[attr-defined]
        if left >= 0:
            return self.rope.unrotate_at(q, at) * factor  # type: ignore[attr-defined,no-any-return]
        return self.rope.rotate_at(q, at) / factor  # type: ignore[attr-defined,no-any-return]

    def _merged(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The context's part with temperature and scale, the rest without, merged by log-sum-exp."""
        t, s = self.method.temperature, self.method.scale
        context, other = scores[..., self.context] / t, scores.clone()
        other[..., self.context] = float("-inf")
        lse = torch.stack([t * s * context.logsumexp(-1), other.logsumexp(-1)])
        w_context, w_other = lse.softmax(0)[..., None]
        of_context = torch.matmul(context.softmax(-1), v[:, :, self.context])
        return w_context * of_context + w_other * torch.matmul(other.softmax(-1), v)
