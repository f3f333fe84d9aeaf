"""AgentKVShift (2607.21604): recompute probes of each chunk, add their mean residual to the chunk's other tokens.

Read from notes, not from code: *probes* are each chunk's tokens with the largest deviation of K at layer 1 (layers 0 and 1
run over all tokens, which counts); at every layer the mean of ``new - stale`` over a chunk's probes, per head, K before
rotation and V, is added to that chunk's tokens that are not recomputed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from rival_prompt import Laid

CHECK_LAYER = 1


class _Enough(Exception):
    """The probe has seen its layer."""


class _Deviation:
    """Squared deviation of K at the check layer, per position."""

    def __init__(self) -> None:
        self.found: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> None:
        """Every position is a row."""

    def revise(self, cache: Any, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compare, and leave the forward."""
        if layer == CHECK_LAYER:
            self.found = (keys.float() - cache.kv[layer, 0][:, : keys.shape[1]].float()).square().sum((0, 2))
            raise _Enough


class _Shift:
    """Adds, layer by layer, each chunk's mean residual to its stale tokens, before that layer's attention."""

    def __init__(self, laid: Laid, chosen: list[int]) -> None:
        self.rope = laid.adapter.rope
        probes, device = set(chosen), laid.device
        self.units = []  # (probes, stale) of each chunk
        for start, end in laid.spans.chunks:
            own = [p for p in range(start, end) if p in probes]
            rest = [p for p in range(start, end) if p not in probes]
            if own and rest:
                self.units.append((torch.tensor(own, device=device), torch.tensor(rest, device=device)))
        self._rows: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> None:
        """Where the probes are among the rows is looked up in :meth:`revise`."""
        self._rows = positions

    def revise(self, cache: Any, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """``keys, values [Hkv, rows, D]`` are the rows' new ones."""
        assert self._rows is not None
        old_keys, old_values = cache.kv[layer, 0], cache.kv[layer, 1]
        for probes, stale in self.units:
            row = torch.searchsorted(self._rows, probes)
            new = self.rope.unrotate_at(keys[:, row], probes)
            moved = (new - self.rope.unrotate_at(old_keys[:, probes], probes)).mean(1, keepdim=True)
            shift = self.rope.rotate_at(moved.expand(-1, stale.numel(), -1), stale)
            old_keys.index_add_(1, stale, shift.to(old_keys.dtype))
            mean = (values[:, row] - old_values[:, probes]).mean(1, keepdim=True)
            old_values.index_add_(1, stale, mean.expand(-1, stale.numel(), -1).contiguous())


@dataclass(frozen=True, slots=True)
class AgentKVShift:
    """``share`` of each chunk are probes."""

    share: float

    def choose(self, laid: Laid) -> list[int]:
        """See :class:`rival_prompt.Method`."""
        scratch = laid.adapter.new_buffer(laid.n)
        scratch.kv.copy_(laid.cache.kv[:, :, :, : laid.n])
        probe, every = _Deviation(), torch.arange(laid.n, device=laid.device)
        with scratch.revised_by(probe), suppress(_Enough):
            laid.adapter.probe(laid.ids, every, scratch, None, layers=CHECK_LAYER + 1)
        laid.cache.rows += scratch.rows
        assert probe.found is not None
        chosen = []
        for start, end in laid.spans.chunks:
            best = probe.found[start:end].topk(ceil(self.share * (end - start))).indices
            chosen += (best + start).tolist()
        return sorted(chosen)

    def reviser(self, laid: Laid, chosen: list[int]) -> _Shift:
        """See :class:`rival_prompt.Method`."""
        return _Shift(laid, chosen)

    def plan(self, laid: Laid, positions: torch.Tensor) -> None:
        """Plainly causal."""
