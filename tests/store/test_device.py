"""The device tier as a store: its budget, when blocks go up, what a device without memory does, and what reaches it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.store import (
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
from kvboost_rag.store.device_tier import bytes_of, tier_for, with_device
from tests.store.blocks import make_block, same
from tests.store.device import LateMemory

BLOCKS = [make_block(i, layers=8) for i in range(8)]
SIZE = BLOCKS[0].nbytes
CPU = torch.device("cpu")


def pair(room: int, below: BlockStore | None = None, **options: object) -> tuple[DeviceTieredStore, LateMemory]:
    """A device tier with room for so many blocks, in front of ``below``, or of memory with room for all."""
    memory = LateMemory()
    near = DeviceStore(room * SIZE, memory, **options)  # type: ignore[arg-type]
    return DeviceTieredStore(near, MemoryStore() if below is None else below), memory


def near(store: DeviceTieredStore) -> list[int]:
    return [i for i, block in enumerate(BLOCKS) if store.near.contains(block.key)]


def use(store: DeviceTieredStore, *numbers: int) -> None:
    """What a request does with its blocks."""
    since = store.deletions
    found = store.get_many([BLOCKS[i].key for i in numbers])
    assert [same(block, BLOCKS[i]) for i, block in zip(numbers, found, strict=True)] == [True] * len(numbers)
    here = [BLOCKS[i].key for i in near(store) if i in numbers]
    store.promote([block for block in found if isinstance(block, Block)], since, here)


def test_a_warm_up_fills_the_tier_and_then_leaves_it_alone() -> None:
    store, memory = pair(3)
    for block in BLOCKS:
        assert store.put(block)
    assert near(store) == [0, 1, 2]
    assert (store.near.stats().evictions, store.near.stats().skipped_writes, memory.copied) == (0, 0, 3)
    assert all(same(store.get(block.key), block) for block in BLOCKS)
    assert near(store) == [0, 1, 2], "looking up moves nothing"


def test_what_was_used_goes_up_and_the_least_recently_used_goes() -> None:
    store, memory = pair(3)
    for block in BLOCKS:
        store.put(block)
    use(store, 1, 5, 6)
    assert near(store) == [1, 5, 6]
    use(store, 5, 7)
    assert near(store) == [5, 6, 7], "1 was used before 6"
    assert memory.peak <= 3 * SIZE
    assert memory.copied == 3 + 2 + 1, "one copy for each that moved"


def test_a_request_does_not_drive_out_its_own_blocks() -> None:
    store, memory = pair(3)
    for block in BLOCKS:
        store.put(block)
    for _ in range(3):
        use(store, 0, 1, 5, 6, 7)
        assert near(store) == [0, 1, 5], "as many as fit, and they stay"
    assert memory.copied == 4


def test_the_budget_holds_at_every_moment() -> None:
    """Counted where memory is given out: room is made before anything is copied."""
    store, memory = pair(2)
    for _ in range(2):
        for i, block in enumerate(BLOCKS):
            store.put(block)
            use(store, i)
    assert store.near.stats().evictions > 5
    assert memory.peak == memory.alive == 2 * SIZE
    store.close()
    assert memory.alive == 0, "closing gives the memory back"


def test_what_was_computed_here_is_kept_without_a_copy() -> None:
    store, memory = pair(3)
    made = BLOCKS[0].kv.clone()
    store.put(replace(BLOCKS[0], device_kv=made))
    found = store.get(BLOCKS[0].key)
    assert isinstance(found, Block)
    assert found.kv.data_ptr() == made.data_ptr()
    assert (memory.adopted, memory.copied) == (1, 0)
    below = store.below.get(BLOCKS[0].key)
    assert isinstance(below, Block)
    assert below.device_kv is None, "the store below keeps none of the device's memory"


def test_a_slice_is_copied_and_not_kept_alive() -> None:
    store, memory = pair(3)
    whole = torch.cat([BLOCKS[0].kv, BLOCKS[1].kv], 3)
    store.put(replace(BLOCKS[0], device_kv=whole[:, :, :, :6]))
    found = store.get(BLOCKS[0].key)
    assert same(found, BLOCKS[0])
    assert isinstance(found, Block)
    assert found.kv.untyped_storage().nbytes() == SIZE
    assert memory.copied == 1


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_blocks_lie_as_what_comes_back(kind: str) -> None:
    store, _ = pair(3, MemoryStore(compression=kind))
    store.put(replace(BLOCKS[0], device_kv=BLOCKS[0].kv.clone()))
    assert near(store) == [0]
    found, below = store.get(BLOCKS[0].key), store.below.get(BLOCKS[0].key)
    assert isinstance(below, Block)
    assert same(found, below), "the same values from either"
    assert not same(found, BLOCKS[0])
    assert isinstance(found, Block)
    assert found.header == below.header
    assert found.header.compression == kind
    assert store.near.stats().bytes == SIZE


def test_without_device_memory_a_block_stays_below(caplog: pytest.LogCaptureFixture) -> None:
    memory = LateMemory(2 * SIZE)
    store = DeviceTieredStore(DeviceStore(100 * SIZE, memory), MemoryStore())
    for block in BLOCKS:
        assert store.put(block)
    assert near(store) == [0, 1]
    use(store, *range(8))
    assert near(store) == [0, 1]
    assert memory.refused == 6 + 1, "a request asks once"
    assert store.near.stats().skipped_writes == 7
    assert len([r for r in caplog.records if "out of memory" in r.message]) == 1
    memory.nbytes = 1 << 30
    use(store, *range(8))
    assert near(store) == list(range(8)), "it is tried again"
    assert store.check() == []


def test_deletions_reach_it(tmp_path: Path) -> None:
    blocks = [make_block(i, layers=8, tags=("doc",) if i % 2 else ()) for i in range(8)]
    store, _ = pair(8, open_store(tmp_path))
    for block in blocks:
        store.put(block)
    assert near(store) == list(range(8))
    assert store.delete(blocks[0].key)
    assert store.delete_tagged("doc") == 4
    assert near(store) == [2, 4, 6]
    assert store.clear() == 3
    assert near(store) == []
    assert store.near.stats().bytes == 0


@pytest.mark.parametrize(
    "delete", [lambda s: s.delete(BLOCKS[0].key), lambda s: s.delete_tagged("x"), lambda s: s.clear()]
)
def test_what_was_deleted_meanwhile_does_not_come_back(delete: object) -> None:
    blocks = [replace(b, header=replace(b.header, tags=("x",))) for b in BLOCKS]
    store, _ = pair(4)
    for block in blocks:
        store.below.put(block)
    since = store.deletions
    found = [block for block in store.get_many([b.key for b in blocks]) if isinstance(block, Block)]
    delete(store)  # type: ignore[operator]
    assert store.promote(found, since) == 0
    assert near(store) == []


def test_a_deletion_during_the_copy_wins() -> None:
    class Deleting(LateMemory):
        def own(self, source: torch.Tensor, *, adopt: bool = False) -> tuple[torch.Tensor, object]:
            thread = threading.Thread(target=store.delete, args=(BLOCKS[0].key,))
            thread.start()
            thread.join()
            return super().own(source, adopt=adopt)

    store = DeviceTieredStore(DeviceStore(4 * SIZE, Deleting()), MemoryStore())
    store.below.put(BLOCKS[0])
    assert store.promote([BLOCKS[0]], store.deletions) == 0
    assert isinstance(store.get(BLOCKS[0].key), Miss)


def test_time_to_live_and_quotas_are_those_below(tmp_path: Path) -> None:
    below = open_store(tmp_path, ttl_s=60, limit_bytes=1 << 20, tenant_bytes=1 << 18)
    store = DeviceTieredStore(tier_for(below, 8 * SIZE, LateMemory()), below)
    assert (store.near.ttl_s, store.near.tenant_bytes) == (60, 2 * SIZE)
    now = time.time()
    old, new = (make_block(i, layers=8, created_s=now - age) for i, age in enumerate((61, 0)))
    store.put(old)
    store.put(new)
    assert near(store) == [0, 1]
    assert store.get(old.key) == Miss("expired", "older than 60 s")
    assert near(store) == [1]
    for block in (make_block(i, layers=8, created_s=now, salt="other") for i in range(4)):
        store.put(block)
    assert store.near.tenant_usage("other") == 2 * SIZE, "a tenant's share, although there is room"
    assert store.device_room("other") == 0
    assert store.device_room("") == SIZE


def test_pins_hold_on_the_device_too() -> None:
    store, _ = pair(4)
    for block in BLOCKS:
        store.put(block)
    store.pin([BLOCKS[0].key, BLOCKS[1].key])
    use(store, 4, 5, 6, 7)
    assert near(store)[:2] == [0, 1]
    store.unpin([BLOCKS[0].key, BLOCKS[1].key])
    use(store, 4, 5, 6, 7)
    assert near(store) == [4, 5, 6, 7]


def test_tiers_are_counted_through(tmp_path: Path) -> None:
    store, _ = pair(2, open_store(tmp_path))
    assert [type(level).__name__ for level in store.levels()] == ["DeviceStore", "MemoryStore", "DiskStore"]
    for block in BLOCKS[:3]:
        store.put(block)
    assert isinstance(store.below, TieredStore)
    store.below.tiers[0].clear()
    store.below.tiers[0].put(BLOCKS[1])
    store.near.delete(BLOCKS[1].key)
    assert [store.tier_of(block.key) for block in BLOCKS[:4]] == [0, 1, 2, 2]
    stats = store.stats()
    assert [tier.kind for tier in stats.tiers] == ["vram", "memory", "disk"]
    assert stats.blocks == 3


def test_what_is_hot_in_front_is_not_evicted_below(tmp_path: Path) -> None:
    store, _ = pair(1, MemoryStore(3 * SIZE))
    for block in BLOCKS[:3]:
        store.put(block)
    store.get(BLOCKS[0].key)
    store.put(BLOCKS[3])
    assert store.below.contains(BLOCKS[0].key)
    assert not store.below.contains(BLOCKS[1].key)


def test_many_threads_use_and_evict() -> None:
    store, memory = pair(3)
    for block in BLOCKS:
        store.put(block)
    wrong: list[object] = []

    def work(offset: int) -> None:
        for step in range(40):
            picked = [BLOCKS[(offset + step + i) % 8] for i in range(3)]
            since = store.deletions
            found = store.get_many([block.key for block in picked])
            wrong.extend(b.key for b, f in zip(picked, found, strict=True) if not same(f, b))
            store.promote([b for b in found if isinstance(b, Block)], since)
            del found

    threads = [threading.Thread(target=work, args=(3 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.near.stats().bytes <= 3 * SIZE
    assert store.near.stats().evictions > 0
    assert store.check() == []
    store.close()
    assert memory.alive == 0


def test_what_makes_no_sense_is_refused() -> None:
    for vram in ("much", 0, -1, True):
        with pytest.raises(UsageError):
            bytes_of(vram)  # type: ignore[arg-type]
    assert (bytes_of(None), bytes_of("2GiB"), bytes_of(DeviceStore(7, CPU))) == (0, 2 << 30, 7)
    with pytest.raises(UsageError, match="CUDA"):
        with_device("1GiB", MemoryStore(), CPU)
    with pytest.raises(UsageError, match="without a store"):
        with_device(DeviceStore(SIZE, CPU), NullStore(), CPU)
    with pytest.raises(UsageError, match="already"):
        with_device(DeviceStore(SIZE, CPU), pair(1)[0], CPU)


def test_write_back_below_keeps_no_device_memory(tmp_path: Path) -> None:
    store, memory = pair(1, TieredStore([MemoryStore(0), DiskStore(tmp_path)], write="back"))
    for block in BLOCKS:
        store.put(replace(block, device_kv=block.kv.clone()))
    assert memory.alive == SIZE
    assert all(same(store.get(block.key), block) for block in BLOCKS)
    store.close()
    with DiskStore(tmp_path) as again:
        assert all(same(again.get(block.key), block) for block in BLOCKS)
