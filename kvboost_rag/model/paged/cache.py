"""One request's KV in pages: the same seam as a contiguous cache, wherever the pages lie."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from kvboost_rag.model.attention import Plan, RowsPlan
from kvboost_rag.model.cache import CacheCounts, KVCache, LayerStretch, Stretch
from kvboost_rag.model.paged.attention import PagedPlan
from kvboost_rag.model.paged.table import PageTable

if TYPE_CHECKING:
    from kvboost_rag.model.paged.host import Segment
    from kvboost_rag.model.paged.pool import PagePool

# (rows, segment, their places in it): rows that are written to host memory
HostRows = list[tuple[torch.Tensor, "Segment", torch.Tensor]]
# of some positions: which are on the device (None: all), their places in the pool, and those on the host
Located = tuple[torch.Tensor | None, torch.Tensor, HostRows]


class PagedCache(KVCache):
    """Positions ``[0, table.host_tokens)`` lie in host memory, those behind them in the device's pool."""

    def __init__(self, pool: PagePool, table: PageTable, capacity: int) -> None:
        super().__init__(capacity)
        self.pool, self.table = pool, table
        self.lock = pool.lock
        self.host_attended_tokens = 0
        self._spilled_before = pool.stats.spilled_pages
        self._device_rows: torch.Tensor | None = None  # None: all of them
        self._places = torch.empty(0, dtype=torch.long)  # of those rows, in the pool
        self._host_rows: HostRows = []
        self._gathered: tuple[torch.Tensor, Hashable, Located] | None = None

    @property
    def whole(self) -> bool:
        """Whether everything lies on the device in one piece, so that plain attention serves."""
        return self.table.in_one_run

    @property
    def nbytes(self) -> int:
        return self.length * self.pool.spec.bytes_per_token

    def extend(self, length: int) -> None:
        with self.lock:
            self.pool.grow(self.table, -(-length // self.table.page_tokens))

    def held(self) -> KVCache:
        return self

    def counts(self) -> CacheCounts:
        spilled = self.pool.stats.spilled_pages - self._spilled_before
        return CacheCounts(min(self.length, self.table.host_tokens), spilled, self.host_attended_tokens)

    def crop(self, max_length: int) -> None:
        super().crop(max_length)
        with self.lock:
            self.pool.shrink(self.table, -(-self.length // self.table.page_tokens))

    # -- reading and writing in place ----------------------------------------------------------------------------------

    def fill(self, start: int, end: int, layers: slice = slice(None)) -> Iterator[Stretch]:
        self.pool.courier.quiet()
        for a, b, segment, offset in self.table.host_pieces(start, end):
            yield a, b, segment.kv[layers, :, :, offset : offset + b - a]
        for a, b, place in self.table.device_pieces(start, end):
            yield a, b, self.pool.kv[layers, :, :, place : place + b - a]

    def layer_stretches(
        self, layer: int, start: int, end: int, *, write: bool = False, ahead: bool = False
    ) -> Iterator[LayerStretch]:
        """``ahead``: the same stretch of the next layer will be asked for next."""
        pieces = list(self.table.host_pieces(start, end))
        # Rows that are written to host memory at every layer would overtake what was fetched before.
        ahead = ahead and bool(pieces) and not self._host_rows and layer + 1 < len(self)
        following = pieces[0][2].kv[layer + 1] if ahead else None
        layers = self.pool.courier.stream([segment.kv[layer] for _, _, segment, _ in pieces], following)
        for (a, b, segment, offset), kv in zip(pieces, layers, strict=True):
            here = slice(offset, offset + b - a)
            yield a, b, kv[0, :, here], kv[1, :, here]
            if write:
                segment.kv[layer, :, :, here].copy_(kv[:, :, here])
        for a, b, place in self.table.device_pieces(start, end):
            yield (
                a,
                b,
                self.pool.kv[layer, 0, :, place : place + b - a],
                self.pool.kv[layer, 1, :, place : place + b - a],
            )

    def gather(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, places, host = self._located(positions)
        spec = self.pool.spec
        out = torch.empty(2, spec.num_kv_heads, positions.numel(), spec.head_dim, dtype=spec.dtype, device=spec.device)
        found = self.pool.kv[layer].index_select(2, places)
        if rows is None:
            out.copy_(found)
        else:
            out.index_copy_(2, rows, found)
        if host:
            self.pool.courier.settle()
        for host_rows, segment, offsets in host:
            out.index_copy_(2, host_rows, segment.kv[layer].index_select(2, offsets).to(spec.device))
        return out[0], out[1]

    @property
    def host_length(self) -> int:
        return self.table.host_tokens

    @property
    def layout(self) -> Hashable:
        return (self.table.host_pages, *self.table.slots)

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        return self._slots_of(positions).to(self.pool.spec.device)

    def put(self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.pool.kv[layer, 0].index_copy_(1, places, keys)
        self.pool.kv[layer, 1].index_copy_(1, places, values)

    def _slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Places in the pool of ``positions [n]`` on the device; both on the CPU."""
        size = self.table.page_tokens
        slots = torch.tensor(self.table.slots, dtype=torch.long)
        return slots[positions // size - self.table.host_pages] * size + positions % size

    def clear(self, positions: torch.Tensor) -> None:
        with self.lock:
            _, places, host = self._locate(positions)
            self.pool.kv.index_fill_(3, places, 0.0)
            if host:
                self.pool.courier.quiet()
            for _, segment, offsets in host:
                segment.kv.index_fill_(3, offsets, 0.0)

    def _located(self, positions: torch.Tensor) -> Located:
        """:meth:`_locate`, once for all layers: finding places waits for the device."""
        if self._gathered is None or self._gathered[0] is not positions or self._gathered[1] != self.layout:
            self._gathered = (positions, self.layout, self._locate(positions))
        return self._gathered[2]

    def _locate(self, positions: torch.Tensor) -> Located:
        """Ascending ``positions``: which of them are on the device (None: all), their places in the pool, and those on
        the host."""
        at = positions.cpu()
        table, device = self.table, self.pool.spec.device
        first = int(torch.searchsorted(at, table.host_tokens))
        places = self._slots_of(at[first:])
        host: HostRows = []
        for a, b, segment, offset in table.host_pieces(0, table.host_tokens):
            low, high = (int(i) for i in torch.searchsorted(at[:first], torch.tensor([a, b])))
            if low < high:
                host.append((torch.arange(low, high, device=device), segment, at[low:high] - a + offset))
        rows = torch.arange(first, at.numel(), device=device) if first else None
        return rows, places.to(device), host

    # -- the forward ---------------------------------------------------------------------------------------------------

    def at(self, positions: torch.Tensor) -> None:
        self.extend(int(positions[-1]) + 1)
        self.pool.touch(self.table)
        self._device_rows, self._places, self._host_rows = self._locate(positions)
        super().at(positions)

    def plan(self, positions: torch.Tensor, *, last_layer: int = -1) -> Plan:
        if self.whole:
            return RowsPlan(positions, last_layer=last_layer)
        return PagedPlan(self, positions, last_layer=last_layer)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._device_rows is None:
            self.put(layer, self._places, keys, values)
        elif self._device_rows.numel():
            self.put(layer, self._places, keys[:, self._device_rows], values[:, self._device_rows])
        if self._host_rows:
            self.pool.courier.quiet()
        for rows, segment, offsets in self._host_rows:
            moved = torch.stack([keys[:, rows], values[:, rows]]).cpu()
            segment.kv[layer].index_copy_(2, offsets, moved)
            self.pool.stats.bytes_out += moved.numel() * moved.element_size()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.revise(layer_idx, key_states, value_states)
        self.write(layer_idx, key_states[0], value_states[0])
        if not self.whole:
            return key_states, value_states  # the plan reads the pages itself
        start = self.table.slots[0] * self.table.page_tokens
        own = self.pool.kv[layer_idx, :, None, :, start : start + self.length]
        return own[0], own[1]

    def __len__(self) -> int:
        return self.pool.spec.num_layers
