"""Page-locked memory for tensors of others, and the buffers that it is copied through."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.model.streaming import slab
from kvboost_rag.model.streaming.pagelocked import PageLocked
from kvboost_rag.model.streaming.ring import ROUND, Ring
from kvboost_rag.model.streaming.virtual import RaceError, VirtualBackend
from kvboost_rag.store import DiskStore, MemoryStore, TieredStore
from tests.store.blocks import make_block, same

# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_unlocked_when_the_last_tensor_over_it_is_gone() -> None:
    backend = VirtualBackend()
    allocate = PageLocked(backend)
    whole = allocate(10_000)
    assert (whole.dtype, whole.numel(), whole.data_ptr() % 4096) == (torch.uint8, 10_000, 0)
    view = whole[96:8096].view(torch.float32).view(20, 100)
    view.fill_(3)
    assert allocate.held() == {"page_locked_bytes": 12_288, "pageable_bytes": 0}
    del whole
    gc.collect()
    assert (backend.locked, float(view.sum())) == (12_288, 6_000.0)
    del view
    gc.collect()
    assert backend.locked == 0
    assert allocate.held() == {"page_locked_bytes": 0, "pageable_bytes": 0}


@pytest.mark.parametrize(
    ("backend", "locked"),
    [(VirtualBackend(lock_each=0), False), (VirtualBackend(lock_each=0, lock_new=True), True)],
)
def test_refused_memory_is_ordinary(backend: VirtualBackend, locked: bool, caplog: pytest.LogCaptureFixture) -> None:
    allocate = PageLocked(backend)
    blocks = [allocate(5000).fill_(i) for i in range(3)]
    assert [int(block[4999]) for block in blocks] == [0, 1, 2]
    assert allocate.held()["page_locked_bytes" if locked else "pageable_bytes"] == 3 * 8192
    assert len(caplog.records) == (not locked), "said once"


def test_some_memory_may_be_locked_and_some_not() -> None:
    backend = VirtualBackend(lock_total=10_000)
    allocate = PageLocked(backend)
    first, second = allocate(8192), allocate(8192)
    assert allocate.held() == {"page_locked_bytes": 8192, "pageable_bytes": 8192}
    del first, second
    gc.collect()
    assert backend.locked == 0


def test_nothing_is_nothing() -> None:
    assert PageLocked(VirtualBackend())(0).numel() == 0


def test_threads_may_ask_at_once() -> None:
    backend = VirtualBackend()
    allocate, store = PageLocked(backend), MemoryStore(1 << 20)
    store.keep_in(allocate)
    blocks = [make_block(i) for i in range(24)]
    threads = [threading.Thread(target=lambda k=k: [store.put(b) for b in blocks[k::4]]) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block in blocks:
        found = store.get(block.key)
        assert same(found, block)  # type: ignore[arg-type]
    del found
    assert allocate.held()["page_locked_bytes"] == 24 * (-(-blocks[0].nbytes // 4096) * 4096)
    store.clear()
    gc.collect()
    assert allocate.held()["page_locked_bytes"] == 0


# --- a store that keeps its blocks there ------------------------------------------------------------------------------


def test_a_block_is_copied_once_and_accounted_as_before() -> None:
    given: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        given.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    store, block = MemoryStore(1 << 20), make_block(1)
    store.keep_in(allocate)
    assert store.put(block)
    assert store.put(block), "it is there"
    found = store.get(block.key)
    assert same(found, block)  # type: ignore[arg-type]
    assert given == [block.nbytes] == [store.stats().bytes]
    store.keep_in(None)
    assert store.put(make_block(2))
    assert len(given) == 1


def test_without_a_mapping_the_memory_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives a process so many, and no more."""

    def refuse(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(slab.mmap, "mmap", refuse)
    allocate = PageLocked(VirtualBackend())
    store, block = MemoryStore(1 << 20, allocate=allocate), make_block(1)
    assert store.put(block)
    assert same(store.get(block.key), block)  # type: ignore[arg-type]
    assert allocate.held() == {"page_locked_bytes": 0, "pageable_bytes": block.nbytes}
    store.clear()
    gc.collect()
    assert allocate.held()["pageable_bytes"] == 0


def test_memory_that_is_not_there_is_a_skipped_write() -> None:
    store = MemoryStore(1 << 20, allocate=PageLocked(VirtualBackend()))
    store.keep_in(lambda nbytes: PageLocked(VirtualBackend())(1 << 62))
    assert not store.put(make_block(1))
    assert (store.stats().skipped_writes, store.stats().blocks, store.stats().bytes) == (1, 0, 0)


def test_tiers_pass_it_on_and_what_is_on_disk_stays_there(tmp_path: Path) -> None:
    backend = VirtualBackend()
    allocate = PageLocked(backend)
    with TieredStore([MemoryStore(1 << 20), DiskStore(tmp_path)]) as store:
        store.keep_in(allocate)
        block = make_block(1)
        store.put(block)
        assert allocate.held()["page_locked_bytes"] == -(-block.nbytes // 4096) * 4096
        store.tiers[0].clear()
        gc.collect()
        assert allocate.held()["page_locked_bytes"] == 0
        assert same(store.get(block.key), block)  # type: ignore[arg-type]
        assert allocate.held()["page_locked_bytes"] > 0, "it moved up"


def test_packed_blocks_stay_in_ordinary_memory() -> None:
    allocate = PageLocked(VirtualBackend())
    store = MemoryStore(1 << 20, compression="int8", allocate=allocate)
    store.put(make_block(1))
    assert store.stats().blocks == 1
    assert allocate.held()["page_locked_bytes"] == 0


# --- the buffers ------------------------------------------------------------------------------------------------------


def parts(value: int, nbytes: int = 1000) -> list[tuple[int, torch.Tensor]]:
    half = nbytes // 2
    return [(0, torch.full((half,), value, dtype=torch.uint8)), (half, torch.full((half,), value, dtype=torch.uint8))]


@pytest.mark.parametrize("order", ["late", "early", "random"])
def test_users_take_turns(order: str) -> None:
    ring = Ring(VirtualBackend(order=order))  # type: ignore[arg-type]
    a, b = ring.user(), ring.user()
    ring.send((a, 0), parts(10))
    ring.send((a, 1), parts(11))
    ring.send((b, 0), parts(20))
    for name, value in (((b, 0), 20), ((a, 0), 10), ((a, 1), 11), ((b, 1), 21)):
        with ring.piece(name, parts(value)) as slot:
            assert bool((slot[:1000] == value).all())
    assert ring.stats.late_pieces == 2, "the one that was overwritten, and the one that was never sent"
    assert ring.stats.bytes_carried == 1000 * ring.stats.pieces == 5000


def test_buffers_grow_and_go_back() -> None:
    ring = Ring(VirtualBackend(order="late"))
    user = ring.user()
    ring.send((user, 0), parts(1))
    assert ring.stats.slot_bytes == ROUND
    ring.send((user, 1), parts(2, 2 * ROUND))  # waits for what is on its way, and forgets it
    assert ring.stats.slot_bytes == 2 * ROUND
    for number, value, size in ((0, 1, 1000), (1, 2, 2 * ROUND)):
        with ring.piece((user, number), parts(value, size)) as slot:
            assert bool((slot[:size] == value).all())
    ring.close()
    assert ring.stats.slot_bytes == 0
    with ring.piece((user, 2), parts(3)) as slot:
        assert bool((slot[:1000] == 3).all())


def test_a_part_of_a_buffer_is_the_buffer() -> None:
    """The stand-in sees a copy to the middle of a buffer that is being read."""
    backend = VirtualBackend()
    slot, event = backend.empty(100), backend.event()
    backend.copy(slot[50:], torch.ones(50, dtype=torch.uint8))
    with pytest.raises(RaceError, match="before the copy"):
        backend.use(slot)
    backend.record(event, "copy")
    backend.wait("compute", event)
    backend.use(slot)
    with pytest.raises(RaceError, match="still being read"):
        backend.copy(slot[25:50], torch.ones(25, dtype=torch.uint8))


def test_no_room_leaves_the_ring_usable() -> None:
    ring = Ring(VirtualBackend(limit=5 * ROUND))
    with pytest.raises(CapacityError):
        ring.reserve(3 * ROUND)
    ring.reserve(100)
    with ring.piece((ring.user(), 0), parts(5)) as slot:
        assert bool((slot[:1000] == 5).all())


def sent(backend: VirtualBackend) -> tuple[Ring, PageLocked]:
    """A ring with a copy under way from memory that nobody else holds."""
    ring, allocate = Ring(backend), PageLocked(backend)
    source = allocate(4096)
    ring.send((ring.user(), 0), [(0, source)])
    ring.keep([source])
    del source
    gc.collect()
    return ring, allocate


def test_sources_are_held_until_their_copies_have_happened() -> None:
    backend = VirtualBackend(order="late")
    ring, allocate = sent(backend)
    assert allocate.held()["page_locked_bytes"] == 4096
    ring.close()
    gc.collect()
    assert allocate.held()["page_locked_bytes"] == 0
    assert not backend.races


def test_sources_whose_copies_have_happened_are_not_held() -> None:
    backend = VirtualBackend(order="early")
    ring, allocate = sent(backend)
    assert allocate.held()["page_locked_bytes"] == 0
    assert not backend.races


def test_a_ring_that_nobody_holds_waits_for_its_copies() -> None:
    backend = VirtualBackend(order="late")
    ring, allocate = sent(backend)
    del ring
    gc.collect()
    assert allocate.held()["page_locked_bytes"] == 0
    assert not backend.races
