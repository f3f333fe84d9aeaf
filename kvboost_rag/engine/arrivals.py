"""Blocks that are still on their way while the forward runs.

::

    loaders   read and verify  A0 B0 C0 | A1 B1 C1 | A2 …            layer by layer, over all blocks of the request
    forward                    lay 0, run 0 | lay 1, run 1 | wait …  a layer is laid when the forward comes to it

Loaders only read: keys are rotated and laid by the forward's own thread, under the lock that it holds anyway, so
nobody else ever writes into a request's cache, and pages may move in between. All layers that have come by then are
laid in one go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from time import perf_counter

from kvboost_rag.engine.compose import lay
from kvboost_rag.engine.lookup import Found
from kvboost_rag.engine.report import Report
from kvboost_rag.errors import StoreError, UsageError
from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.cache import ForwardCut, KVCache
from kvboost_rag.store.arriving import ArrivingBlock, BlockLost
from kvboost_rag.store.base import Miss

LOADERS = 4
OVERLAP = ("auto", False)
_LOOK_S = 0.02  # how often somebody who waits looks whether the request was cancelled


def check_overlap(value: object) -> bool:
    """Whether blocks of slow tiers are used while they come in.

    Raises:
        UsageError: not one of :data:`OVERLAP`.
    """
    if value is not False and value != "auto":
        raise UsageError(f"overlap={value!r}", hint='"auto" (use layers as they come in) or False (wait for all)')
    return value == "auto"


class Arrivals:
    """The arriving blocks of one request. Loaders run from the beginning until :meth:`close`, which waits for them.

    Args:
        found: what was looked up; blocks that are there already are none of its business.
        rope: rotates keys to their places.
        report: ``stages["wait"]`` gets the seconds that a forward stood waiting here, ``"compose"`` those of laying.
        cancelled: whether the request was cancelled.
    """

    def __init__(
        self, found: Iterable[Found], rope: RopeTable, report: Report, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        self._rope, self._report, self._cancelled = rope, report, cancelled
        self._places: dict[ArrivingBlock, list[Found]] = {}  # the same chunk may stand in a prompt twice
        for f in found:
            if isinstance(f.block, ArrivingBlock):
                self._places.setdefault(f.block, []).append(f)
        self._blocks = list(self._places)
        self._order = tuple(self._blocks)  # what the loaders go over; those that are gone are skipped
        self._gone: set[ArrivingBlock] = set()
        self._num_layers = self._blocks[0].num_layers if self._blocks else 0
        self._state = threading.Condition()
        self._missing = [set(self._blocks) for _ in range(self._num_layers)]  # what has not come, by layer
        self._next = 0  # of num_layers + 1 rounds over the blocks; the last one finishes them
        self._laid = 0  # layers below this one are in place
        self._lost: dict[ArrivingBlock, Miss] = {}
        self._error: Exception | None = None
        self._closed = False
        self._started, self.loaded_s = perf_counter(), 0.0  # until everything was there
        self._loaders = [
            threading.Thread(target=self._load, name=f"kvboost-load-{i}", daemon=True)
            for i in range(min(LOADERS, len(self._blocks)))
        ]
        for loader in self._loaders:
            loader.start()

    def __bool__(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._blocks)

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what has not come, and wait for the loaders."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        for block in self._blocks:
            block.abandon()
        for loader in self._loaders:
            loader.join()

    # -- the forward ---------------------------------------------------------------------------------------------------

    def lay(self, cache: KVCache, layer: int) -> None:
        """Called before anything of ``layer`` is read: it is in place when this returns.

        Raises:
            ForwardCut: it never will be; :meth:`lost` says what to do without.
        """
        if layer < self._laid and not self._lost:
            return
        with self._report.stage("wait"):
            stop = self._wait(layer)
        with self._report.stage("compose"):
            layers = slice(self._laid, stop)
            for block in self._blocks:
                for f in self._places[block]:
                    lay(cache, f.segment.start, f.segment.end, block.kv[layers], self._rope, layers)
        self._laid = stop

    def _wait(self, layer: int) -> int:
        """Until all blocks have come up to ``layer``; returns the first layer that is still missing somewhere."""
        with self._state:
            while any(self._missing[self._laid : layer + 1]):
                if self._lost or self._error or self._cancelled():
                    raise ForwardCut(layer)
                self._state.wait(_LOOK_S)
            if self._lost or self._error:
                raise ForwardCut(layer)
            return next((i for i in range(layer, self._num_layers) if self._missing[i]), self._num_layers)

    def lost(self) -> dict[ArrivingBlock, Miss]:
        """After a cut: the blocks that are lost, and why. They are forgotten here, and nothing counts as laid: a
        forward may begin anew. None lost: the request was cancelled.

        Raises:
            StoreError: see :meth:`check`.
        """
        self.check()
        with self._state:
            lost, self._lost = self._lost, {}
            self._blocks = [block for block in self._blocks if block not in lost]
            self._laid = 0
        return lost

    def check(self) -> None:
        """Raises StoreError: a store broke while it was read, or while it took a block, which no store should."""
        if self._error is not None:
            raise StoreError(f"a store failed while a block was read: {self._error!r}") from self._error

    # -- the loaders ---------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        while (task := self._take()) is not None:
            layer, block = task
            try:
                if layer == self._num_layers:
                    self._finish(block)
                else:
                    block.read(layer)
                    self._came(block, layer)
            except BlockLost as error:
                self._drop(block, error.miss)
            except Exception as error:  # the forward is told, and raises it
                with self._state:
                    self._error = error
                    self._state.notify_all()
                return

    def _take(self) -> tuple[int, ArrivingBlock] | None:
        """The next thing to do: layer by layer, over all blocks."""
        with self._state:
            while not self._closed and self._error is None:
                layer, index = divmod(self._next, len(self._order))
                if layer > self._num_layers:
                    return None
                self._next += 1
                block = self._order[index]
                if block not in self._gone:
                    return layer, block
        return None

    def _came(self, block: ArrivingBlock, layer: int) -> None:
        with self._state:
            self._missing[layer].discard(block)
            self._note()

    def _drop(self, block: ArrivingBlock, miss: Miss) -> None:
        with self._state:
            if block not in self._gone:
                self._gone.add(block)
                self._lost[block] = miss
                for missing in self._missing:
                    missing.discard(block)
            self._note()

    def _note(self) -> None:
        if not any(self._missing):
            self.loaded_s = self.loaded_s or perf_counter() - self._started
        self._state.notify_all()

    def _finish(self, block: ArrivingBlock) -> None:
        """All layers were given out; those that other loaders still read are waited for."""
        with self._state:
            while not self._closed and self._error is None and any(block in missing for missing in self._missing):
                self._state.wait()
        block.finish()
