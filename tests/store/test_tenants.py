"""One store, several tenants: who has too much loses blocks of his own, and nobody learns of the others."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import BlockStore, DiskStore, MemoryStore, Miss, TieredStore, open_store
from kvboost_rag.store.policy import POLICIES
from tests.store.blocks import make_block, same

A = [make_block(i, layers=8, salt="tenant-a") for i in range(6)]
B = [make_block(i, layers=8, salt="tenant-b") for i in range(6)]
KINDS = ["disk", "memory"]


def size(kind: str) -> int:
    return A[0].nbytes if kind == "memory" else max(len(encode_block(block)) for block in A + B)


def make(kind: str, folder: Path, quota: float, limit: float = 100) -> DiskStore | MemoryStore:
    """A store with room for ``limit`` blocks, ``quota`` of them for each tenant."""
    one = size(kind)
    if kind == "memory":
        return MemoryStore(int(limit * one), tenant_bytes=int(quota * one))
    return DiskStore(folder, int(limit * one), tenant_bytes=int(quota * one))


def held(store: BlockStore, blocks: list[Block]) -> list[int]:
    return [i for i, block in enumerate(blocks) if store.contains(block.key)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tenant_over_its_quota_loses_its_own(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path, quota=3) as store:
        for block in [*B[:2], *A]:
            assert store.put(block)
        assert (held(store, A), held(store, B)) == ([3, 4, 5], [0, 1])
        assert same(store.get(A[3].key), A[3])
        assert store.put(A[0])  # the least recently used of its own goes
        assert held(store, A) == [0, 3, 5]
        assert (store.stats().tenants, store.stats().evictions) == (2, 4)
        assert store.tenant_usage("tenant-a") <= 3 * size(kind)
        assert store.tenant_usage("tenant-b") <= 2 * size(kind)
        assert store.tenant_usage("nobody") == 0
        assert store.check() == []


@pytest.mark.parametrize("kind", KINDS)
def test_within_the_quotas_nobody_notices_the_others(kind: str, tmp_path: Path) -> None:
    """Where quotas add up to the limit, whatever one tenant does leaves the other's hits and misses as they were."""
    with make(kind, tmp_path, quota=3, limit=6) as store:
        for block in A[:3]:
            assert store.put(block)
        for _ in range(2):
            for block in B:
                assert store.put(block)
                store.get(block.key)
        assert held(store, A) == [0, 1, 2]
        assert [isinstance(store.get(block.key), Miss) for block in A] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_the_quota(policy: str, tmp_path: Path) -> None:
    one = size("disk")
    with DiskStore(tmp_path, 100 * one, tenant_bytes=3 * one, policy=policy) as store:
        for block in [x for pair in zip(A, B, strict=True) for x in pair]:
            assert store.put(block)
            assert store.contains(block.key)
        assert (len(held(store, A)), len(held(store, B))) == (3, 3)
        assert store.check() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_larger_than_the_quota_drives_nothing_out(kind: str, tmp_path: Path) -> None:
    large = make_block(9, layers=64, salt="tenant-a")
    with make(kind, tmp_path, quota=3) as store:
        assert store.put(A[0])
        assert not store.put(large)
        assert (held(store, A), store.stats().skipped_writes) == ([0], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_pins_take_half_of_a_quota_at_most(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path, quota=4) as store:
        for block in [*A[:4], *B[:4]]:
            store.put(block)
        assert store.pin([block.key for block in A]) == 2
        assert store.pin([block.key for block in B]) == 2
        for block in A[4:]:
            assert store.put(block)
        assert held(store, A) == [0, 1, 4, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_pins_leave_no_room_for_is_skipped(kind: str, tmp_path: Path) -> None:
    wide = make_block(9, layers=13, salt="tenant-a")
    with make(kind, tmp_path, quota=2) as store:
        assert store.put(A[0])
        assert store.put(A[1])
        assert store.pin([A[0].key]) == 1
        assert not store.put(wide)
        assert store.get(wide.key) == Miss("absent")
        assert A[0].key in store.keys()
        assert store.check() == []


def test_the_folder_remembers_the_quota_and_a_smaller_one_holds_at_once(tmp_path: Path) -> None:
    one = size("disk")
    with DiskStore(tmp_path, tenant_bytes=4 * one) as store:
        for block in [*A, *B[:1]]:
            store.put(block)
    with DiskStore(tmp_path) as store:
        assert (store.stats().tenant_bytes, held(store, A)) == (4 * one, [2, 3, 4, 5])
    with DiskStore(tmp_path, tenant_bytes=2 * one) as store:
        assert (held(store, A), held(store, B)) == ([4, 5], [0])
    with DiskStore(tmp_path, tenant_bytes=0) as store:
        for block in A:
            store.put(block)
        assert (store.stats().tenant_bytes, held(store, A)) == (None, [0, 1, 2, 3, 4, 5])


def test_a_quota_counts_what_was_there_before(tmp_path: Path) -> None:
    one = size("disk")
    with DiskStore(tmp_path) as store:
        for block in A + B[:2]:
            store.put(block)
        store.index.run(lambda cache: cache._sql("DELETE FROM Tenants"))  # as an older version left it
    with DiskStore(tmp_path, tenant_bytes=3 * one) as store:
        assert (held(store, A), held(store, B)) == ([3, 4, 5], [0, 1])


def test_a_lost_index_knows_the_tenants_again(tmp_path: Path) -> None:
    one = size("disk")
    with DiskStore(tmp_path, tenant_bytes=3 * one) as store:
        for block in A[:3] + B[:3]:
            store.put(block)
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    with DiskStore(tmp_path) as store:
        assert store.stats().tenants == 2
        store.put(A[3])
        assert (held(store, A), held(store, B)) == ([1, 2, 3], [0, 1, 2])


def test_files_without_rows_count_when_they_get_them(tmp_path: Path) -> None:
    one = size("disk")
    with DiskStore(tmp_path, tenant_bytes=3 * one, lock_timeout_s=0.01) as store:
        for block in A[:3]:
            store.put(block)
        other = sqlite3.connect(tmp_path / "index" / "cache.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        try:
            assert store.put(A[3])  # without the index
        finally:
            other.close()
        store.flush()
        assert held(store, A) == [1, 2, 3]
        assert store.check() == []


def test_the_index_does_not_show_salts(tmp_path: Path) -> None:
    with DiskStore(tmp_path, tenant_bytes=1 << 20) as store:
        store.put(A[0])
    with DiskStore(tmp_path / "other", tenant_bytes=1 << 20) as store:
        store.put(A[0])

    def tenant(folder: Path) -> str:
        with sqlite3.connect(folder / "index" / "cache.db") as db:
            return str(db.execute("SELECT tenant FROM Tenants").fetchone()[0])

    assert b"tenant-a" not in b"".join(path.read_bytes() for path in (tmp_path / "index").iterdir())
    assert tenant(tmp_path) != tenant(tmp_path / "other")  # keyed: equal salts of two stores cannot be told by it


@pytest.mark.parametrize("statement", ["UPDATE Tenants SET bytes = 'x'", "UPDATE TenantSecret SET secret = 5"])
def test_tampered_tables_are_built_again(statement: str, tmp_path: Path) -> None:
    one = size("disk")
    with DiskStore(tmp_path, tenant_bytes=3 * one) as store:
        for block in A[:3]:
            store.put(block)
        store.index.run(lambda cache: cache._sql(statement))
    with DiskStore(tmp_path) as store:
        assert store.put(A[3])
        assert len(held(store, A)) == 3
        assert store.tenant_usage("tenant-a") <= 3 * one


def test_memory_in_front_of_a_folder_has_the_same_share(tmp_path: Path) -> None:
    with open_store(tmp_path, memory_bytes=1000, limit_bytes=1 << 20, tenant_bytes=1 << 18) as store:
        assert isinstance(store, TieredStore)
        assert [tier.stats().tenant_bytes for tier in store.tiers] == [250, 1 << 18]
        assert store.stats().tenant_bytes == 1 << 18
    with open_store("memory", tenant_bytes=77) as memory:
        assert memory.stats().tenant_bytes == 77


@pytest.mark.parametrize("quota", [-1, 0.5, "1"])
def test_quotas_that_make_no_sense(quota: int, tmp_path: Path) -> None:
    for spec in ("memory", tmp_path / "new"):
        with pytest.raises(UsageError):
            open_store(spec, tenant_bytes=quota)
    assert not (tmp_path / "new").exists()
