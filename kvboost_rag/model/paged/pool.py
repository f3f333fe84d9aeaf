"""The pool of pages that all live requests share, and the rule by which pages leave it.

A request may hold all pages but one: before it would take the last, its own oldest page goes to the host (the
watermark: an allocation never fails in the middle of a forward). Where other requests hold pages, theirs go first, the
least recently used request's oldest page at a time: held prefixes and streams that nobody reads from move out of the
way of the one that runs.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import torch

from kvboost_rag.model.paged.cache import PagedCache
from kvboost_rag.model.paged.courier import Courier
from kvboost_rag.model.paged.host import HostMemory
from kvboost_rag.model.paged.stats import PagedStats
from kvboost_rag.model.paged.table import PageTable
from kvboost_rag.model.streaming.backend import Backend
from kvboost_rag.plan import KVBudget, page_sizes

if TYPE_CHECKING:
    from kvboost_rag.model.adapter import ModelSpec

WATERMARK = 1  # pages that a request leaves free


class PagePool:
    """``kv [num_layers, 2, num_kv_heads, pages * page_tokens, head_dim]`` on the device, and what lies beyond it.

    ``lock`` is the model's: whatever moves pages holds it. Raises CapacityError: the budget is too small, or the device
    has less.
    """

    def __init__(self, spec: ModelSpec, budget: KVBudget, backend: Backend | None, lock: threading.RLock) -> None:
        self.spec, self.budget, self.lock = spec, budget, lock
        self.backend = backend or choose_backend(spec.device)
        self.sizes = sizes = page_sizes(budget, spec.bytes_per_token, spec.num_layers)
        self.stats = PagedStats(sizes.pages, sizes.page_tokens, sizes.device_bytes)
        self._shape = (spec.num_layers, 2, spec.num_kv_heads)
        raw = self.backend.empty(sizes.pages * sizes.page_bytes)
        self.kv = raw.view(spec.dtype).view(*self._shape, sizes.pages * sizes.page_tokens, spec.head_dim)
        self.courier = Courier(self.backend, sizes, self.stats)
        segment = (*self._shape, sizes.segment_tokens, spec.head_dim)
        self.host = HostMemory(self.backend, segment, spec.dtype, budget, self.stats)
        self._free: deque[int] = deque(range(sizes.pages))
        self._live: OrderedDict[int, weakref.ref[PagedCache]] = OrderedDict()  # least recently used first
        self._gone: deque[tuple[int, PageTable]] = deque()  # tables of caches that nobody holds any more

    def new_cache(self, capacity: int) -> PagedCache:
        """A cache for one request; its pages come back when nobody holds it."""
        table = PageTable(self.sizes.page_tokens, self.sizes.segment_tokens)
        cache = PagedCache(self, table, capacity)
        with self.lock:
            self._live[id(table)] = weakref.ref(cache)
        # May run in any thread, in the middle of anything: it only leaves a note.
        weakref.finalize(cache, self._gone.append, (id(table), table))
        return cache

    def snapshot(self) -> PagedStats:
        """The counters, with what is free now."""
        with self.lock:
            self._sweep()
            self.stats.free_pages = len(self._free)
        return self.stats

    def touch(self, table: PageTable) -> None:
        """This request is in use now."""
        self._live.move_to_end(id(table))

    def grow(self, table: PageTable, num_pages: int) -> None:
        """Give ``table`` pages up to ``num_pages``; those that the device has no room for begin on the host."""
        if num_pages <= table.num_pages:
            return
        self._sweep()
        self.touch(table)
        beyond = num_pages - (self.sizes.pages - WATERMARK)
        while table.slots and table.host_pages < beyond:
            self._spill(table)
        if table.host_pages < beyond:
            self._extend_host(table, beyond)
            self.stats.placed_pages += beyond - table.host_pages
            table.host_pages = beyond
        while table.num_pages < num_pages:
            while not self._free:
                self._make_room(table)
            table.slots.append(self._free.popleft())

    def shrink(self, table: PageTable, num_pages: int) -> None:
        """Take back the pages from ``num_pages`` on."""
        while table.slots and table.num_pages > num_pages:
            self._free.append(table.slots.pop())
        if table.host_pages > num_pages:
            self.courier.quiet()
            table.host_pages = num_pages
            self._trim_host(table)

    def _make_room(self, asking: PageTable) -> None:
        """One more free page, from another request: ``asking`` itself never holds them all."""
        for ref in self._live.values():
            cache = ref()
            if cache is not None and cache.table is not asking and cache.table.slots:
                self._spill(cache.table)
                return
        self._sweep()  # the last ones are over since this began
        assert self._free, "every page is free, of a live request or of one that is over"

    def _spill(self, table: PageTable) -> None:
        """Move the oldest page of ``table`` on the device to the host."""
        size = self.sizes.page_tokens
        self._extend_host(table, table.host_pages + 1)
        place = table.slots.pop(0) * size
        segment, offset = divmod(table.host_tokens, self.sizes.segment_tokens)
        target = table.segments[segment].kv[:, :, :, offset : offset + size]

        def land(flat: torch.Tensor) -> None:
            target.copy_(flat.view(target.dtype).view(target.shape))

        self.courier.send(self.kv[:, :, :, place : place + size], land)
        self._free.append(place // size)  # gathered: what is enqueued from here on may overwrite it
        table.host_pages += 1
        self.stats.spilled_pages += 1

    def _extend_host(self, table: PageTable, host_pages: int) -> None:
        needed = -(-host_pages * self.sizes.page_tokens // self.sizes.segment_tokens)
        while len(table.segments) < needed:
            table.segments.append(self.host.take())

    def _trim_host(self, table: PageTable) -> None:
        needed = -(-table.host_tokens // self.sizes.segment_tokens)
        while len(table.segments) > needed:
            self.host.give(table.segments.pop())

    def _sweep(self) -> None:
        """Take back the pages of requests that are over."""
        while self._gone:
            name, table = self._gone.popleft()
            self._live.pop(name, None)
            self.shrink(table, 0)


def choose_backend(device: torch.device) -> Backend:
    """CUDA's own, or on a CPU a stand-in that copies at once: there a budget is a limit without a second memory."""
    if device.type == "cuda":
        from kvboost_rag.model.streaming.cuda import CudaBackend

        return CudaBackend(device)
    from kvboost_rag.model.streaming.virtual import VirtualBackend

    return VirtualBackend(order="early", check=False)
