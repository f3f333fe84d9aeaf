"""Quotas of tenants on servers: exact on one Redis server, as good as its kind allows elsewhere."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import BlockStore, DiskStore, Miss, RemoteStore, TieredStore, open_store
from kvboost_rag.store.disk_files import block_name
from kvboost_rag.store.remote_quota import MarkLedger, tenant_of
from tests.store.blocks import make_block, same
from tests.store.conftest import RedisServer
from tests.store.test_remote import Shelf

A = [make_block(i, layers=8, salt="tenant-a") for i in range(6)]
B = [make_block(i, layers=8, salt="tenant-b") for i in range(6)]
ONE = max(len(encode_block(block)) for block in A + B)


def open_url(url: str, quota: float = 3) -> RemoteStore:
    store = open_store(url, memory_bytes=0, tenant_bytes=int(quota * ONE))
    assert isinstance(store, RemoteStore)
    return store


def held(store: BlockStore, blocks: list[Block]) -> list[int]:
    return [i for i, block in enumerate(blocks) if not isinstance(store.get(block.key), Miss)]


def test_a_tenant_over_its_quota_loses_its_own_oldest(remote_url: str) -> None:
    with open_url(remote_url) as store:
        for block in [*B[:2], *A]:
            assert store.put(block)
        assert (held(store, A), held(store, B)) == ([3, 4, 5], [0, 1])
        assert same(store.get(A[3].key), A[3])
        assert store.stats().evictions == 3
        assert store.stats().tenant_bytes == 3 * ONE
        assert 2 * ONE < store.tenant_usage("tenant-a") <= 3 * ONE
        assert ONE < store.tenant_usage("tenant-b") <= 2 * ONE
        assert store.tenant_usage("nobody") == 0
        assert store.check() == []


def test_within_the_quotas_nobody_notices_the_others(remote_url: str) -> None:
    with open_url(remote_url) as store:
        for block in A[:3]:
            store.put(block)
        for block in B * 2:
            store.put(block)
        assert held(store, A) == [0, 1, 2]


def test_a_block_larger_than_the_quota_drives_nothing_out(remote_url: str) -> None:
    with open_url(remote_url) as store:
        assert store.put(A[0])
        assert not store.put(make_block(9, layers=64, salt="tenant-a"))
        assert held(store, A) == [0]


def test_another_machine_goes_on_counting(remote_url: str) -> None:
    with open_url(remote_url) as one:
        for block in A[:3]:
            one.put(block)
        with open_url(remote_url) as other:
            for block in A[3:]:
                other.put(block)
            assert other.tenant_usage("tenant-a") <= 3 * ONE
            assert held(other, A) == [3, 4, 5]


def test_what_was_deleted_no_longer_counts(remote_url: str) -> None:
    with open_url(remote_url) as store:
        for block in A[:3]:
            store.put(block)
        assert store.delete(A[1].key)
        assert store.tenant_usage("tenant-a") <= 2 * ONE
        assert store.put(A[3])
        assert held(store, A) == [0, 2, 3]
        assert store.put(A[1])  # the oldest goes
        assert held(store, A) == [1, 2, 3]


def test_a_block_that_was_lost_and_written_again_counts_once(remote_url: str) -> None:
    with open_url(remote_url) as store:
        for _ in range(4):
            for block in A[:2]:
                assert store.put(block)
                store.medium.delete([str(block_name(block.key))])  # by somebody else
        for block in A[:3]:
            assert store.put(block)
        assert held(store, A) == [0, 1, 2]
        assert store.tenant_usage("tenant-a") <= 3 * ONE


def test_blocks_from_before_the_quota_count_after_a_check(remote_url: str) -> None:
    with open_store(remote_url, memory_bytes=0) as plain:
        for block in [*A, *B[:1]]:
            plain.put(block)
    with open_url(remote_url) as store:
        assert store.tenant_usage("tenant-a") == 0
        assert store.check() == []
        assert store.tenant_usage("tenant-a") == 0
        assert store.check(fix=True) == []
        assert 2 * ONE < store.tenant_usage("tenant-a") <= 3 * ONE
        assert (len(held(store, A)), held(store, B)) == (3, [0])
        before = held(store, A)
        assert store.check(fix=True) == []
        assert held(store, A) == before


def test_clear_forgets_the_tenants_even_without_a_quota(remote_url: str) -> None:
    with open_url(remote_url) as store:
        for block in A[:3]:
            store.put(block)
    with open_store(remote_url, memory_bytes=0) as plain:
        assert plain.stats().tenant_bytes is None
        assert plain.clear() == 3
    with open_url(remote_url) as store:
        assert store.tenant_usage("tenant-a") == 0


def test_tiers_in_front_of_a_server_have_the_quota_too(redis_url: str, tmp_path: Path) -> None:
    with open_store(redis_url, tenant_bytes=3 * ONE) as store:
        assert isinstance(store, TieredStore)
        assert [tier.stats().tenant_bytes for tier in store.tiers] == [3 * ONE, 3 * ONE]
        for block in A:
            store.put(block)
        assert store.tiers[-1].contains(A[5].key)
        assert not store.tiers[-1].contains(A[0].key)


# -- Redis -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_what_is_used_stays_longer(kind: str, request: pytest.FixtureRequest) -> None:
    with open_url(request.getfixturevalue(f"{kind}_url")) as store:
        for block in A[:3]:
            store.put(block)
        store.get(A[0].key)
        store.touch(A[1].key)  # a tier in front had it
        store.put(A[3])
        assert held(store, A[:4]) == [0, 1, 3]


SUM = "local n = 0 for _, k in ipairs(ARGV) do n = n + redis.call('STRLEN', k) end return n"


def stored(store: RemoteStore, salt: str) -> tuple[int, int]:
    """(bytes of a tenant's values that are there, bytes by the ledger)."""
    names = [name for name, _ in store.medium.entries("blocks")]
    values = store.medium.read(names, 1 << 20)
    mine = {str(block_name(block.key)) for block in MANY if block.header.salt == salt}
    return sum(len(v) for n, v in zip(names, values, strict=True) if n in mine), store.tenant_usage(salt)  # type: ignore[arg-type,misc]


MANY = [make_block(i, layers=8, salt=f"tenant-{i % 2}") for i in range(60)]


def test_on_one_server_the_quota_holds_exactly_whoever_writes(redis_server: RedisServer, redis_url: str) -> None:
    import redis

    stores = [open_url(redis_url, 4) for _ in range(4)]
    most, stop, prefix = [0], threading.Event(), redis_url.split("prefix=")[1]
    keys = [f"{prefix}{block_name(block.key)}" for block in MANY]

    def watch() -> None:
        with redis.Redis.from_url(redis_server.url) as client:
            while not stop.is_set():  # at one moment, as a script sees it
                most[0] = max(most[0], client.eval(SUM, 0, *keys[::2]), client.eval(SUM, 0, *keys[1::2]))

    def work(store: RemoteStore) -> None:
        for block in MANY:
            store.put(block)

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    for salt in ("tenant-0", "tenant-1"):
        there, entered = stored(stores[0], salt)
        assert 0 < there == entered <= 4 * ONE
    assert 0 < most[0] <= 4 * ONE
    for store in stores:
        store.close()


def test_on_a_cluster_several_writers_end_within_the_quota(cluster_url: str) -> None:
    stores = [open_url(cluster_url, 4) for _ in range(2)]
    threads = [threading.Thread(target=lambda s=s: [s.put(block) for block in MANY]) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for salt in ("tenant-0", "tenant-1"):
        there, entered = stored(stores[0], salt)
        assert 0 < there <= 4 * ONE
        assert entered <= 4 * ONE
    for store in stores:
        store.close()


def test_the_time_to_live_is_kept(redis_server: RedisServer, redis_url: str) -> None:
    import redis

    with open_store(redis_url, memory_bytes=0, tenant_bytes=3 * ONE, ttl_s=1000) as store:
        assert store.put(A[0])
        prefix = redis_url.split("prefix=")[1]
        with redis.Redis.from_url(redis_server.url) as client:
            assert 900 < client.ttl(f"{prefix}{block_name(A[0].key)}") <= 1000


@pytest.mark.parametrize("spoil", ["sum", "size", "type"])
def test_spoilt_books_break_nothing(spoil: str, redis_server: RedisServer, redis_url: str) -> None:
    import redis

    prefix = redis_url.split("prefix=")[1]
    books = f"{prefix}quota:{{{tenant_of('tenant-a')}}}:bytes"
    with open_url(redis_url) as store, redis.Redis.from_url(redis_server.url) as client:
        for block in A[:3]:
            store.put(block)
        if spoil == "type":
            client.delete(books)
            client.set(books, "x")
        else:
            client.hset(books, "" if spoil == "sum" else str(block_name(A[0].key)), "many")
        for block in A[3:]:
            assert store.put(block) == (spoil != "type")
        assert len(held(store, A)) >= 2
        assert store.clear() >= 2
        assert store.put(A[0])


def test_a_writer_that_died_between_the_books_and_the_value_costs_nothing(cluster_url: str) -> None:
    with open_url(cluster_url) as store:
        ledger: Any = store.medium.ledger()
        write, ledger._values.write = ledger._values.write, lambda name, value: None
        ledger.write(str(block_name(A[0].key)), encode_block(A[0]), tenant_of("tenant-a"), 3 * ONE)
        ledger._values.write = write
        for block in A[1:4]:
            store.put(block)
        assert held(store, A) == [1, 2, 3]


@pytest.mark.parametrize("quota", [0, 3])
def test_a_server_whose_memory_is_full_is_a_skipped_write(
    quota: int, redis_server: RedisServer, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    import redis

    with open_url(redis_url, quota) as store, redis.Redis.from_url(redis_server.url) as client:
        assert store.put(A[0])
        client.config_set("maxmemory", 1)
        try:
            assert not store.put(A[1])
            assert not store.put(A[2])
        finally:
            client.config_set("maxmemory", 0)
        assert store.stats().skipped_writes == 2
        assert held(store, A) == [0]
        assert len([r for r in caplog.records if "not stored" in r.message]) == 1


# -- who asks learns nothing of the others -----------------------------------------------------------------------------


def test_a_look_up_takes_the_same_steps_whether_another_tenant_has_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = (make_block(1, salt=salt) for salt in ("me", "them"))
    steps: list[str] = []
    for name in ("stat", "lstat", "open"):
        real = getattr(os, name)

        def noted(path: Any, *args: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            steps.append(f"{name} {str(path).replace(str(tmp_path / where), '')}")
            return real(path, *args, **more)

        monkeypatch.setattr(os, name, noted)
    seen = []
    for where in ("alone", "beside"):
        with DiskStore(tmp_path / where, tenant_bytes=1 << 20) as store:
            if where == "beside":
                store.put(theirs)
            steps.clear()
            assert store.get(mine.key) == Miss("absent")
            seen.append(list(steps))
    assert seen[0] == seen[1] != []
    seen = []
    for shelf in (Shelf(), Shelf()):
        with RemoteStore(shelf, tenant_bytes=1 << 20) as store:
            if seen:
                store.put(theirs)
            shelf.calls.clear()
            assert store.get(mine.key) == Miss("absent")
            seen.append(list(shelf.calls))
    assert seen == [["read"], ["read"]]


# -- values alone ------------------------------------------------------------------------------------------------------


def test_marks_name_no_salt_and_hostile_ones_are_left_out() -> None:
    shelf = Shelf()
    tenant = tenant_of("tenant-a")
    with RemoteStore(shelf, tenant_bytes=3 * ONE) as store:
        for name in ("x", "-1-5-zz", "0" * 12 + "-99999999999999999-" + "a" * 64, "../../etc/passwd"):
            shelf.values[f"tenants/{tenant}/{name}"] = b"1"
        for block in A[:3]:
            store.put(block)
        assert held(store, A) == [0, 1, 2]
    assert not any("tenant-a" in name for name in shelf.values)


def test_two_machines_may_overshoot_until_they_look_again() -> None:
    shelf, now = Shelf(), [1000.0]
    one, other = (MarkLedger(shelf, lambda: now[0]) for _ in range(2))
    names, tenant = [str(block_name(block.key)) for block in A], tenant_of("tenant-a")
    for i, ledger in enumerate([one, other, one, other]):
        now[0] += 1
        ledger.write(names[i], b"x" * 100, tenant, 200)
    assert len([n for n in shelf.values if n.startswith("blocks/")]) in (3, 4)  # advisory
    now[0] += 61
    one.write(names[4], b"x" * 100, tenant, 200)
    assert sorted(n for n in shelf.values if n.startswith("blocks/")) == sorted([names[3], names[4]])


def test_a_block_that_is_dropped_from_the_books_while_it_is_written_does_not_stay() -> None:
    """Of two threads that write for one tenant, the second may drop what the first is only about to write."""
    begun, go = threading.Event(), threading.Event()

    class Slow(Shelf):
        def write(self, name: str, value: bytes) -> None:
            if name == names[0]:
                begun.set()
                go.wait(30)
            super().write(name, value)

    names = [str(block_name(make_block(i).key)) for i in range(3)]
    shelf, tenant = Slow(), tenant_of("a")
    ledger = MarkLedger(shelf)
    first = threading.Thread(target=ledger.write, args=(names[0], b"x" * 100, tenant, 250))
    first.start()
    assert begun.wait(30)
    for name in names[1:]:
        ledger.write(name, b"x" * 100, tenant, 250)
    go.set()
    first.join()
    assert ledger.held(tenant) == 200
    assert sorted(name for name in shelf.values if name.startswith("blocks/")) == sorted(names[1:])


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_a_block_that_is_written_again_while_it_is_removed_goes_on_counting(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Between the removal of the value and of its entry another machine may have written both anew."""
    tenant = tenant_of("tenant-a")
    with open_url(request.getfixturevalue(f"{kind}_url")) as store:
        store.put(A[0])
        ledger = store.medium.ledger()
        held = ledger.held(tenant)
        assert held > 0
        ledger.removed(str(block_name(A[0].key)), tenant)
        assert ledger.held(tenant) == held
        store.delete(A[0].key)
        assert ledger.held(tenant) == 0
