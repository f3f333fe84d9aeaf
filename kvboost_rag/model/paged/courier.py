"""Copies between the device and the host, on a stream of their own.

Out: a page is gathered into a buffer on the device (its slot is free from then on), copied to page-locked memory, and
laid into its segment once the copy has happened: when the buffer is needed again, or the segment is read or written.
In: one layer of a segment after the other passes through two buffers, the next one on its way while one is used. Behind
a layer's last segment comes the next layer's first, which is on its way while the layer's MLP runs; it is forgotten as
soon as anything is written to host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from kvboost_rag.model.paged.stats import PagedStats
from kvboost_rag.model.streaming.backend import Backend
from kvboost_rag.plan.paged import IN_SLOTS, OUT_SLOTS, PageSizes

Land = Callable[[torch.Tensor], None]


class Courier:
    """One pool's copies. Used under the pool's lock."""

    def __init__(self, backend: Backend, sizes: PageSizes, stats: PagedStats) -> None:
        self.backend, self.stats = backend, stats
        self._out = [backend.empty(sizes.page_bytes) for _ in range(OUT_SLOTS)]
        self._landing = [self._host(sizes.page_bytes) for _ in range(OUT_SLOTS)]
        self._filled = [backend.event() for _ in range(OUT_SLOTS)]
        self._landed = [backend.event() for _ in range(OUT_SLOTS)]
        self._pending: deque[tuple[int, Land]] = deque()
        self._next_out = 0
        self._in = [backend.empty(sizes.segment_layer_bytes) for _ in range(IN_SLOTS)]
        self._ready = [backend.event() for _ in range(IN_SLOTS)]
        self._free = [backend.event() for _ in range(IN_SLOTS)]
        for free in self._free:  # this memory may have been others' before, whose last use is enqueued but not over
            backend.record(free, "compute")
        self._next_in = 0
        self._ahead: tuple[int, int] | None = None  # (address, slot) of what was sent for before anyone asked

    def _host(self, nbytes: int) -> torch.Tensor:
        pinned = self.backend.pinned(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8) if pinned is None else pinned

    def send(self, page: torch.Tensor, land: Land) -> None:
        """Copy ``page`` (any strides) to the host; ``land`` gets it there, flat, at the latest in :meth:`settle`."""
        s = self._next_out
        self._next_out = (s + 1) % OUT_SLOTS
        while any(slot == s for slot, _ in self._pending):
            self._land()
        backend, out = self.backend, self._out[s]
        backend.use(out)
        out.view(page.dtype).view(page.shape).copy_(page)
        backend.done(out)
        backend.record(self._filled[s], "compute")
        backend.wait("copy", self._filled[s])
        backend.fetch(self._landing[s], out)
        backend.record(self._landed[s], "copy")
        self._pending.append((s, land))
        self.stats.bytes_out += out.numel()

    def settle(self) -> None:
        """Everything sent is where it belongs when this returns."""
        while self._pending:
            self._land()

    def _land(self) -> None:
        self._ahead = None
        s, land = self._pending[0]
        self.backend.synchronize(self._landed[s])
        self._pending.popleft()
        land(self._landing[s])

    def stream(self, sources: Sequence[torch.Tensor], following: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Each of ``sources`` (one layer of a segment) on the device, valid until the next one is asked for.
        ``following``: what the next call will probably begin with."""
        if not sources:
            return
        self.settle()
        slot = self._sent_for(sources[0])
        coming = [*sources[1:], following]
        for source, after in zip(sources, coming, strict=True):
            s, slot = slot, -1 if after is None else self._load(after)
            self.backend.wait("compute", self._ready[s])
            self.backend.use(self._in[s])
            try:
                yield self._in[s].view(source.dtype)[: source.numel()].view(source.shape)
            finally:
                self.backend.done(self._in[s])
                self.backend.record(self._free[s], "compute")
        if following is not None:
            self._ahead = (following.data_ptr(), slot)

    def _sent_for(self, source: torch.Tensor) -> int:
        """The slot that ``source`` is on its way to, since before or from now on."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != source.data_ptr():
            return self._load(source)
        self.stats.prefetched_layers += 1
        return ahead[1]

    def _load(self, source: torch.Tensor) -> int:
        s = self._next_in
        self._next_in = (s + 1) % IN_SLOTS
        raw = source.view(-1).view(torch.uint8)
        self.backend.wait("copy", self._free[s])
        self.backend.copy(self._in[s], raw)
        self.backend.record(self._ready[s], "copy")
        self.stats.bytes_in += raw.numel()
        return s

    def quiet(self) -> None:
        """No copy reads or writes host memory when this returns: the host may write there."""
        self.settle()
        self._ahead = None
        for event in self._ready:
            self.backend.synchronize(event)
