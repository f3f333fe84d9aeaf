"""Caches that transformers' models write into: one contiguous buffer per request, and a capture for encoding."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache


class RequestCache(Cache):
    """The KV of one request: ``kv [num_layers, 2, num_kv_heads, capacity, head_dim]``, keys rotated.

    Before each forward :meth:`at` names the positions of its rows; ``update`` scatters their K and V there and returns
    everything up to the last valid position. ``length`` counts valid positions from 0.
    """

    def __init__(self, kv: torch.Tensor, length: int = 0) -> None:
        super().__init__(layers=[])
        self.kv = kv
        self.length = length
        self.rows = 0.0  # rows that were run into this cache (x share of layers)
        self.scoring_rows = 0.0  # of those: spent on choosing what to repair
        self._rows: slice | torch.Tensor = slice(0, 0)

    @property
    def capacity(self) -> int:
        return int(self.kv.shape[3])

    def at(self, positions: torch.Tensor) -> None:
        """The next forward's rows stand at ``positions [q]`` (ascending)."""
        first, last = int(positions[0]), int(positions[-1])
        contiguous = last - first + 1 == positions.numel()
        self._rows = slice(first, last + 1) if contiguous else positions
        self.length = max(self.length, last + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.kv[layer_idx, 0], self.kv[layer_idx, 1]  # [Hkv, capacity, D]
        if isinstance(self._rows, slice):
            keys[:, self._rows] = key_states[0]
            values[:, self._rows] = value_states[0]
        else:
            keys.index_copy_(1, self._rows, key_states[0])
            values.index_copy_(1, self._rows, value_states[0])
        return keys[None, :, : self.length], values[None, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length, 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # the older 5.x name

    def crop(self, max_length: int) -> None:
        """Forget the last ``-max_length`` positions (transformers 5: the count to remove, negative)."""
        if max_length > 0 or -max_length > self.length:
            raise ValueError(f"crop takes a negative count of at most {self.length} positions, got {max_length}")
        self.length += max_length

    def __len__(self) -> int:
        return int(self.kv.shape[0])


class CaptureCache(Cache):
    """Keeps each layer's K and V of one forward (batch of chunks) and hands them back unchanged."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.layers_kv: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers_kv[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def __len__(self) -> int:
        return len(self.layers_kv)
