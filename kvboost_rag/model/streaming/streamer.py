"""The schedule: streamed layers pass through fixed slots, copied ahead of time, in a circle.

Layer ``j`` of the streamed ones always uses slot ``j % slots``, and its weights are views into that slot, made once.
Before a layer runs, the compute stream waits for the slot's *ready* event; after it, the slot's *free* event is
recorded and the copy of the slot's next layer is enqueued behind it. After the last layer comes the first again, so
that copies for the next forward run under the output matrix and the sampling of this one. The host never waits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn

from kvboost_rag.model.direct.layout import Layout
from kvboost_rag.model.streaming.backend import Backend
from kvboost_rag.model.streaming.slab import HostSlab
from kvboost_rag.model.streaming.stats import StreamStats

TIMED = 512  # pairs of events kept until they have happened


class LayerStreamer:
    """Streams ``layers`` (in the order in which they run) from ``slab`` through ``slots`` buffers.

    Use is serialised by the model adapter's lock: one forward at a time.
    """

    def __init__(
        self,
        backend: Backend,
        layers: Sequence[nn.Module],
        layouts: Sequence[Layout],
        slab: HostSlab,
        *,
        slots: int,
        resident_layers: int = 0,
    ) -> None:
        self.backend, self.slab = backend, slab
        self._blobs = [block[: layout.nbytes] for block, layout in zip(slab.blocks, layouts, strict=True)]
        count = min(slots, len(layers))
        size = max((layout.nbytes for layout in layouts), default=0)
        self._slots = [backend.empty(size) for _ in range(count)]
        self._holds: list[int | None] = [None] * count
        self._ready = [backend.event() for _ in range(count)]
        self._free = [backend.event() for _ in range(count)]
        self._stats = StreamStats(resident_layers, len(layers), count, slab.pinned)
        self._copies: deque[tuple[Any, Any, int]] = deque()
        self._stalls: deque[tuple[Any, Any, int]] = deque()
        self._spare: list[Any] = []
        for j, (layer, layout) in enumerate(zip(layers, layouts, strict=True)):
            layout.bind(layer, self._slots[j % count])
            _hook(self, layer, j)

    @property
    def stats(self) -> StreamStats:
        """Counters up to now."""
        self._collect()
        return self._stats

    def start(self) -> None:
        """Fill the slots for the first forward."""
        for j, free in enumerate(self._free):
            # The slots' memory may have been others' before, whose last use is enqueued but not over.
            self.backend.record(free, "compute")
            self._fetch(j)

    def probe(self) -> float | None:
        """Measured bytes/s from host to device with the very memory that will be streamed; before :meth:`start`."""
        if not self._slots:
            return None
        source = self._blobs[0]
        seconds = self.backend.measure(self._slots[0][: source.numel()], source)
        rate = source.numel() / seconds if seconds else None
        self._stats.probed_gb_per_s = rate / 1e9 if rate else None
        return rate

    # -- called around each streamed layer -----------------------------------------------------------------------------

    def enter(self, j: int) -> None:
        """Streamed layer ``j`` is about to run."""
        s = j % len(self._slots)
        if self._holds[s] != j:
            self._restart(j)
        start, end = self._event(), self._event()
        self.backend.record(start, "compute")
        self.backend.wait("compute", self._ready[s])
        self.backend.record(end, "compute")
        self._remember(self._stalls, start, end, 0)
        self.backend.use(self._slots[s])
        self._stats.layers_run += 1

    def leave(self, j: int) -> None:
        """Streamed layer ``j`` is enqueued: its slot goes to the next layer that uses it."""
        s, count, total = j % len(self._slots), len(self._slots), len(self._blobs)
        self.backend.done(self._slots[s])
        self.backend.record(self._free[s], "compute")
        following = j + count if j + count < total else s
        if following != j:
            self._fetch(following)

    def _restart(self, j: int) -> None:
        """Layer ``j`` is due and not there: the forward before was left early (or another began anew). Whatever was
        enqueued may still read any slot, so copies go behind all of it."""
        seen: set[int] = set()
        for k in range(j, j + len(self._slots)):
            due = k % len(self._blobs)
            s = due % len(self._slots)
            if s in seen:  # the circle closes in the middle of the slots: the first one due has it
                continue
            seen.add(s)
            if self._holds[s] != due:
                self.backend.record(self._free[s], "compute")
                self._fetch(due)
                self._stats.late_fetches += 1

    def _fetch(self, j: int) -> None:
        s, blob = j % len(self._slots), self._blobs[j]
        start, end = self._event(), self._event()
        self.backend.wait("copy", self._free[s])
        self.backend.record(start, "copy")
        self.backend.copy(self._slots[s][: blob.numel()], blob)
        self.backend.record(end, "copy")
        self.backend.record(self._ready[s], "copy")
        self._holds[s] = j
        self._stats.copies += 1
        self._stats.bytes_copied += blob.numel()
        self._remember(self._copies, start, end, blob.numel())

    # -- time ----------------------------------------------------------------------------------------------------------

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else self.backend.event()

    def _remember(self, where: deque[tuple[Any, Any, int]], start: Any, end: Any, nbytes: int) -> None:
        where.append((start, end, nbytes))
        if len(where) > TIMED:
            self._collect()
        while len(where) > TIMED:  # still not done: the device is far behind; forget the oldest
            where.popleft()

    def _collect(self) -> None:
        """Take the times of events that have happened, oldest first."""
        while self._copies and (seconds := self.backend.seconds(*self._copies[0][:2])) is not None:
            start, end, nbytes = self._copies.popleft()
            self._stats.copy_s += seconds
            self._stats.timed_bytes += nbytes
            self._spare += [start, end]
        while self._stalls and (seconds := self.backend.seconds(*self._stalls[0][:2])) is not None:
            start, end, _ = self._stalls.popleft()
            self._stats.stall_s += seconds
            self._spare += [start, end]


def _hook(streamer: LayerStreamer, layer: nn.Module, j: int) -> None:
    """Call the streamer around ``layer`` without keeping it alive through the model's hooks alone."""
    ref = weakref.ref(streamer)

    def enter(module: nn.Module, args: Any) -> None:
        found = ref()
        assert found is not None, "the model holds its streamer"
        found.enter(j)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        found = ref()
        assert found is not None, "the model holds its streamer"
        found.leave(j)

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)


def streamer_of(model: Any) -> LayerStreamer | None:
    """The streamer of a model that was loaded with ``vram=``, if it streams at all."""
    found = getattr(model, "kvboost_streamer", None)
    return found if isinstance(found, LayerStreamer) else None
