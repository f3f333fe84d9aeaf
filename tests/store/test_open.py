"""From ``store=`` to a store, and what tiers do together."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvboost_rag.errors import MissingExtraError, StoreError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.store import DiskStore, MemoryStore, Miss, NullStore, TieredStore, open_store
from tests.store.blocks import make_block, same


def test_what_each_spec_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_store(None), NullStore)
    memory = open_store("memory", memory_bytes=1000)
    assert isinstance(memory, MemoryStore)
    assert memory.limit_bytes == 1000
    assert open_store(memory) is memory
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_store("~/a/b", memory_bytes=1000, limit_bytes=5000, keep_text=True) as store:
        assert isinstance(store, TieredStore)
        assert [type(tier) for tier in store.tiers] == [MemoryStore, DiskStore]
        assert store.stats().limit_bytes == 5000
        block = make_block(1, text="kept")
        store.put(block)
        for tier in store.tiers:
            found = tier.get(block.key)
            assert isinstance(found, Block)
            assert found.header.text == "kept"
    assert (tmp_path / "a" / "b" / "blocks").is_dir()
    with open_store(tmp_path / "plain", memory_bytes=0) as store:
        assert isinstance(store, DiskStore)


@pytest.mark.parametrize("spec", ["ftp://x", "", 7, b"x", True])
def test_no_such_store(spec: object) -> None:
    with pytest.raises(UsageError):
        open_store(spec)  # type: ignore[arg-type]


def test_paths_that_cannot_be_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file") as caught:
        open_store(tmp_path / "file")
    assert caught.value.hint
    with pytest.raises(StoreError):
        open_store(tmp_path / "file" / "below")
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write anywhere
    with pytest.raises(StoreError, match="not writable"):
        open_store(tmp_path / "folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError):
        open_store(tmp_path / "below")


def test_limits_that_make_no_sense(tmp_path: Path) -> None:
    for make in (lambda: MemoryStore(-1), lambda: DiskStore(tmp_path, 0), lambda: TieredStore([])):
        with pytest.raises(UsageError):
            make()


def test_diskcache_is_only_needed_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "diskcache", None)
    monkeypatch.delitem(sys.modules, "kvboost_rag.store.disk_index", raising=False)
    monkeypatch.delitem(sys.modules, "kvboost_rag.store.disk_rows", raising=False)
    open_store("memory")
    with pytest.raises(MissingExtraError, match="pip install diskcache"):
        open_store(tmp_path)


def test_a_hit_below_moves_up(tmp_path: Path) -> None:
    block = make_block(1)
    with DiskStore(tmp_path) as disk:
        disk.put(block)
        store = TieredStore([MemoryStore(), disk])
        assert same(store.get(block.key), block)
        assert [tier.stats().hits for tier in store.tiers] == [0, 1]
        assert same(store.get(block.key), block)
        assert [tier.stats().hits for tier in store.tiers] == [1, 1]
        assert (store.stats().hits, store.stats().misses) == (2, {})


def test_the_miss_that_says_most_is_told(tmp_path: Path) -> None:
    block = make_block(1)
    with DiskStore(tmp_path) as disk:
        disk.put(block)
        path = disk.files.path(block.key)
        assert path is not None
        path.write_bytes(path.read_bytes()[:-1])
        store = TieredStore([MemoryStore(), disk, NullStore()])
        miss = store.get(block.key)
        assert isinstance(miss, Miss)
        assert miss.reason == "damaged"
        assert store.stats().misses == {"damaged": 1}


def test_damage_below_does_not_reach_who_has_it_above(tmp_path: Path) -> None:
    block = make_block(1)
    with open_store(tmp_path) as store:
        store.put(block)
        for path in (tmp_path / "blocks").rglob("*.kvb"):
            path.write_bytes(b"")
        assert same(store.get(block.key), block)
        assert [problem.kind for problem in store.check(fix=True)][:1] == ["damaged"]
        assert store.check() == []


# -- write-back --------------------------------------------------------------------------------------------------------


class Gate(MemoryStore):
    """A slow tier: nothing gets in until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def put(self, block: Block) -> bool:
        assert self.open.wait(30)
        return super().put(block)


def test_write_back_does_not_wait_for_slow_tiers_and_serves_what_waits() -> None:
    gate, blocks = Gate(), [make_block(i) for i in range(3)]
    with TieredStore([MemoryStore(blocks[0].nbytes), gate], write="back") as store:
        for block in blocks:  # memory holds one of them
            assert store.put(block)
        for block in blocks:
            assert store.contains(block.key)
            assert same(store.get(block.key), block)
        assert not store.flush(0.0)
        gate.open.set()
        assert store.flush()
        assert [gate.contains(block.key) for block in blocks] == [True] * 3


def test_write_back_gives_back_what_the_last_tier_will(tmp_path: Path) -> None:
    block = make_block(1, tokens=40, head_dim=64)
    with open_store(tmp_path, compression="int8", write="back") as store:
        assert isinstance(store, TieredStore)
        store.put(block)
        before = store.get(block.key)
        assert store.flush()
        (after,) = store.tiers[-1].get_many([block.key])
        assert isinstance(before, Block)
        assert same(after, before)
        assert not same(after, block)


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    block = make_block(1)
    with open_store(tmp_path, write="back") as store:
        store.put(block)
    with open_store(tmp_path) as store:
        assert same(store.get(block.key), block)


def test_no_other_way_to_write(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write="):
        open_store(tmp_path / "kv", write="never")
    assert not (tmp_path / "kv").exists()
