"""Everything of the store that comes into a request's cache: at once, while the forward runs, or both."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_rag.engine.arrivals import Arrivals
from kvboost_rag.engine.carriage import Carriage
from kvboost_rag.engine.carrier import Carrier
from kvboost_rag.engine.compose import lay
from kvboost_rag.engine.cost import CostModel, settled
from kvboost_rag.engine.lookup import Found
from kvboost_rag.engine.report import Report
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.rope import RopeTable
from kvboost_rag.model.cache import KVCache


class Placing:
    """Blocks on their way into ``cache``: those that lie where the cache does are laid when this begins, those in the
    memory of a host are carried, those of slow tiers arrive; both a layer at a time, before it is read.

    Use it in a ``with`` around all forwards; it begins anew where a forward does.
    """

    def __init__(
        self,
        cache: KVCache,
        found: Sequence[Found],
        rope: RopeTable,
        report: Report,
        arrivals: Arrivals,
        carrier: Carrier | None,
        costs: CostModel | None = None,
    ) -> None:
        self._cache, self._rope, self._report = cache, rope, report
        self._arrivals, self._carrier, self._costs = arrivals, carrier, costs
        self._found = [(f.segment.start, f.segment.end, f.block) for f in found if isinstance(f.block, Block)]
        self._carriage: Carriage | None = None

    @property
    def carried_s(self) -> float:
        """Seconds until everything was across, where that was waited for; else 0."""
        return self._carriage.carried_s if self._carriage is not None else 0.0

    def __enter__(self) -> Placing:
        try:
            with self._report.stage("compose"), settled(self._costs):
                for start, end, block in self._carry():
                    lay(self._cache, start, end, block.kv, self._rope)
        except BaseException:
            self.__exit__()
            raise
        if self._carriage is not None or self._arrivals:
            self._cache.arriving = self
        return self

    def __exit__(self, *exc: object) -> None:
        self._cache.arriving = None
        if self._carriage is not None and self._carrier is not None:
            with self._carrier.adapter.lock:
                self._carriage.close()

    def _carry(self) -> list[tuple[int, int, Block]]:
        """Send for what is carried; returns the rest."""
        carrier = self._carrier
        if carrier is None:
            return self._found
        away = [f for f in self._found if carrier.takes(f[2])]
        if away:
            with carrier.adapter.lock:
                self._carriage = carrier.begin(self._cache, away, self._report, settle=self._costs is not None)
        return self._found if self._carriage is None else [f for f in self._found if not carrier.takes(f[2])]

    def lay(self, cache: KVCache, layer: int) -> None:
        """See :class:`~kvboost_rag.model.cache.Arriving`: what is carried first, the device has it to do while the host
        waits for the rest."""
        if self._carriage is not None and self._carrier is not None:
            with self._carrier.adapter.lock:
                self._carriage.lay(cache, layer)
        if self._arrivals:
            self._arrivals.lay(cache, layer)
