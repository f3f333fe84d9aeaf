"""The key shift: spread what the repair learns to the keys that were not recomputed.

Much of a stale key's error is a shift that tokens share. So inside the repairing forward, per layer and head, the mean
residual ``new - stale`` of the recomputed keys (un-rotated, over all chunks) is added to the keys that stay stale
(relative: AgentKVShift 2607.21604, which shifts per memory unit). V is left alone: shifting it hurt everywhere.
"""

from __future__ import annotations

import torch

from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.cache import KVCache


class Shifter:
    """A reviser of caches: ``repaired`` rows teach the shift, ``stale`` positions receive it. Both ascending."""

    def __init__(self, rope: RopeTable, repaired: torch.Tensor, stale: torch.Tensor, device: torch.device) -> None:
        self.rope = rope
        self.repaired = repaired.to(device)
        self.stale = stale.to(device)
        self._row_of: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        self._row_of = torch.searchsorted(positions, self.repaired)

    def revise(self, cache: KVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See :class:`~kvboost_rag.model.cache.Reviser`."""
        old = cache.gather(layer, self.repaired)[0]
        new = keys[:, self._row_of]
        residual = self.rope.unrotate_at(new.float(), self.repaired) - self.rope.unrotate_at(old.float(), self.repaired)
        mean = residual.mean(1, keepdim=True)  # [Hkv, 1, D]
        first, end = int(self.stale[0]), int(self.stale[-1]) + 1
        for a, b, cached, _ in cache.layer_stretches(layer, first, end, write=True):
            here = self.stale[(self.stale >= a) & (self.stale < b)]
            if here.numel():
                turned = self.rope.rotate_at(mean.expand(-1, here.numel(), -1), here)
                moved = cached[:, here - a].float() + turned
                cached.index_copy_(1, here - a, moved.to(cached.dtype))
