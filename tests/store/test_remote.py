"""Servers that are shared, slow, dead, or lie. Never an exception, never a wrong block, never a long wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvboost_rag.errors import MissingExtraError, UnknownOptionError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import BlockStore, DiskStore, Miss, RemoteStore, TieredStore, open_store
from kvboost_rag.store.anchor_table import RECORD
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.disk_files import block_name
from kvboost_rag.store.remote_anchors import MERGE_FROM, AnchorSync
from kvboost_rag.store.remote_link import Breaker, Link, TooLarge, Unavailable
from kvboost_rag.store.remote_quota import MarkLedger
from kvboost_rag.store.remote_url import open_remote, parse_url
from tests.store.blocks import make_block, same
from tests.store.conftest import RedisServer

TEXTS = [f"a text that is long enough to be known, number {i}" for i in range(200)]


class Shelf:
    """A medium in memory that can fail on command."""

    kind = "shelf"
    max_value_bytes = 1 << 20

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.failures = 0  # of the next calls
        self.stuck: threading.Event | None = None
        self.piece = 1 << 16  # bytes of each value at a time, when streamed

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if self.stuck is not None:
            self.stuck.wait(30)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("redis://user:secret@host refused")

    def read(self, names: Sequence[str], limit: int) -> list[bytes | TooLarge | None]:
        self._called("read")
        found = [self.values.get(name) for name in names]
        return [v if v is None or len(v) <= limit else TooLarge(len(v)) for v in found]  # type: ignore[misc]

    def stream(
        self, names: Sequence[str], limit: int, starts: Sequence[int]
    ) -> Iterator[tuple[int, int | bytes | TooLarge | None]]:
        self._called("stream")
        values = [self.values.get(name) for name in names]
        for i, value in enumerate(values):
            yield i, None if value is None else len(value) if len(value) <= limit else TooLarge(len(value))
        at = list(starts)
        while left := [i for i, v in enumerate(values) if v is not None and at[i] < len(v) <= limit]:
            for i in left:
                yield i, values[i][at[i] : at[i] + self.piece]  # type: ignore[index]
                at[i] += self.piece

    def write(self, name: str, value: bytes) -> None:
        self._called("write")
        self.values[name] = bytes(value)

    def create(self, name: str, value: bytes) -> bool:
        self._called("create")
        return self.values.setdefault(name, value) is value

    def exists(self, name: str) -> bool:
        self._called("exists")
        return name in self.values

    def delete(self, names: Sequence[str]) -> int:
        self._called("delete")
        return sum(self.values.pop(name, None) is not None for name in names)

    def entries(self, area: str) -> Iterator[tuple[str, int]]:
        self._called("entries")
        return iter([(n, len(v)) for n, v in self.values.items() if n.startswith(f"{area}/")])

    def ledger(self) -> MarkLedger:
        return MarkLedger(self)

    def close(self) -> None:
        pass


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def store(shelf: Shelf) -> Iterator[RemoteStore]:
    link = Link(5.0, attempts=1, breaker=Breaker(failures=3, pause_s=1000))
    with RemoteStore(shelf, link=link, max_block_bytes=1 << 16) as store:
        yield store


def name_of(block: Block) -> str:
    return str(block_name(block.key))


def reason(found: Block | Miss) -> str:
    assert isinstance(found, Miss), found
    return found.reason


# -- one machine serves another ----------------------------------------------------------------------------------------


def test_what_one_machine_stored_serves_another(remote_url: str, tmp_path: Path) -> None:
    blocks = [make_block(i, tags=("doc",)) for i in range(3)]
    with open_store(remote_url, local=tmp_path / "one") as one:
        for block, text in zip(blocks, TEXTS, strict=False):
            assert one.put(block)
            one.anchors.add([(text, block.key)], salt="tenant")
        assert one.put_meta("head", b"[1]") == b"[1]"
    with open_store(remote_url, local=tmp_path / "two") as two:
        assert isinstance(two, TieredStore)
        assert two.put_meta("head", b"[2]") == b"[1]"
        spans = two.anchors.find(f"before {TEXTS[1]} between {TEXTS[2]} after", salt="tenant").spans
        assert [span.keys for span in spans] == [(blocks[1].key,), (blocks[2].key,)]
        assert not two.anchors.find(TEXTS[1]).spans  # another tenant knows nothing of it
        found = two.get_many([block.key for block in blocks])
        assert all(same(one, block) for one, block in zip(found, blocks, strict=True))
        assert [tier.stats().hits for tier in two.tiers] == [0, 0, 3]
        two.get_many([block.key for block in blocks])
        assert [tier.stats().hits for tier in two.tiers] == [3, 0, 3]  # promoted
    with DiskStore(tmp_path / "two") as disk:  # also to this machine's disk, with the known texts
        assert all(same(disk.get(block.key), block) for block in blocks)
        assert len(disk.anchors) == 3
        assert disk.get_meta("head") == b"[1]"


def test_texts_of_a_running_machine_arrive(remote_url: str) -> None:
    key = make_block(1).key
    with open_remote(remote_url) as one, open_remote(remote_url) as two:
        one.anchors.add([(text, key) for text in TEXTS[:5]])
        two.anchors.add([(text, key) for text in TEXTS[3:8]])
        one.flush()
        two.flush()
        assert (one.refresh(), two.refresh()) == (3, 3)
        assert len(one.anchors) == len(two.anchors) == 8
        assert (one.refresh(), two.refresh()) == (0, 0)


def test_texts_that_the_server_lost_are_sent_again(shelf: Shelf, tmp_path: Path) -> None:
    index = AnchorIndex(tmp_path / "anchors.bin")
    index.add([(text, make_block(1).key) for text in TEXTS])
    RemoteStore(shelf, anchors=index).close()
    with RemoteStore(shelf) as other:
        assert len(other.anchors) == len(TEXTS)


def test_small_batches_are_merged(shelf: Shelf) -> None:
    link = Link(5.0)
    sync = AnchorSync(AnchorIndex(), shelf, link)
    for text in TEXTS[: MERGE_FROM + 5]:
        sync.index.add([(text, make_block(1).key), (text, make_block(2).key)])
        assert sync.flush()
    other = AnchorSync(AnchorIndex(), shelf, link)
    assert other.refresh() == 2 * (MERGE_FROM + 5)
    assert len([n for n in shelf.values if n.startswith("anchors/")]) == 1
    assert sync.refresh() == other.refresh() == 0
    late = AnchorSync(AnchorIndex(), shelf, link)
    assert late.refresh() == 2 * (MERGE_FROM + 5)
    assert np.array_equal(np.unique(late.index.records()), np.unique(sync.index.records()))


def test_compressed_blocks_travel_as_they_are(remote_url: str, tmp_path: Path) -> None:
    block = make_block(1, tokens=40, head_dim=64)
    with open_store(remote_url, compression="int8") as one:
        one.put(block)
        first = one.get(block.key)
    with open_store(remote_url, local=tmp_path / "disk") as two:
        found = two.get(block.key)
        assert isinstance(first, Block)
        assert same(found, first)
        assert isinstance(two, TieredStore)
        assert same(two.tiers[1].get(block.key), first)
        assert (tmp_path / "disk" / name_of(block)).stat().st_size < block.nbytes / 3


def test_ttl_on_the_server(redis_server: RedisServer, redis_url: str) -> None:
    import redis

    with open_store(redis_url, memory_bytes=0, ttl_s=100) as store:
        assert isinstance(store, RemoteStore)
        block = make_block(1, created_s=time.time() - 101)
        store.put(block)
        client = redis.Redis.from_url(redis_server.url)
        assert 0 < client.ttl(store.medium._key(name_of(block))) <= 100  # type: ignore[attr-defined]
        assert reason(store.get(block.key)) == "expired"
        assert not store.contains(block.key)


def test_a_prefix_keeps_stores_apart(redis_url: str) -> None:
    with open_remote(redis_url) as one, open_remote(redis_url + "2") as two:
        one.put(make_block(1))
        one.put_meta("a", b"1")
        assert (list(two.keys()), two.get_meta("a"), two.clear()) == ([], None, 0)
        two.put(make_block(2))
        assert list(one.keys()) == [make_block(1).key]


# -- hostile values ----------------------------------------------------------------------------------------------------


def test_every_byte_of_a_value_flipped_in_turn(store: RemoteStore, shelf: Shelf) -> None:
    block = make_block(1, tokens=2, layers=1)
    store.put(block)
    name, good = name_of(block), shelf.values[name_of(block)]
    for i in range(len(good)):
        shelf.values[name] = good[:i] + bytes([good[i] ^ 0x41]) + good[i + 1 :]
        assert reason(store.get(block.key)) in ("damaged", "foreign")
    shelf.values[name] = good
    assert same(store.get(block.key), block)


@pytest.mark.parametrize("keep", [0, 7, 60, 300, -1])
def test_a_damaged_value_is_removed_and_can_be_written_again(store: RemoteStore, shelf: Shelf, keep: int) -> None:
    block = make_block(1)
    store.put(block)
    shelf.values[name_of(block)] = shelf.values[name_of(block)][:keep]
    assert reason(store.get(block.key)) == "damaged"
    assert name_of(block) not in shelf.values
    assert store.put(block)
    assert same(store.get(block.key), block)


def test_another_block_under_the_key_is_a_mismatch(store: RemoteStore, shelf: Shelf) -> None:
    block, other = make_block(1), make_block(2)
    shelf.values[name_of(block)] = encode_block(other)
    assert reason(store.get(block.key)) == "mismatch"


def test_a_value_of_another_version_is_left_to_others_until_we_write(store: RemoteStore, shelf: Shelf) -> None:
    block = make_block(1)
    later = encode_block(block).replace(b"kvboost_rag/3", b"kvboost_rag/9")
    shelf.values[name_of(block)] = later
    assert reason(store.get(block.key)) == "foreign"
    assert shelf.values[name_of(block)] == later
    assert store.put(block)
    assert same(store.get(block.key), block)


def test_oversized_values_are_not_fetched(remote_url: str) -> None:
    block = make_block(1)
    with open_remote(remote_url) as store:
        store.medium.write(name_of(block), bytes(3 << 20))
        store.max_block_bytes = 1 << 20
        assert store.medium.read([name_of(block)], 1 << 20) == [TooLarge(3 << 20)]
        miss = store.get(block.key)
        assert isinstance(miss, Miss)
        assert (miss.reason, str(3 << 20) in miss.detail) == ("foreign", True)
        assert not store.put(replace(block, kv=block.kv.repeat(4096, 1, 1, 1, 1)))  # nor written


def test_a_redis_key_of_another_type_is_damage(redis_server: RedisServer, redis_url: str) -> None:
    import redis

    block = make_block(1)
    with open_remote(redis_url) as store:
        key = store.medium._key(name_of(block))  # type: ignore[attr-defined]
        redis.Redis.from_url(redis_server.url).rpush(key, "x")
        assert reason(store.get(block.key)) == "damaged"
        assert store.put(block)
        assert same(store.get(block.key), block)


@pytest.mark.parametrize(
    "name", ["anchors/1-" + "0" * 32, "anchors/9999999-" + "0" * 32, "anchors/../../x", "anchors/"]
)
def test_hostile_batches_of_texts_are_left_out(shelf: Shelf, name: str) -> None:
    shelf.values[name] = bytes(64)
    with RemoteStore(shelf) as store:
        assert len(store.anchors) == 0


def test_malformed_records_in_a_sound_batch_are_left_out(shelf: Shelf) -> None:
    index = AnchorIndex()
    index.add([(text, make_block(1).key) for text in TEXTS[:3]])
    records = index.records().copy()
    records["sum"][1] ^= 1
    sync = AnchorSync(AnchorIndex(), shelf, Link(5.0))
    sync.note(np.concatenate([records, np.zeros(2, dtype=RECORD)]))
    assert sync.flush()
    with RemoteStore(shelf) as store:
        assert len(store.anchors) == 2


def test_a_damaged_manifest_entry_counts_as_unset(store: RemoteStore, shelf: Shelf) -> None:
    store.put_meta("head", b"first")
    (name,) = [n for n in shelf.values if n.startswith("meta/")]
    shelf.values[name] = shelf.values[name][:-1]
    assert store.get_meta("head") is None
    assert store.put_meta("head", b"second") == b"second"


def test_check_finds_damage_and_removes_it(remote_url: str) -> None:
    blocks = [make_block(i) for i in range(4)]
    with open_remote(remote_url) as store:
        for block in blocks:
            store.put(block)
        store.medium.write(name_of(blocks[0]), b"x" * 1000)
        store.medium.write(name_of(blocks[1]), encode_block(blocks[2]))
        store.medium.write("blocks/readme.txt", b"x")
        assert sorted(p.kind for p in store.check()) == ["foreign", "foreign", "mismatch"]
        assert all(p.fixed for p in store.check(fix=True))
        assert store.check() == []
        assert sorted(store.keys()) == sorted(b.key for b in blocks[2:])


# -- slow and dead servers ---------------------------------------------------------------------------------------------


def everything(store: BlockStore, block: Block) -> None:
    """All that an engine does, on a server that does not answer."""
    assert not store.contains(block.key)
    assert not store.delete(block.key)
    assert list(store.keys()) == []
    assert store.get_meta("head") is None
    assert store.put_meta("head", b"1") == b"1"
    assert store.put_meta("head", b"2") == b"1"
    store.anchors.add([(TEXTS[0], block.key)])
    assert store.stats().known_chunks == 1
    assert [p.kind for p in store.check()] == ["unavailable"]
    assert store.clear() == 0


@pytest.mark.parametrize("scheme", ["redis", "s3"])
def test_a_dead_server_is_misses(
    scheme: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis" if scheme == "redis" else "obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # nobody listens there
        at = f"redis://user:hunter2@127.0.0.1:{port}/0" if scheme == "redis" else "s3://bucket/x"
        query = "?timeout=2" + (f"&endpoint=http://127.0.0.1:{port}&region=us-east-1" if scheme == "s3" else "")
        with open_remote(at + query) as store:
            block = make_block(1)
            assert reason(store.get(block.key)) == "unavailable"
            assert not store.put(block)
            everything(store, block)
            assert store.stats().misses == {"unavailable": 1}
    assert "hunter2" not in caplog.text
    assert len([r for r in caplog.records if "does not answer, going on" in r.message]) == 1


class Silent:
    """A server that accepts and says nothing."""

    def __enter__(self) -> int:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(64)
        return int(self.socket.getsockname()[1])

    def __exit__(self, *exc: object) -> None:
        self.socket.close()


@pytest.mark.parametrize("scheme", ["redis", "s3"])
def test_a_silent_server_costs_one_timeout(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis" if scheme == "redis" else "obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    block = make_block(1)
    with Silent() as port:
        at = f"redis://127.0.0.1:{port}/0?" if scheme == "redis" else f"s3://b/x?endpoint=http://127.0.0.1:{port}&"
        with open_store(f"{at}timeout=0.1&write_timeout=0.1", memory_bytes=0, local=tmp_path / "disk") as store:
            miss = store.get(block.key)
            assert isinstance(miss, Miss)
            assert miss.reason == "unavailable"
            for _ in range(100):  # the circuit is open: nobody waits any more
                assert reason(store.get(block.key)) == "unavailable"
            assert store.put(block)  # the disk took it
            assert same(store.get(block.key), block)
            assert store.put_meta("head", b"1") == b"1"


def test_a_server_that_comes_back_is_used_again(redis_server: RedisServer, redis_url: str) -> None:
    now = [0.0]
    block = make_block(1)
    with open_remote(redis_url) as store:
        store.link.breaker = Breaker(failures=2, pause_s=10, clock=lambda: now[0])
        assert store.put(block)
        redis_server.stop()
        try:
            assert [reason(store.get(block.key)) for _ in range(3)] == ["unavailable"] * 3
            assert not store.put(make_block(2))
        finally:
            redis_server.start()
        assert "not asked" in store.get(block.key).detail  # type: ignore[union-attr]
        now[0] = 11.0
        assert reason(store.get(block.key)) == "absent"  # it forgot everything, but answers
        assert store.put(block)
        assert same(store.get(block.key), block)


def test_the_breaker() -> None:
    now = [0.0]
    breaker = Breaker(failures=2, pause_s=10, max_pause_s=25, clock=lambda: now[0])

    def is_open() -> bool:
        try:
            breaker.enter()
        except Unavailable:
            return True
        return False

    breaker.failed("x")
    assert not is_open()
    breaker.succeeded()
    breaker.failed("x")
    breaker.failed("x")
    assert is_open()
    for pause in (10, 20, 25, 25):
        now[0] += pause - 1
        assert is_open()
        now[0] += 2
        assert not is_open()  # one may try
        assert is_open()  # the others wait for what it finds
        breaker.failed("still")
    now[0] += 26
    assert not is_open()
    breaker.succeeded()
    assert not is_open()


def test_a_passing_failure_is_tried_again(shelf: Shelf) -> None:
    with RemoteStore(shelf, link=Link(5.0, attempts=3, backoff_s=0)) as store:
        assert store.put(make_block(1))
        shelf.failures = 2
        assert same(store.get(make_block(1).key), make_block(1))
        shelf.failures = 3
        miss = store.get(make_block(1).key)
        assert miss == Miss("unavailable", "ConnectionError")  # and not the URL with its password


def test_stuck_calls_do_not_pile_up(shelf: Shelf) -> None:
    link = Link(0.05, attempts=1, calls=2, breaker=Breaker(pause_s=0))
    shelf.stuck = threading.Event()
    try:
        before = threading.active_count()
        results: list[Any] = []
        for _ in range(20):
            try:
                results.append(link.call(lambda: shelf.exists("x")))
            except Unavailable as error:
                results.append(str(error).split()[0])
        assert set(results) == {"no", "all"}
        assert threading.active_count() - before <= 2
    finally:
        shelf.stuck.set()


def test_what_arrives_in_time_counts_even_if_the_rest_does_not(shelf: Shelf) -> None:
    blocks = [make_block(i) for i in range(30)]
    with RemoteStore(shelf, link=Link(0.2, attempts=1)) as store:
        for block in blocks:
            store.put(block)
        real, stuck, calls = shelf.read, threading.Event(), [0]

        def slow(names: Sequence[str], limit: int) -> list[Any]:
            calls[0] += 1
            if calls[0] == 3:
                stuck.wait(30)
            return real(names, limit)

        shelf.read = slow  # type: ignore[method-assign]
        found = store.get_many([block.key for block in blocks])
        stuck.set()
        got = [isinstance(one, Block) for one in found]
        assert 0 < sum(got) < 30
        assert got == sorted(got, reverse=True)
        assert {one.reason for one in found if isinstance(one, Miss)} == {"unavailable"}
        assert same(store.get(blocks[-1].key), blocks[-1])  # the circuit is not open


# -- write-back --------------------------------------------------------------------------------------------------------


def test_write_back_does_not_wait_and_reads_what_waits(shelf: Shelf) -> None:
    block = make_block(1)
    with RemoteStore(shelf, write="back", link=Link(30.0)) as store:
        shelf.stuck = threading.Event()
        store._unreadable.add(block.key)  # no look-up before the write
        assert store.put(block)
        assert same(store.get(block.key), block)
        assert store.contains(block.key)
        assert name_of(block) not in shelf.values
        shelf.stuck.set()
        store.flush()
        assert name_of(block) in shelf.values
        assert same(store.get(block.key), block)


def test_what_waits_is_what_will_come_back(shelf: Shelf) -> None:
    block = make_block(1, tokens=40, head_dim=64)
    with RemoteStore(shelf, write="back", compression="int4", link=Link(30.0)) as store:
        shelf.stuck = threading.Event()
        store._unreadable.add(block.key)
        store.put(block)
        waiting = store.get(block.key)
        shelf.stuck.set()
        store.flush()
        assert isinstance(waiting, Block)
        assert same(store.get(block.key), waiting)
        assert not same(waiting, block)


def test_close_sends_what_waits(shelf: Shelf) -> None:
    store = RemoteStore(shelf, write="back")
    for i in range(10):
        assert store.put(make_block(i))
    store.anchors.add([(TEXTS[0], make_block(0).key)])
    store.close()
    store.close()
    assert len([n for n in shelf.values if n.startswith("blocks/")]) == 10
    assert len([n for n in shelf.values if n.startswith("anchors/")]) == 1


def test_a_full_queue_is_a_skipped_write(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    from kvboost_rag.store.remote_queue import WriteQueue

    with RemoteStore(shelf, write="back") as store:
        go = threading.Event()
        store._queue = WriteQueue(lambda block: go.wait(30), limit_bytes=2 * make_block(0).nbytes)
        assert [store.put(make_block(i)) for i in range(4)] == [True, True, False, False]
        assert store.stats().skipped_writes == 2
        go.set()
    assert len([r for r in caplog.records if "not stored" in r.message]) == 1


# -- URLs --------------------------------------------------------------------------------------------------------------


def test_our_options_are_taken_out_of_a_url() -> None:
    parsed = parse_url("rediss://u:p@h:1/2?timeout=3&ssl_cert_reqs=none&write=back")
    assert parsed.url == "rediss://u:p@h:1/2?ssl_cert_reqs=none"
    assert parsed.options == {"timeout": "3", "write": "back"}
    assert parse_url("S3://bucket/a/b?region=x").url == "s3://bucket/a/b"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "redis://h?timeout=0",
        "redis://h?timeout=soon",
        "redis://h?write=never",
        "redis://h?cluster=yes",
        "redis://h:port/0",
        "redis:/h",
        "S3:bucket",
    ],
)
def test_urls_that_make_no_sense(url: str) -> None:
    pytest.importorskip("redis", reason="the redis client is not installed (extra [redis])")
    with pytest.raises(UsageError):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b?prefix=x",
        "s3://b?cluster=1",
        "s3://b?color=red",
        "redis://h?endpoint=x",
        "file:///x?ttl=1",
        "redis://h?writ=back",
    ],
)
def test_options_that_do_not_exist(url: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownOptionError):
        open_store(url, local=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_missing_client_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for library, url, extra in (("redis", "redis://h", "redis"), ("obstore", "s3://b", "s3")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(MissingExtraError, match=rf"kvboost-rag\[{extra}\]"):
            open_store(url)


def test_local_goes_with_a_url(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        open_store(tmp_path / "a", local=tmp_path / "b")


def test_a_cluster_s_nodes_share_the_blocks(redis_cluster: RedisServer) -> None:
    import redis

    url = f"{redis_cluster.url}?cluster=1&prefix=shared:"
    with open_store(url, memory_bytes=0) as store:
        blocks = [make_block(seed) for seed in range(20)]
        assert all(store.put(block) for block in blocks)
        assert all(same(*pair) for pair in zip(store.get_many([b.key for b in blocks]), blocks, strict=True))
        with redis.Redis.from_url(redis_cluster.url) as node:  # plain: one node's own
            own = len(node.keys("shared:blocks/*"))
        assert 0 < own < len(blocks)
        assert store.delete_tagged("nobody") == 0
        assert store.clear() == len(blocks)
    with open_store("redis://127.0.0.1:1?cluster=1&timeout=1", memory_bytes=0) as nobody:
        assert reason(nobody.get(blocks[0].key)) == "unavailable"
