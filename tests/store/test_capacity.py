"""Limits, who goes first, pins, time to live, and deletion by tag."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvboost_rag.errors import StoreError, UnknownOptionError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import BlockStore, DiskStore, MemoryStore, Miss, NullStore, TieredStore, open_store
from kvboost_rag.store.policy import POLICIES
from tests.store.blocks import make_block, same

BLOCKS = [make_block(i, layers=8) for i in range(8)]
SIZE = max(len(encode_block(replace(b, header=replace(b.header, cost_s=1.5)))) for b in BLOCKS)


def held(store: BlockStore, blocks: list[Block] | None = None) -> list[int]:
    return [i for i, block in enumerate(blocks or BLOCKS) if store.contains(block.key)]


def fill(store: BlockStore, count: int = 6) -> None:
    for block in BLOCKS[:count]:
        assert store.put(block)


# -- prune -------------------------------------------------------------------------------------------------------------


def test_prune_by_size_drops_the_least_recently_used(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        fill(store)
        store.get(BLOCKS[0].key)
        assert store.prune(max_bytes=2 * SIZE) == 4
        assert held(store) == [0, 5]
        assert store.stats().bytes <= 2 * SIZE
        assert store.prune(max_bytes=2 * SIZE) == 0
        assert store.prune(max_bytes=0) == 2
        assert (held(store), store.stats().blocks, store.stats().bytes) == ([], 0, 0)
        assert store.check() == []


def test_prune_by_age_of_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path) as store:
        fill(store, 4)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 1000)
        store.get(BLOCKS[2].key)
        assert store.prune(older_than_s=2000) == 0
        assert store.prune(older_than_s=500) == 3
        assert held(store) == [2]


def test_prune_of_tiers_leaves_memory_alone(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert isinstance(store, TieredStore)
        fill(store)
        assert store.prune(max_bytes=0) == 6
        assert held(store.tiers[1]) == []
        assert same(store.get(BLOCKS[0].key), BLOCKS[0])


@pytest.mark.parametrize("limits", [{"max_bytes": -1}, {"older_than_s": -0.5}, {"older_than_s": float("nan")}])
def test_prune_limits_that_make_no_sense(tmp_path: Path, limits: dict[str, float]) -> None:
    with DiskStore(tmp_path) as store, pytest.raises(UsageError):
        store.prune(**limits)  # type: ignore[arg-type]


def test_what_cannot_be_pruned_says_so() -> None:
    for store in (MemoryStore(), NullStore(), TieredStore([MemoryStore()])):
        with pytest.raises(UsageError, match="cannot be pruned"):
            store.prune(max_bytes=0)


def test_maintenance_without_an_index_is_an_error_with_a_hint(tmp_path: Path) -> None:
    import sqlite3

    with DiskStore(tmp_path, lock_timeout_s=0.01) as store:
        fill(store, 2)
        other = sqlite3.connect(tmp_path / "index" / "cache.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        try:
            with pytest.raises(StoreError) as caught:
                store.prune(max_bytes=0)
            assert caught.value.hint
            assert store.delete_tagged("none") == 0  # deletion goes by the files then
        finally:
            other.close()
        assert store.prune(max_bytes=0) == 2


# -- policies ----------------------------------------------------------------------------------------------------------


def test_least_frequently_used(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 3 * SIZE, policy="lfu") as store:
        fill(store, 3)
        for i, uses in ((0, 1), (1, 3), (2, 2)):
            for _ in range(uses):
                store.get(BLOCKS[i].key)
                store.flush()
        assert store.put(BLOCKS[3])
        assert held(store) == [1, 2, 3]  # the new one was used least, but must have its chance
        assert store.put(BLOCKS[4])
        assert held(store) == [1, 2, 4]


def test_the_cheapest_to_compute_again_goes_first(tmp_path: Path) -> None:
    costs = [5.0, 0.1, 3.0, 1.0, 1.0]
    blocks = [replace(b, header=replace(b.header, cost_s=c)) for b, c in zip(BLOCKS, costs, strict=False)]
    with DiskStore(tmp_path, 3 * SIZE, policy="cost") as store:
        for block in blocks[:4]:
            assert store.put(block)
        assert held(store, blocks) == [0, 2, 3]
        (tmp_path / "index" / "cache.db").unlink()
    with DiskStore(tmp_path) as store:  # costs come from the blocks' own headers, the policy from the folder
        assert store.put(blocks[4])
        assert held(store, blocks) == [0, 2, 4]


def test_what_is_expensive_but_unused_loses_its_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, young, new = (
        replace(b, header=replace(b.header, cost_s=c)) for b, c in zip(BLOCKS, (9.0, 0.1, 1.0), strict=False)
    )
    with DiskStore(tmp_path, 2 * SIZE, policy="cost") as store:
        store.put(old)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 1e6)
        store.put(young)
        store.put(new)
        assert held(store, [old, young, new]) == [1, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_the_limit(tmp_path: Path, policy: str) -> None:
    with DiskStore(tmp_path, 3 * SIZE, policy=policy) as store:
        for block in BLOCKS:
            assert store.put(block)
            assert store.contains(block.key)
        assert sum(path.stat().st_size for path in store.files.walk()) <= 3 * SIZE
        assert store.stats().policy == policy
        assert store.check() == []


# -- what a folder remembers -------------------------------------------------------------------------------------------


def test_the_folder_remembers_its_settings(tmp_path: Path) -> None:
    DiskStore(tmp_path, 5 * SIZE, policy="lfu", ttl_s=3600, compression="int8").close()
    with DiskStore(tmp_path) as store:
        stats = store.stats()
        assert (stats.limit_bytes, stats.policy, stats.ttl_s, stats.compression) == (5 * SIZE, "lfu", 3600, "int8")
    with DiskStore(tmp_path, 7 * SIZE, ttl_s=0) as store:
        assert (store.stats().limit_bytes, store.stats().policy, store.stats().ttl_s) == (7 * SIZE, "lfu", None)


def test_a_smaller_limit_holds_at_once(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        fill(store)
    with DiskStore(tmp_path, 2 * SIZE) as store:
        assert store.stats().bytes <= 2 * SIZE
        assert held(store) == [4, 5]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"[]", b'{"limit_bytes": "many"}', os.urandom(99)])
def test_unreadable_settings_are_the_defaults(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    DiskStore(tmp_path, policy="lfu").close()
    (tmp_path / "settings.json").write_bytes(content)
    with DiskStore(tmp_path) as store:
        assert (store.stats().policy, store.stats().limit_bytes) == ("lru", 20 << 30)
    assert caplog.records or content == b"[]"


def test_one_bad_setting_does_not_spoil_the_others(tmp_path: Path) -> None:
    DiskStore(tmp_path).close()
    (tmp_path / "settings.json").write_text(json.dumps({"policy": "magic", "limit_bytes": 12345, "later": 1}))
    with DiskStore(tmp_path) as store:
        assert (store.stats().policy, store.stats().limit_bytes) == ("lru", 12345)


@pytest.mark.parametrize("given", [{"policy": "magic"}, {"compression": "int3"}])
def test_names_that_do_not_exist(tmp_path: Path, given: dict[str, str]) -> None:
    with pytest.raises(UnknownOptionError):
        DiskStore(tmp_path / "new", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("given", [{"ttl_s": -1}, {"ttl_s": float("nan")}, {"limit_bytes": 0}, {"min_free_bytes": -1}])
def test_numbers_that_make_no_sense(tmp_path: Path, given: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        DiskStore(tmp_path / "new", **given)  # type: ignore[arg-type]


# -- pins --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_pinned_blocks_stay(tmp_path: Path, kind: str) -> None:
    size = SIZE if kind == "disk" else BLOCKS[0].nbytes
    store = DiskStore(tmp_path, 4 * size) if kind == "disk" else MemoryStore(4 * size)
    with store:
        fill(store, 4)
        assert store.pin([BLOCKS[0].key, BLOCKS[7].key, "nonsense"]) == 1
        assert store.pin([BLOCKS[0].key]) == 1
        for block in BLOCKS[4:]:
            assert store.put(block)
        assert held(store) == [0, 5, 6, 7]
        assert store.stats().pinned == 1
        store.unpin([BLOCKS[0].key])
        assert store.put(BLOCKS[1])
        assert held(store) == [1, 5, 6, 7]


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_pins_are_capped_at_half_of_the_limit(tmp_path: Path, kind: str) -> None:
    size = SIZE if kind == "disk" else BLOCKS[0].nbytes
    store = DiskStore(tmp_path, 5 * size) if kind == "disk" else MemoryStore(5 * size)
    with store:
        fill(store, 5)
        assert store.pin([block.key for block in BLOCKS]) == 2
        assert store.stats().pinned == 2
        for block in BLOCKS:
            assert store.put(block)


def test_pins_survive_a_new_process_and_a_lost_index(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 4 * SIZE) as store:
        fill(store, 2)
        store.pin([BLOCKS[0].key])
    (tmp_path / "index" / "cache.db").unlink()
    with DiskStore(tmp_path) as store:
        for block in BLOCKS[1:]:
            store.put(block)
        assert 0 in held(store)
        assert store.prune(older_than_s=0) == 3
        assert held(store) == [0]
        assert store.prune(max_bytes=0) == 1  # a hard limit is harder than a pin
        fill(store, 1)
        assert store.delete(BLOCKS[0].key)
        assert list((tmp_path / "pins").iterdir()) == []


# -- time to live ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "memory", "tiered"])
def test_expired_blocks_are_misses_with_that_reason(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    block = make_block(1, created_s=now)
    spec = "memory" if kind == "memory" else tmp_path
    with open_store(spec, memory_bytes=0 if kind == "disk" else None, ttl_s=60) as store:
        store.put(block)
        assert same(store.get(block.key), block)
        monkeypatch.setattr(time, "time", lambda: now + 61)
        miss = store.get(block.key)
        assert isinstance(miss, Miss)
        assert (miss.reason, "60" in miss.detail) == ("expired", True)
        assert not store.contains(block.key)
        assert store.stats().misses == {"expired": 1}


def test_a_block_without_a_time_expires_by_when_it_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path, ttl_s=60) as store:
        fill(store, 3)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 61)
        miss = store.get(BLOCKS[0].key)
        assert isinstance(miss, Miss)
        assert miss.reason == "expired"
        assert store.prune() == 2  # nobody asks for the others: prune finds them
        assert store.stats().blocks == 0


# -- deletion by tag ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "memory", "tiered"])
def test_delete_by_tag(tmp_path: Path, kind: str) -> None:
    tags = [("doc",), ("doc", "x"), ("document",), (), ('do"c', "é"), ("%",), ('["doc"]',)]
    blocks = [make_block(i, tags=t) for i, t in enumerate(tags)]
    with open_store("memory" if kind == "memory" else tmp_path, memory_bytes=0 if kind == "disk" else None) as store:
        for block in blocks:
            store.put(block)
        assert store.delete_tagged("doc") == 2
        assert held(store, blocks) == [2, 3, 4, 5, 6]
        assert store.delete_tagged('do"c') == 1
        assert store.delete_tagged("é") == 0
        assert store.delete_tagged("nobody") == 0
        assert store.check() == []


def test_delete_by_tag_finds_files_that_the_index_does_not_know(tmp_path: Path) -> None:
    block, damaged = make_block(1, tags=("doc",)), make_block(2, tags=("doc",))
    with DiskStore(tmp_path) as store:
        store.put(block)
        store.put(damaged)
        path = store.files.path(damaged.key)
        assert path is not None
        path.write_bytes(path.read_bytes()[:-1])
        store.get(damaged.key)  # now in the quarantine
        store.index.run(lambda cache: cache._sql("DELETE FROM Cache"))
        assert store.delete_tagged("doc") == 1
        assert [p for p in tmp_path.rglob("*") if p.suffix == ".kvb" or "damaged" in p.name] == []
