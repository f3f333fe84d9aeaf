"""Who brings blocks of the store from host memory to the device, and what it has done so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from kvboost_rag.engine.carriage import Carriage, Place, layer_bytes
from kvboost_rag.engine.compose import PIECE
from kvboost_rag.engine.report import Report
from kvboost_rag.errors import CapacityError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.model.adapter import ModelAdapter
from kvboost_rag.model.cache import KVCache
from kvboost_rag.model.streaming.backend import Backend
from kvboost_rag.model.streaming.pagelocked import PageLocked
from kvboost_rag.model.streaming.ring import SLOTS, Ring
from kvboost_rag.model.streaming.streamer import streamer_of
from kvboost_rag.once import Once
from kvboost_rag.plan import Budget

Carry = Literal["auto", False]


class Carrier:
    """One for each engine. ``memory`` gives page-locked host memory, for stores to keep blocks in."""

    def __init__(self, adapter: ModelAdapter, backend: Backend, *, stands_in: bool = False) -> None:
        self.adapter, self.backend = adapter, backend
        self.memory = PageLocked(backend)
        self._ring = Ring(backend)
        self._stands_in = stands_in  # host and device are the same memory
        self._once = Once(__name__)

    def takes(self, block: Block) -> bool:
        """Whether ``block`` lies in host memory, away from the device, and is carried."""
        kv, spec = block.kv, self.adapter.spec
        away = kv.device.type == "cpu" and (self._stands_in or spec.device.type != "cpu")
        return away and kv.dtype == spec.dtype and kv[0].is_contiguous() and layer_bytes(kv) <= PIECE

    def begin(
        self, cache: KVCache, places: Sequence[tuple[int, int, Block]], report: Report, *, settle: bool = False
    ) -> Carriage | None:
        """Set out with blocks (all of them taken) for ``[start, end)`` of ``cache``; None: the device has no room for
        the buffers. Under the model's lock."""
        laid = [Place(start, end, block.kv) for start, end, block in places]
        cache.extend(max(p.end for p in laid))
        sizes = {id(p.kv): layer_bytes(p.kv) for p in laid if p.end > cache.host_length}
        try:
            if sizes:
                self._ring.reserve(min(PIECE, sum(sizes.values())))
        except CapacityError as error:
            self._once.warn("no room", f"blocks are copied before a forward, not while it runs: {error}")
            return None
        return Carriage(self._ring, cache, laid, self.adapter.rope, report, settle=settle)

    def stats(self) -> dict[str, object]:
        """Counters, and how much of what stores keep in memory is page-locked."""
        self.sweep()
        return {**asdict(self._ring.stats), **self.memory.held()}

    def sweep(self) -> None:
        """Let go of host memory whose copies have happened."""
        if self.adapter.lock.acquire(blocking=False):  # not while a forward runs: whoever watches does not wait for it
            try:
                self._ring.sweep()
            finally:
                self.adapter.lock.release()

    def close(self) -> None:
        """Wait for what is under way, and give device memory back."""
        with self.adapter.lock:
            self._ring.close()


def device_bytes(vram: object, stand_in: Backend | None, **options: object) -> int:
    """What a carrier takes of a real device at most, for the plan of an engine with these options: never more than what
    ``vram`` sets apart as workspace (who plans without any counts in what he wants counted)."""
    if stand_in is not None or options.get("carry", "auto") is False or options.get("reuse") == "off":
        return 0
    budget = vram if isinstance(vram, Budget) else Budget(1)  # the defaults
    return min(SLOTS * PIECE, budget.workspace)


def carrier_for(adapter: ModelAdapter, carry: object, stand_in: Backend | None = None) -> Carrier | None:
    """The carrier of an engine; None where blocks lie next to the model's own memory, or it is not wanted. Copies go
    behind those of streamed weights, in the order in which they are needed.

    Raises:
        UsageError: ``carry`` is neither ``"auto"`` nor False.
    """
    if carry is not False and carry != "auto":
        raise UsageError(f"carry={carry!r}", hint='"auto" (blocks cross to a GPU while the forward runs) or False')
    if carry is False or not adapter.support.ok:
        return None
    if stand_in is not None:
        return Carrier(adapter, stand_in, stands_in=adapter.spec.device.type == "cpu")
    if adapter.spec.device.type != "cuda":
        return None
    if (streamer := streamer_of(adapter.model)) is not None:
        return Carrier(adapter, streamer.backend)
    if adapter.pages is not None:
        return Carrier(adapter, adapter.pages.backend)
    from kvboost_rag.model.streaming.cuda import CudaBackend

    return Carrier(adapter, CudaBackend(adapter.spec.device))
