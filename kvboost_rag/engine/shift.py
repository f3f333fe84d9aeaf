"""The key shift: spread what the repair learns to the keys that were not recomputed.

Much of a stale key's error is a shift that tokens share. So inside the repairing forward, per layer and head, the mean
residual ``new - stale`` of the recomputed keys (un-rotated, over all chunks) is added to the keys that stay stale
(relative: AgentKVShift 2607.21604, which shifts per memory unit). V is left alone: shifting it hurt everywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.cache import RequestCache


class ShiftingCache(RequestCache):
    """Writes into ``base``'s buffers; ``repaired`` rows teach the shift, ``stale`` rows receive it."""

    def __init__(self, base: RequestCache, rope: RopeTable, repaired: torch.Tensor, stale: torch.Tensor) -> None:
        super().__init__(base.kv, base.length)
        self.rope = rope
        self.repaired = repaired.to(base.kv.device)
        self.stale = stale.to(base.kv.device)
        self._row_of: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> None:
        super().at(positions)
        self._row_of = torch.searchsorted(positions, self.repaired)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.kv[layer_idx, 0]  # [Hkv, capacity, D]
        old = keys[:, self.repaired]
        new = key_states[0][:, self._row_of]
        residual = self.rope.unrotate_at(new.float(), self.repaired) - self.rope.unrotate_at(old.float(), self.repaired)
        mean = residual.mean(1, keepdim=True).expand(-1, self.stale.numel(), -1)  # [Hkv, stale, D]
        moved = keys[:, self.stale].float() + self.rope.rotate_at(mean, self.stale)
        keys.index_copy_(1, self.stale, moved.to(keys.dtype))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
