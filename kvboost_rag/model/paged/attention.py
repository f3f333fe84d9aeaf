"""Exact attention over pages, wherever they lie.

Few rows (decoding) meet the host's part where it is: the device's part is enqueued first, the CPU attends to the rest
meanwhile, and only the query and the partial result cross the bus. Many rows (prefill, repair) have the host's part
brought to the device, a segment at a time. Both are merged by log-sum-exp (``partial.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvboost_rag.model.attention import CausalPlan
from kvboost_rag.model.paged.partial import Merge, attend_part

if TYPE_CHECKING:
    from kvboost_rag.model.paged.cache import PagedCache

TILE = 128  # rows that meet a part at a time: bounds the mask and the scores
CPU_ROWS = 16  # up to so many rows, moving the queries is cheaper than moving the keys


class PagedPlan(CausalPlan):
    """Rows at ``positions [q]`` (ascending) over ``cache``: each sees ``kv_position <= row_position``, but nothing that
    is ``hidden [kv]``. Of ``last_layer``, only the last row's output will be used."""

    def __init__(
        self,
        cache: PagedCache,
        positions: torch.Tensor,
        *,
        hidden: torch.Tensor | None = None,
        last_layer: int = -1,
    ) -> None:
        self.cache, self.positions, self.hidden, self.last_layer = cache, positions, hidden, last_layer
        rows = [int(p) for p in positions.tolist()]
        self.num_rows = len(rows)
        self.kv_length = rows[-1] + 1
        self.is_full = hidden is None and rows[0] == 0 and self.kv_length == self.num_rows
        self.on_cpu = hidden is None and self.num_rows <= CPU_ROWS and rows[0] >= cache.table.host_tokens > 0
        self._tiles = [(a, min(a + TILE, len(rows))) for a in range(0, len(rows), TILE)]
        self._ends = [(rows[a], rows[b - 1]) for a, b in self._tiles]  # first and last position of each tile
        stats, host = cache.pool.stats, min(cache.table.host_tokens, self.kv_length)
        if self.on_cpu:
            stats.host_attended_tokens += host * self.num_rows
            cache.host_attended_tokens += host * self.num_rows
        elif not self.is_full:
            stats.streamed_tokens += host

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See :class:`~kvboost_rag.model.attention.Plan`; ``key`` and ``value`` are the rows' own."""
        if self.is_full:
            return self.kernel.causal(query, key, value, scaling)
        return self.run(layer, query, scaling)[0]

    def run(self, layer: int, query: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The output ``[1, q, H, D]`` and the log-sum-exp ``[Hkv, G, q]`` of every row."""
        _, heads, rows, dim = query.shape
        kv_heads = self.cache.pool.spec.num_kv_heads
        folded = query[0].reshape(kv_heads, heads // kv_heads, rows, dim)
        merge = Merge(kv_heads, heads // kv_heads, rows, dim, query.device)
        # The queries leave first: the device's part is then enqueued, and runs while the CPU attends to the rest.
        own = folded.cpu() if self.on_cpu else folded
        first = self.cache.table.host_tokens if self.on_cpu else 0
        for start, end, keys, values in self.cache.layer_stretches(layer, first, self.kv_length, ahead=True):
            self._part(merge, folded, start, end, keys, values, scaling, last=layer == self.last_layer)
        if self.on_cpu:
            self._host_part(merge, layer, own, scaling)
        out = merge.out.to(query.dtype).permute(2, 0, 1, 3).reshape(1, rows, heads, dim)
        return out, merge.lse

    def _part(
        self,
        merge: Merge,
        query: torch.Tensor,
        start: int,
        end: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        *,
        last: bool,
    ) -> None:
        """The keys of positions ``[start, end)``, tile by tile of rows; tiles that lie before them see nothing.
        ``last``: the last tile alone."""
        for (a, b), (lowest, highest) in list(zip(self._tiles, self._ends, strict=True))[-1 if last else 0 :]:
            if highest < start:
                continue
            stop = min(end, highest + 1)
            here = slice(0, stop - start)
            mask = self._mask(a, b, start, stop) if self.hidden is not None or lowest < stop - 1 else None
            merge.add(attend_part(query[:, :, a:b], keys[:, here], values[:, here], scaling, mask), a)

    def _mask(self, a: int, b: int, start: int, end: int) -> torch.Tensor:
        mask = torch.arange(start, end, device=self.positions.device)[None] > self.positions[a:b, None]
        return mask if self.hidden is None else mask | self.hidden[None, start:end]

    def _host_part(self, merge: Merge, layer: int, query: torch.Tensor, scaling: float) -> None:
        """All rows (``query`` is in host memory) see all of the host's part: no mask."""
        self.cache.pool.courier.settle()
        heads, groups, rows, dim = query.shape
        part = Merge(heads, groups, rows, dim, torch.device("cpu"))
        for a, b, segment, offset in self.cache.table.host_pieces(0, self.kv_length):
            keys, values = segment.kv[layer, :, :, offset : offset + b - a]
            part.add(attend_part(query, keys, values, scaling))
        merge.add((part.out.to(merge.out.device), part.lse.to(merge.out.device)))
