"""The key shift: spread what the repair learns to the keys that were not recomputed.

Much of a stale key's error is a shift that tokens share. So inside the repairing forward, per layer and head, the mean
residual ``new - stale`` of the recomputed keys (un-rotated, over all chunks) is added to the keys that stay stale
(relative: AgentKVShift 2607.21604, which shifts per memory unit). V is left alone: shifting it hurt everywhere.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from kvboost_rag.kv.rope import RopeTable, turn
from kvboost_rag.model.cache import KVCache


class Shifter:
    """A reviser of caches: ``repaired`` rows teach the shift, ``stale`` positions receive it. Both ascending. Nothing
    here waits for the device once the forward has begun."""

    def __init__(self, rope: RopeTable, repaired: torch.Tensor, stale: torch.Tensor, device: torch.device) -> None:
        self.repaired = repaired.to(device)
        self.stale = stale.to(device)
        self._places: list[int] = stale.tolist()
        self._back, self._to = rope.at(self.repaired, back=True), rope.at(self.stale)
        self._row_of: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        self._row_of = torch.searchsorted(positions, self.repaired)

    def revise(self, cache: KVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        old = cache.gather(layer, self.repaired)[0]
        residual = turn(keys[:, self._row_of], self._back) - turn(old, self._back)
        mean = residual.mean(1, keepdim=True)  # [Hkv, 1, D]
        first, end = self._places[0], self._places[-1] + 1
        for a, b, cached, _ in cache.layer_stretches(layer, first, end, write=True):
            low, high = bisect_left(self._places, a), bisect_left(self._places, b)
            if low == high:
                continue
            at, to = self.stale[low:high] - a, (self._to[0][low:high], self._to[1][low:high])
            moved = cached[:, at].float() + turn(mean.expand(-1, high - low, -1), to)
            cached.index_copy_(1, at, moved.to(cached.dtype))
