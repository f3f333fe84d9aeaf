"""Prometheus metrics of engines, read when they are scraped: nothing is counted twice, nothing costs between scrapes.

::

    from prometheus_client import REGISTRY, start_http_server
    from kvboost_rag.metrics import Collector

    REGISTRY.register(Collector(engine))
    start_http_server(9464)

``docs/store.md`` lists the names. prometheus-client comes with the extra ``[metrics]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Protocol

from kvboost_rag.errors import KVBoostError, MissingExtraError

PREFIX = "kvboost_"
Stats = Mapping[str, Any]


class Engine(Protocol):
    """What is asked of an engine (:class:`kvboost_rag.KVBoost` does)."""

    def stats(self, *, sizes: bool = True) -> dict[str, object]:
        """Plain counters, see :meth:`kvboost_rag.KVBoost.stats`."""


class Collector:
    """A collector for ``prometheus_client``'s registries.

    Args:
        engines: one engine, or several by the name that the label ``engine`` gives them.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """

    def __init__(self, engines: Engine | Mapping[str, Engine]) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            hint = "pip install 'kvboost-rag[metrics]'"
            raise MissingExtraError(f"metrics need prometheus-client: {error}", hint=hint) from None
        self._core: Any = core
        self._engines = dict(engines) if isinstance(engines, Mapping) else {"": engines}

    def describe(self) -> Iterable[Any]:
        """The families without samples, so that registering asks no engine."""
        return _Families(self._core).all()

    def collect(self) -> Iterable[Any]:
        """One sample of everything. An engine that cannot answer (closed) has ``kvboost_up`` 0 and nothing else."""
        families = _Families(self._core)
        for name, engine in self._engines.items():
            try:
                stats = engine.stats(sizes=False)
            except KVBoostError:
                families.up.add_metric([name], 0)
                continue
            families.up.add_metric([name], 1)
            families.add_requests(name, _part(stats, "requests"))
            families.add_prefixes(name, _part(stats, "prefixes"))
            families.add_store(name, _part(stats, "store"))
        return families.all()


_TOKENS = {
    "prompt": "Tokens of prompts.",
    "reused": "Prompt tokens taken from blocks or a held prefix as they are.",
    "repaired": "Tokens of reused chunks that were computed again.",
    "forwarded": "Prompt tokens that the model really ran, scoring passes included.",
    "stored": "Tokens of missed chunks that were encoded and stored after an answer.",
    "new": "Tokens of answers.",
}
_TIER_COUNTERS = {
    "hits": "Look-ups that found a block in this tier.",
    "writes": "Blocks written to this tier.",
    "skipped_writes": "Blocks that this tier did not take.",
    "evictions": "Blocks that made room for others.",
    "read_bytes": "Bytes of keys and values handed out.",
}
_TIER_GAUGES = {
    "blocks": "Blocks held (a server's are not counted).",
    "bytes": "Bytes held (a server's are not counted).",
    "limit_bytes": "Most bytes held.",
    "tenants": "Salts under which there are blocks.",
    "known_chunks": "Texts that are found in prompts.",
}


class _Families:
    """The metric families of one scrape."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.up = self._gauge("up", "1 if the engine answered.")
        self.requests = self._counter("requests", "Answers, by finish reason.", "finish")
        self.tokens = {name: self._counter(f"{name}_tokens", text) for name, text in _TOKENS.items()}
        self.chunks = self._counter("chunks", "Chunks of prompts: hit, prefix, miss.", "outcome")
        self.chunk_misses = self._counter("chunk_misses", "Chunks that were prefilled, by reason.", "reason")
        self.ttft = self._summary("time_to_first_token_seconds", "From the call to the first token.")
        self.total = self._summary("request_seconds", "From the call to the last token and the storing of misses.")
        self.prefix_bytes = self._gauge("prefix_bytes", "Bytes of earlier requests' keys and values.")
        self.lookups = self._counter("lookups", "Look-ups of blocks in all tiers: hit, or why not.", "outcome")
        self.tier = {name: self._counter(f"store_{name}", text, "tier") for name, text in _TIER_COUNTERS.items()}
        self.tier_misses = self._counter("store_misses", "Look-ups that found nothing in this tier.", "tier", "reason")
        self.sizes = {name: self._gauge(f"store_{name}", text, "tier") for name, text in _TIER_GAUGES.items()}
        self.read = core.HistogramMetricFamily(
            f"{PREFIX}store_read_seconds", "Look-ups that hit, in this tier.", labels=["engine", "tier"]
        )
        self.write = self._summary("store_write_seconds", "Writes to this tier.", "tier")

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._core.CounterMetricFamily(PREFIX + name, text, labels=["engine", *labels])

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._core.GaugeMetricFamily(PREFIX + name, text, labels=["engine", *labels])

    def _summary(self, name: str, text: str, *labels: str) -> Any:
        return self._core.SummaryMetricFamily(PREFIX + name, text, labels=["engine", *labels])

    def all(self) -> list[Any]:
        found: list[Any] = []
        for value in list(vars(self).values())[1:]:
            found += value.values() if isinstance(value, dict) else [value]
        return found

    def add_requests(self, engine: str, requests: Stats) -> None:
        for finish, count in _part(requests, "requests").items():
            self.requests.add_metric([engine, finish], count)
        for name, family in self.tokens.items():
            family.add_metric([engine], requests.get(f"{name}_tokens", 0))
        for outcome, count in _part(requests, "chunks").items():
            self.chunks.add_metric([engine, outcome], count)
        for reason, count in _part(requests, "misses").items():
            self.chunk_misses.add_metric([engine, reason], count)
        answers = sum(_part(requests, "requests").values())
        self.ttft.add_metric([engine], answers, requests.get("ttft_s", 0.0))
        self.total.add_metric([engine], answers, requests.get("total_s", 0.0))

    def add_prefixes(self, engine: str, prefixes: Stats) -> None:
        self.prefix_bytes.add_metric([engine], prefixes.get("bytes", 0))

    def add_store(self, engine: str, store: Stats) -> None:
        for outcome, count in {"hit": store["hits"], **store["misses"]}.items():
            self.lookups.add_metric([engine, outcome], count)
        for tier, stats in _tiers(store):
            self._add_tier([engine, tier], stats)

    def _add_tier(self, labels: list[str], stats: Stats) -> None:
        for name, family in [*self.tier.items(), *self.sizes.items()]:
            counted = stats.get("complete", True) or name not in ("blocks", "bytes")
            if counted and stats[name] is not None:
                family.add_metric(labels, stats[name])
        for reason, count in stats["misses"].items():
            self.tier_misses.add_metric([*labels, reason], count)
        self.read.add_metric(labels, _buckets(stats["read_counts"]), stats["read_s"])
        self.write.add_metric(labels, stats["writes"], stats["write_s"])


def _part(stats: Stats, name: str) -> Stats:
    part = stats.get(name)
    return part if isinstance(part, Mapping) else {}


def _tiers(store: Stats) -> Iterator[tuple[str, Stats]]:
    """(label, stats) of every tier, the fastest first; a second one of a kind gets a number."""
    seen: dict[str, int] = {}
    for tier in store["tiers"] or [store]:
        kind = str(tier["kind"])
        seen[kind] = seen.get(kind, 0) + 1
        yield kind if seen[kind] == 1 else f"{kind}-{seen[kind]}", tier


def _buckets(counts: list[int]) -> list[tuple[str, int]]:
    """Cumulative, as Prometheus has them."""
    from kvboost_rag.store.base import LATENCY_BOUNDS_S

    bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    return list(zip(bounds, accumulate(counts or [0] * len(bounds)), strict=True))
