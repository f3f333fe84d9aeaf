"""Metrics as a Prometheus server would read them, through the real client library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvboost_rag import KVBoost
from kvboost_rag.errors import MissingExtraError
from kvboost_rag.metrics import Collector
from kvboost_rag.store import open_store
from tests.engine.helpers import DOCS, chat, make_engine

prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")


@pytest.fixture
def engine(tmp_path: Path) -> KVBoost:
    return make_engine(store=tmp_path / "kv")


def registry_of(collector: Collector) -> object:
    registry = prometheus.CollectorRegistry(auto_describe=True)
    registry.register(collector)
    return registry


def value(registry: object, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"kvboost_{name}", {"engine": "", **labels})  # type: ignore[attr-defined, no-any-return]


def test_every_count_is_the_engine_s_own(engine: KVBoost) -> None:
    registry = registry_of(Collector(engine))
    engine.warm(DOCS[:3])
    reports = [
        engine.generate(chat(), chunks=DOCS, max_new_tokens=3).report,
        engine.generate(chat(DOCS[::-1]), max_new_tokens=2).report,
    ]
    for name in ("prompt", "reused", "repaired", "forwarded", "stored", "new"):
        assert value(registry, f"{name}_tokens_total") == sum(getattr(r, f"{name}_tokens") for r in reports) > 0
    assert value(registry, "requests_total", finish="length") == 2
    assert value(registry, "time_to_first_token_seconds_count") == 2
    assert value(registry, "time_to_first_token_seconds_sum") == pytest.approx(sum(r.ttft_s for r in reports))
    assert value(registry, "chunks_total", outcome="hit") == sum(c.outcome == "hit" for r in reports for c in r.chunks)
    assert (
        value(registry, "chunks_total", outcome="miss") == value(registry, "chunk_misses_total", reason="absent") == 1
    )
    assert value(registry, "up") == 1


def test_tiers_are_told_apart(engine: KVBoost, tmp_path: Path) -> None:
    engine.warm(DOCS)
    engine.close()
    again = make_engine(store=tmp_path / "kv")
    registry = registry_of(Collector(again))
    again.generate(chat(), max_new_tokens=1)
    stats = again.store.stats()
    memory, disk = stats.tiers
    assert (disk.hits, memory.hits) == (value(registry, "store_hits_total", tier="disk"), memory.hits)
    assert disk.hits > 0
    assert value(registry, "store_misses_total", tier="memory", reason="absent") == memory.misses["absent"] > 0
    assert value(registry, "lookups_total", outcome="hit") == stats.hits
    assert value(registry, "store_blocks", tier="disk") == len(DOCS)
    assert value(registry, "store_bytes", tier="disk") == disk.bytes
    assert value(registry, "store_read_bytes_total", tier="disk") == disk.read_bytes
    assert value(registry, "store_read_seconds_count", tier="disk") == disk.hits
    assert value(registry, "store_read_seconds_bucket", tier="disk", le="+Inf") == disk.hits
    assert value(registry, "store_read_seconds_sum", tier="disk") == pytest.approx(disk.read_s)
    assert value(registry, "store_write_seconds_count", tier="memory") == memory.writes


def test_the_text_format_is_sound(engine: KVBoost) -> None:
    engine.generate(chat(), max_new_tokens=1)
    text = prometheus.generate_latest(registry_of(Collector({"one": engine}))).decode()
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert {sample.labels["engine"] for family in families.values() for sample in family.samples} == {"one"}
    assert all(family.documentation.endswith(".") for family in families.values())
    buckets = [s.value for s in families["kvboost_store_read_seconds"].samples if s.name.endswith("_bucket")]
    assert buckets


def test_several_engines_and_a_closed_one(engine: KVBoost) -> None:
    other = make_engine()
    registry = registry_of(Collector({"a": engine, "b": other}))
    other.generate(chat(), max_new_tokens=1)
    other.close()
    engine.close()
    get = registry.get_sample_value  # type: ignore[attr-defined]
    assert get("kvboost_up", {"engine": "a"}) == 0
    assert get("kvboost_requests_total", {"engine": "a"}) is None
    assert get("kvboost_prompt_tokens_total", {"engine": "b"}) > 0


def test_registering_asks_no_engine() -> None:
    class Silent:
        def stats(self, *, sizes: bool = True) -> dict[str, object]:
            raise AssertionError("asked")

    registry_of(Collector(Silent()))


def test_a_scrape_does_not_count_a_server_s_blocks(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    with make_engine(store=open_store(f"file://{tmp_path}/objects", memory_bytes=0)) as engine:
        engine.warm(DOCS)

        def walk(area: str) -> object:
            raise AssertionError("walked the server")

        engine.store.medium.entries = walk  # type: ignore[attr-defined]
        registry = registry_of(Collector(engine))
        assert value(registry, "store_writes_total", tier="file") == len(DOCS)
        assert value(registry, "store_blocks", tier="file") is None


def test_without_the_library_the_error_names_the_command(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvboost-rag\[metrics\]'"):
        Collector(engine)
