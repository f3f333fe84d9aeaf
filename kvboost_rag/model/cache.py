"""Caches that transformers' models write into: the seam that the engine works on, one contiguous buffer per request,
and a capture for encoding. Pages that spill to host memory are ``model/paged/``."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from kvboost_rag.model.attention import Plan, RowsPlan

# (first position, end, K and V of all layers there ``[num_layers, 2, num_kv_heads, end - first, head_dim]``)
Stretch = tuple[int, int, torch.Tensor]
# (first position, end, K, V of one layer ``[num_kv_heads, end - first, head_dim]``, on the computing device)
LayerStretch = tuple[int, int, torch.Tensor, torch.Tensor]


class Reviser(Protocol):
    """Something that reads or corrects a layer's cached KV in the middle of a forward."""

    def at(self, positions: torch.Tensor) -> None:
        """The coming forward's rows stand at ``positions [q]``."""
        ...

    def revise(self, cache: KVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Called before the rows' new ``keys, values [num_kv_heads, q, head_dim]`` are written. May raise
        :class:`StopForward`."""
        ...


class StopForward(Exception):
    """Raised inside a forward to leave it early on purpose."""


class ForwardCut(Exception):
    """Raised inside a forward at ``layer``, whose cached KV will never be there: what it computed is of no use."""

    def __init__(self, layer: int) -> None:
        super().__init__(f"cut at layer {layer}")
        self.layer = layer


class Arriving(Protocol):
    """Cached KV that is put in place while a forward runs, before its layer is read."""

    def lay(self, cache: KVCache, layer: int) -> None:
        """``layer`` is in place when this returns. May raise :class:`ForwardCut`."""
        ...


class KVCache(Cache):
    """The KV of one request, wherever it lies; keys are rotated. What the engine may ask of it is here.

    Before each forward :meth:`at` names the positions of its rows; ``update`` puts their K and V there. ``length``
    counts valid positions from 0. Hold :attr:`lock` while using the views that :meth:`fill`, :meth:`read` and
    :meth:`layer_stretches` yield: what lies where may change in between.
    """

    lock: AbstractContextManager[Any] = nullcontext()

    def __init__(self, capacity: int, length: int = 0) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = length
        self.rows = 0.0  # rows that were run into this cache (x share of layers)
        self.scoring_rows = 0.0  # of those: spent on choosing what to repair
        self.arriving: Arriving | None = None  # what is not in place yet
        self._reviser: Reviser | None = None

    # -- where the tensors are: for subclasses -------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        raise NotImplementedError

    def extend(self, length: int) -> None:
        """Make room for positions ``[0, length)``. Raises CapacityError."""

    def plan(self, positions: torch.Tensor, *, last_layer: int = -1) -> Plan:
        """The attention of rows at ``positions [q]`` over this cache; ask after :meth:`at`. Of ``last_layer``, only
        the last row's output will be used."""
        return RowsPlan(positions, last_layer=last_layer)

    def fill(self, start: int, end: int, layers: slice = slice(None)) -> Iterator[Stretch]:
        """Views of all (or these) layers to write ``[start, end)`` into, piece by piece, in order; some may be host
        memory."""
        raise NotImplementedError

    def read(self, start: int, end: int) -> Iterator[Stretch]:
        """Like :meth:`fill`, for reading."""
        return self.fill(start, end)

    def layer_stretches(self, layer: int, start: int, end: int, *, write: bool = False) -> Iterator[LayerStretch]:
        """One layer's K and V on the device, piece by piece, in order; with ``write``, changes to them are kept."""
        raise NotImplementedError

    def gather(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V ``[num_kv_heads, n, head_dim]`` at ``positions [n]`` (ascending)."""
        raise NotImplementedError

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the rows' K and V (``[num_kv_heads, q, head_dim]``) at the positions that :meth:`at` named."""
        raise NotImplementedError

    @property
    def host_length(self) -> int:
        """Positions ``[0, host_length)`` lie in host memory."""
        return 0

    @property
    def layout(self) -> Hashable:
        """Changes when something moves: :meth:`places` are others then."""
        return None

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """What stands for ``positions [n]`` (on the CPU, none below :attr:`host_length`) in :meth:`put`."""
        raise NotImplementedError

    def put(self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V ``[num_kv_heads, n, head_dim]``, on the device, at :meth:`places`."""
        raise NotImplementedError

    def clear(self, positions: torch.Tensor) -> None:
        """Zero K and V at ``positions [n]``: fresh memory may hold NaN, which no mask stops."""
        raise NotImplementedError

    def held(self) -> torch.Tensor | KVCache:
        """What later requests copy their prefix from; nothing writes here any more."""
        raise NotImplementedError

    def take(self, source: torch.Tensor | KVCache, length: int) -> None:
        """Copy positions ``[0, length)`` from what :meth:`held` of another cache gave."""
        with self.lock:
            self.extend(length)
            if isinstance(source, torch.Tensor):
                for a, b, target in self.fill(0, length):
                    target.copy_(source[:, :, :, a:b])
            else:
                for a, b, found in source.read(0, length):
                    for c, d, target in self.fill(a, b):
                        target.copy_(found[:, :, :, c - a : d - a])
            self.length = max(self.length, length)

    def counts(self) -> CacheCounts:
        """What lies, and what was attended to, outside the device."""
        return CacheCounts()

    # -- the forward ---------------------------------------------------------------------------------------------------

    @contextmanager
    def revised_by(self, reviser: Reviser | None) -> Iterator[None]:
        """Forwards inside the ``with`` block pass through ``reviser``, layer by layer."""
        self._reviser = reviser
        try:
            yield
        finally:
            self._reviser = None

    @property
    def is_revised(self) -> bool:
        """Whether forwards pass through a reviser now."""
        return self._reviser is not None

    def at(self, positions: torch.Tensor) -> None:
        """The next forward's rows stand at ``positions [q]`` (ascending)."""
        self.length = max(self.length, int(positions[-1]) + 1)
        if self._reviser is not None:
            self._reviser.at(positions)

    def revise(self, layer: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Have a layer in place, and let the reviser at it, before its rows are written."""
        if self.arriving is not None:
            self.arriving.lay(self, layer)
        if self._reviser is not None:
            self._reviser.revise(self, layer, key_states[0], value_states[0])

    # -- what transformers asks ----------------------------------------------------------------------------------------

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


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """``host_tokens`` positions lie outside the device; ``spilled_pages`` moved there; ``host_attended_tokens`` of them
    were attended to by the CPU, summed over steps."""

    host_tokens: int = 0
    spilled_pages: int = 0
    host_attended_tokens: int = 0


class RequestCache(KVCache):
    """One contiguous buffer: ``kv [num_layers, 2, num_kv_heads, capacity, head_dim]``."""

    def __init__(self, kv: torch.Tensor, length: int = 0) -> None:
        super().__init__(int(kv.shape[3]), length)
        self.kv = kv
        self._rows: slice | torch.Tensor = slice(0, 0)

    @property
    def nbytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()

    def fill(self, start: int, end: int, layers: slice = slice(None)) -> Iterator[Stretch]:
        yield start, end, self.kv[layers, :, :, start:end]

    def layer_stretches(self, layer: int, start: int, end: int, *, write: bool = False) -> Iterator[LayerStretch]:
        yield start, end, self.kv[layer, 0][:, start:end], self.kv[layer, 1][:, start:end]

    def gather(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv[layer, 0][:, positions], self.kv[layer, 1][:, positions]

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.to(self.kv.device)

    def put(self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.kv[layer, 0].index_copy_(1, places, keys)
        self.kv[layer, 1].index_copy_(1, places, values)

    def clear(self, positions: torch.Tensor) -> None:
        self.kv.index_fill_(3, positions, 0.0)

    def held(self) -> torch.Tensor:
        return self.kv

    def at(self, positions: torch.Tensor) -> None:
        first, last = int(positions[0]), int(positions[-1])
        contiguous = last - first + 1 == positions.numel()
        self._rows = slice(first, last + 1) if contiguous else positions
        super().at(positions)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        own_keys, own_values = self.kv[layer, 0], self.kv[layer, 1]  # [Hkv, capacity, D]
        if isinstance(self._rows, slice):
            own_keys[:, self._rows] = keys
            own_values[:, self._rows] = values
        else:
            own_keys.index_copy_(1, self._rows, keys)
            own_values.index_copy_(1, self._rows, values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.revise(layer_idx, key_states, value_states)
        self.write(layer_idx, key_states[0], value_states[0])
        return self.kv[layer_idx, 0][None, :, : self.length], self.kv[layer_idx, 1][None, :, : self.length]

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
