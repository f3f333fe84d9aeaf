"""Tenants and the store's options on the command line: they reach the store, and a salt is shown nowhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag.cli import common, jobs, ray_jobs
from kvboost_rag.cli.common import EngineOptions
from kvboost_rag.store import DiskStore, MemoryStore, TieredStore, open_store
from kvboost_rag.warmup import WarmReport
from tests.cli.conftest import FakeEngine, run
from tests.store.blocks import make_block

SECRET = "s3cr3t-of-the-tenant"
STORE_WORDS = "--tenant-bytes 1GiB --compression int8+zstd --memory-limit 0 --policy lfu --ttl 30d --write-back".split()
ASK = ["ask", "How?"]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Blocks are stored under the hash of their content.")
    return tmp_path / "docs"


@pytest.fixture(params=["option", "file", "environment"])
def salted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A salt, given in each of the ways."""
    if request.param == "environment":
        monkeypatch.setenv("KVBOOST_SALT", SECRET)
        return []
    (tmp_path / "salt").write_text(f"{SECRET}\n")
    return ["--salt", SECRET if request.param == "option" else f"@{tmp_path / 'salt'}"]


@pytest.mark.parametrize("command", [["warmup"], ASK])
def test_options_reach_the_engine(command: list[str], docs: Path, engine: FakeEngine, salted: list[str]) -> None:
    result = run(*command, docs, "--store", "kv", *STORE_WORDS, *salted)
    assert result.exit_code == 0, result.output
    assert engine.options
    kwargs = engine.options.kwargs()
    given = {name: kwargs[name] for name in ("salt", "tenant_bytes", "compression", "memory_bytes")}
    assert given == {"salt": SECRET, "tenant_bytes": 1 << 30, "compression": "int8+zstd", "memory_bytes": 0}
    assert engine.options.opening == {"policy": "lfu", "ttl_s": 30 * 86400, "write": "back"}
    assert SECRET not in result.output
    assert SECRET not in repr(engine.options)


def test_without_a_word_nothing_is_passed(docs: Path, engine: FakeEngine) -> None:
    run("warmup", docs, "--store", "kv")
    assert engine.options
    assert set(engine.options.kwargs()) == {"store", "dtype", "device"}
    assert engine.options.opened() == "kv"


def test_what_the_engine_has_no_words_for_opens_the_store(tmp_path: Path) -> None:
    opening = {"policy": "lfu", "ttl_s": 60.0}
    store = EngineOptions("m", str(tmp_path), "auto", "auto", None, tenant_bytes=1 << 20, opening=opening).opened()
    assert isinstance(store, TieredStore)
    stats = store.stats()
    assert (stats.policy, stats.ttl_s, stats.tenant_bytes) == ("lfu", 60.0, 1 << 20)
    store.close()


def test_make_engine_hands_everything_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvboost_rag

    seen: dict[str, Any] = {}
    monkeypatch.setattr(kvboost_rag.KVBoost, "from_pretrained", lambda name, **options: seen.update(options))
    common.make_engine(EngineOptions("m", str(tmp_path), "auto", "auto", None, salt=SECRET, opening={"policy": "lfu"}))
    assert seen["salt"] == SECRET
    assert isinstance(seen["store"], TieredStore)
    seen["store"].close()


def test_jobs_get_the_salt_by_their_environment(
    docs: Path, engine: FakeEngine, salted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Process:
        def __init__(self, words: list[str], env: dict[str, str], **rest: object) -> None:
            started.append((words, env))
            raise KeyboardInterrupt

    monkeypatch.setattr(jobs.subprocess, "Popen", Process)
    run("warmup", docs, "--store", "kv", "--jobs", 2, "--tenant-bytes", "5MB", *salted)
    (words, env) = started[0]
    assert env["KVBOOST_SALT"] == SECRET
    assert SECRET not in " ".join(words)
    assert "--salt" not in words
    assert words[words.index("--tenant-bytes") + 1] == "5000000"


def test_ray_s_tasks_get_the_salt_by_their_environment(
    docs: Path, engine: FakeEngine, salted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def run_on_ray(arguments: list[str], count: int | None, **options: Any) -> WarmReport:
        seen.update(options, arguments=arguments)
        return WarmReport()

    monkeypatch.setattr(ray_jobs, "run_on_ray", run_on_ray)
    run("warmup", docs, "--store", "redis://cache/0", "--ray", *salted)
    assert seen["secrets"] == {"KVBOOST_SALT": SECRET}
    assert "--salt" not in seen["arguments"]
    assert SECRET not in seen["arguments"]


def test_a_salt_file_that_cannot_be_read_is_status_2(docs: Path, engine: FakeEngine) -> None:
    result = run("warmup", docs, "--store", "kv", "--salt", "@/nowhere/salt")
    assert result.exit_code == 2
    assert "/nowhere/salt cannot be read" in result.stderr


def test_help_names_the_variable_and_not_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_SALT", SECRET)
    for words in (["warmup"], ["ask"], ["verify"], ["store", "stats"]):
        result = run(*words, "--help")
        assert "KVBOOST_SALT" in result.stdout
        assert SECRET not in result.output


# -- store -------------------------------------------------------------------------------------------------------------


def test_stats_say_what_a_tenant_holds(tmp_path: Path, salted: list[str]) -> None:
    folder = tmp_path / "kv"
    with DiskStore(folder, tenant_bytes=1 << 20) as store:
        store.put(make_block(1, salt=SECRET))
        store.put(make_block(2))
        held = store.tenant_usage(SECRET)
    assert held > 0
    result = run("store", "stats", "--store", folder, "--json", *salted)
    assert json.loads(result.stdout)["tenant_usage"] == held
    result = run("store", "stats", "--store", folder, *salted)
    assert "this tenant:" in result.stdout
    assert SECRET not in result.output


def test_set_changes_what_a_folder_remembers(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for i in range(4):
            store.put(make_block(i))
        limit = store.stats().bytes // 2
    words = f"--limit {limit} --tenant-bytes 1MiB --compression int8 --policy cost --ttl 1d".split()
    result = run("store", "set", "--store", tmp_path, "--json", *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    names = ("limit_bytes", "tenant_bytes", "compression", "policy", "ttl_s", "blocks")
    assert [found[name] for name in names] == [limit, 1 << 20, "int8", "cost", 86400.0, 2]
    again = json.loads(run("store", "stats", "--store", tmp_path, "--json").stdout)
    assert [again[name] for name in names] == [found[name] for name in names]


def test_check_makes_a_server_s_old_blocks_count(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    url = f"file://{tmp_path}/objects"
    with open_store(url, memory_bytes=0) as store:
        for i in range(4):
            store.put(make_block(i, salt=SECRET))
        half = store.stats().bytes // 2
    assert run("store", "check", "--store", url, "--fix", "--tenant-bytes", half).exit_code == 0
    with open_store(url, memory_bytes=0) as store:
        assert store.stats().blocks == 2
    for words in (["--store", url, "--tenant-bytes", half], ["--store", tmp_path, "--fix", "--tenant-bytes", half]):
        assert run("store", "check", *words).exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--compression", "zip"],
        ["--policy", "mru"],
        ["--tenant-bytes", "many"],
        ["--store", "redis://x/0", "--ttl", "1d"],
    ],
)
def test_set_of_what_makes_no_sense_is_status_2(words: list[str], tmp_path: Path) -> None:
    DiskStore(tmp_path).close()
    assert run("store", "set", "--store", tmp_path, *words).exit_code == 2


def test_a_tenant_s_usage_in_memory_is_known() -> None:
    store = MemoryStore(tenant_bytes=1 << 20)
    store.put(make_block(1, salt=SECRET))
    assert TieredStore([store]).tenant_usage(SECRET) == store.tenant_usage(SECRET) > 0
    assert os.environ.get("KVBOOST_SALT") is None


@pytest.mark.parametrize("command", [["warmup"], ASK])
def test_an_empty_salt_is_not_taken_for_none(command: list[str], docs: Path, engine: FakeEngine) -> None:
    """A secret that was not mounted must not put a tenant's texts among everybody's."""
    (docs.parent / "salt").write_text("\n")
    for salt in ("", f"@{docs.parent / 'salt'}"):
        result = run(*command, docs, "--store", "kv", "--salt", salt)
        assert result.exit_code == 2
        assert "an empty salt" in result.stderr
