"""What holds for every store that keeps blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.model.streaming.pagelocked import PageLocked
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.store import (
    REASONS,
    BlockStore,
    DeviceStore,
    DeviceTieredStore,
    DiskStore,
    MemoryStore,
    Miss,
    NullStore,
    TieredStore,
    open_store,
)
from tests.store.blocks import make_block, same
from tests.store.device import LateMemory

Make = Callable[[int], BlockStore]  # from a limit in bytes of what is stored

MAKERS: dict[str, Callable[[Path], Make]] = {
    "memory": lambda folder: lambda limit: MemoryStore(limit),
    "memory, page-locked": lambda folder: (
        lambda limit: MemoryStore(limit, allocate=PageLocked(VirtualBackend(lock_total=1 << 15)))
    ),
    "disk": lambda folder: lambda limit: DiskStore(folder, limit),
    "disk, zstd": lambda folder: lambda limit: DiskStore(folder, limit, compression="zstd"),
    "disk, quotas": lambda folder: lambda limit: DiskStore(folder, limit, tenant_bytes=limit),
    "tiered": lambda folder: lambda limit: TieredStore([MemoryStore(limit), DiskStore(folder, limit)]),
    "device": lambda folder: lambda limit: DeviceStore(limit, LateMemory()),
    "device, memory": lambda folder: (
        lambda limit: DeviceTieredStore(DeviceStore(limit, LateMemory()), MemoryStore(limit))
    ),
    "device, memory, disk": lambda folder: (
        lambda limit: DeviceTieredStore(
            DeviceStore(limit, LateMemory()), TieredStore([MemoryStore(limit), DiskStore(folder, limit)])
        )
    ),
    "disk behind a device that holds nothing": lambda folder: (
        lambda limit: DeviceTieredStore(DeviceStore(0, LateMemory()), DiskStore(folder, limit))
    ),
    "disk behind a memory that holds nothing": lambda folder: (
        lambda limit: TieredStore([MemoryStore(0), DiskStore(folder, limit)])
    ),
}


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if "zstd" in request.param:
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    return MAKERS[request.param](tmp_path / "store")


# Servers have no limit of ours; the tests that need one run on MAKERS alone.
REMOTE: dict[str, Callable[[str, Path], BlockStore]] = {
    "remote": lambda url, folder: open_store(url, memory_bytes=0),
    "memory, remote": lambda url, folder: open_store(url),
    "memory, disk, remote": lambda url, folder: open_store(url, local=folder),
    "quotas": lambda url, folder: open_store(url, memory_bytes=0, tenant_bytes=1 << 20, compression="zstd"),
}
PLAIN = ["remote", "quotas"]
SERVERS = {"redis": [*REMOTE], "cluster": PLAIN, "s3": PLAIN, "file": PLAIN}


@pytest.fixture(params=[*MAKERS, *(f"{kind}:{server}" for server, kinds in SERVERS.items() for kind in kinds)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    kind, _, server = request.param.partition(":")
    if kind in ("disk, zstd", "quotas"):
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    if server:
        opened = REMOTE[kind](request.getfixturevalue(f"{server}_url"), tmp_path / "store")
    else:
        opened = MAKERS[kind](tmp_path / "store")(1 << 20)
    with opened as store:
        yield store


def stored_bytes(store: BlockStore, block: Block) -> int:
    framed = store.stats().compression == "zstd"
    return block.nbytes if isinstance(store.levels()[-1], MemoryStore) else len(encode_block(block, framed=framed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_put_comes_back(store: BlockStore, dtype: torch.dtype) -> None:
    block = make_block(1, dtype=dtype, tags=("doc", "2"), salt="tenant")
    assert isinstance(store.get(block.key), Miss)
    assert store.put(block)
    found = store.get(block.key)
    assert same(found, block)
    assert isinstance(found, Block)
    assert found.header == block.header
    assert store.contains(block.key)


def test_absent(store: BlockStore) -> None:
    for key in (make_block(1).key, "", "nonsense", "kv1:../../../etc/passwd", "kv1:" + "g" * 64, "kv1:" + "A" * 64):
        assert store.get(key) == Miss("absent", detail=store.get(key).detail)  # type: ignore[union-attr]
        assert not store.contains(key)
        assert not store.delete(key)


def test_putting_again_is_a_success_and_changes_nothing(store: BlockStore) -> None:
    block = make_block(1, cost_s=1.0)
    assert store.put(block)
    assert store.put(replace(block, header=replace(block.header, cost_s=2.0)))
    found = store.get(block.key)
    assert isinstance(found, Block)
    assert found.header.cost_s == 1.0
    assert store.stats().blocks == 1


def test_a_block_under_a_false_key_is_a_mistake_of_the_caller(store: BlockStore) -> None:
    with pytest.raises(UsageError):
        store.put(replace(make_block(1), key=make_block(2).key))


def test_delete_and_keys(store: BlockStore) -> None:
    blocks = [make_block(i) for i in range(5)]
    for block in blocks:
        store.put(block)
    assert sorted(store.keys()) == sorted(block.key for block in blocks)
    assert store.delete(blocks[2].key)
    assert not store.delete(blocks[2].key)
    assert store.get(blocks[2].key) == Miss("absent")
    assert sorted(store.keys()) == sorted(block.key for block in blocks if block is not blocks[2])
    assert store.put(blocks[2])
    assert same(store.get(blocks[2].key), blocks[2])


def test_get_many_answers_in_order(store: BlockStore) -> None:
    blocks = [make_block(i) for i in range(6)]
    for block in blocks[::2]:
        store.put(block)
    asked = [*blocks, blocks[0], blocks[1]]
    found = store.get_many([block.key for block in asked])
    assert [same(result, block) for result, block in zip(found, asked, strict=True)] == [True, False] * 4
    assert store.get_many([]) == []


def test_the_text_stays_out_unless_asked_for(store: BlockStore) -> None:
    block = make_block(1, text="a secret sentence")
    store.put(block)
    found = store.get(block.key)
    assert isinstance(found, Block)
    assert found.header == replace(block.header, text="")


def test_the_limit_holds_and_the_least_recently_used_goes(make: Make) -> None:
    blocks = [make_block(i, layers=8) for i in range(6)]
    with make(1 << 20) as probe:
        size = max(stored_bytes(probe, block) for block in blocks)
        probe.clear()
    with make(3 * size) as store:
        for block in blocks[:3]:
            assert store.put(block)
        assert same(store.get(blocks[0].key), blocks[0])
        for block in blocks[3:5]:
            assert store.put(block)
        last = store.levels()[-1]  # where a tier above had the hit
        assert [last.contains(block.key) for block in blocks[:5]] == [True, False, False, True, True]
        stats = store.stats()
        assert stats.blocks == 3
        assert stats.bytes == sum(stored_bytes(store, blocks[i]) for i in (0, 3, 4))
        assert stats.evictions == 2
        assert store.check() == []


def test_what_cannot_fit_is_skipped_and_drives_nothing_out(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    small, large = make_block(1), make_block(2, layers=64)
    with make(4096) as store:
        assert store.put(small)
        assert not store.put(large)
        assert not store.put(large)
        assert same(store.get(small.key), small)
        assert store.get(large.key) == Miss("absent")
        assert store.stats().skipped_writes == 2
    tiers = len(store.levels())
    assert len([r for r in caplog.records if "not stored" in r.message]) <= tiers + (tiers > 1)


def test_stats_count(store: BlockStore) -> None:
    block = make_block(1)
    store.get(block.key)
    store.put(block)
    store.get(block.key)
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.writes, stats.blocks) == (1, {"absent": 1}, 1, 1)
    assert set(stats.as_dict()) >= {"kind", "hits", "misses", "bytes", "tiers"}
    assert set(stats.misses) <= set(REASONS)


def test_clear(store: BlockStore) -> None:
    text = "a text that is long enough to be known to the index of texts"
    block = make_block(1)
    store.put(block)
    store.put_meta("head", b"1")
    store.anchors.add([(text, block.key)])
    assert store.clear() == 1
    assert store.get(block.key) == Miss("absent")
    assert (list(store.keys()), store.get_meta("head"), len(store.anchors)) == ([], None, 0)
    assert store.stats().bytes == 0
    assert store.check() == []
    assert store.put(block)


def test_the_first_writer_of_a_manifest_entry_wins(store: BlockStore) -> None:
    assert store.get_meta("head") is None
    assert store.put_meta("head", b"first\n\x00") == b"first\n\x00"
    assert store.put_meta("head", b"second") == b"first\n\x00"
    assert store.put_meta("other/../name", b"") == b""
    assert (store.get_meta("head"), store.get_meta("other/../name")) == (b"first\n\x00", b"")


def test_the_last_writer_of_a_measured_manifest_entry_wins(store: BlockStore) -> None:
    assert store.set_meta("measured", b"1")
    assert store.get_meta("measured") == b"1"
    assert store.set_meta("measured", b"2\n\x00")
    assert store.get_meta("measured") == b"2\n\x00"
    assert store.put_meta("measured", b"3") == b"2\n\x00", "and it counts as set"
    assert store.check() == []


def test_a_healthy_store_checks_clean(store: BlockStore) -> None:
    for i in range(4):
        store.put(make_block(i))
    assert store.check() == []
    assert store.check(fix=True) == []
    assert store.stats().blocks == 4


def test_many_threads(store: BlockStore) -> None:
    blocks = [make_block(i) for i in range(12)]
    failures: list[object] = []

    def work(offset: int) -> None:
        for i in range(len(blocks)):
            block = blocks[(i + offset) % len(blocks)]
            if not store.put(block):
                failures.append(block.key)
            found = store.get(block.key)
            if not same(found, block):
                failures.append(found)
            store.put_meta("owner", str(offset).encode())

    threads = [threading.Thread(target=work, args=(i * 3,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.stats().blocks == len(blocks)
    assert store.check() == []


def test_the_null_store_says_that_it_is_off() -> None:
    store, block = NullStore(), make_block(1)
    assert not store.put(block)
    assert store.get(block.key) == Miss("store off")
    assert (store.contains(block.key), list(store.keys()), store.clear(), store.check()) == (False, [], 0, [])
    assert store.put_meta("head", b"1") == b"1"
    assert store.put_meta("head", b"2") == b"1"
    assert store.set_meta("head", b"3")
    assert store.get_meta("head") == b"3"
    assert store.stats().misses == {"store off": 1}


def test_a_slice_does_not_pin_what_it_was_cut_from() -> None:
    store, whole = MemoryStore(), torch.zeros(2, 2, 1, 4096, 64)
    block = replace(make_block(0), kv=whole[..., 8:14, :4])
    store.put(block)
    found = store.get(block.key)
    assert isinstance(found, Block)
    assert found.kv.untyped_storage().nbytes() == block.nbytes
