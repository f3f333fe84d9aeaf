"""Blocks that are handed out while their layers are on their way, from every tier that does so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import BlockStore, DiskStore, MemoryStore, Miss, NullStore, RemoteStore, TieredStore, open_store
from kvboost_rag.store.arriving import ArrivingBlock, BlockLost
from kvboost_rag.store.disk_files import block_name
from kvboost_rag.store.remote_link import Breaker, Link, TooLarge
from tests.store.blocks import make_block, same
from tests.store.test_remote import Shelf

LAYERS = 4
BLOCKS = [make_block(i, layers=LAYERS, tokens=64, head_dim=64) for i in range(5)]  # large enough to be mapped
PATIENCE_S = 60.0


@pytest.fixture(params=["disk", "redis", "cluster", "s3", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    if request.param == "disk":
        opened: BlockStore = DiskStore(tmp_path)
    else:
        opened = open_store(request.getfixturevalue(f"{request.param}_url"), memory_bytes=0)
    with opened as store:
        yield store


def arriving(found: object) -> ArrivingBlock:
    assert isinstance(found, ArrivingBlock), found
    return found


def read_all(block: ArrivingBlock) -> Block | None:
    for layer in range(block.num_layers):
        block.read(layer)
    return block.finish()


def test_memory_and_nothing_hand_out_what_they_have() -> None:
    with MemoryStore() as store:
        store.put(BLOCKS[0])
        assert same(store.open_many([BLOCKS[0].key])[0], BLOCKS[0])
        assert not store.arrives
    assert NullStore().open_many(["x"]) == [Miss("store off")]


def test_layer_by_layer_it_is_the_block_and_counts_once(store: BlockStore) -> None:
    for block in BLOCKS[:3]:
        store.put(block)
    assert store.arrives
    keys = [BLOCKS[1].key, BLOCKS[4].key, BLOCKS[0].key]
    first, absent, second = store.open_many(keys)
    assert absent == Miss("absent")
    for found, block in ((first, BLOCKS[1]), (second, BLOCKS[0])):
        one = arriving(found)
        assert (one.key, one.header, one.token_ids) == (block.key, block.header, block.token_ids)
        assert (one.shape, one.num_tokens, one.nbytes) == (tuple(block.kv.shape), block.num_tokens, block.nbytes)
        assert one.finish() is None, "not all layers were read"
        for layer in range(LAYERS):
            one.read(layer)
            assert torch.equal(one.kv[layer], block.kv[layer])
        assert store.stats().hits == (0 if found is first else 1), "counted when it is whole"
        assert same(one.finish(), block)
        assert one.finish() is None, "counted once"
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.read_bytes) == (2, {"absent": 1}, 2 * BLOCKS[0].nbytes)
    assert stats.read_s > 0
    assert sum(stats.read_counts) == 2


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("where", ["disk", "file"])
def test_compressed_blocks_come_back_as_they_are(kind: str, where: str, tmp_path: Path) -> None:
    url = tmp_path if where == "disk" else f"file://{tmp_path}"
    with open_store(url, memory_bytes=0, compression=kind) as store:
        store.put(BLOCKS[0])
        want = store.get(BLOCKS[0].key)
        got = read_all(arriving(store.open_many([BLOCKS[0].key])[0]))
        assert isinstance(want, Block)
        assert same(got, want)
        assert got is not None
        assert got.header == want.header
        assert got.packed is not None
        assert encode_block(got) == encode_block(want)


def test_a_whole_block_moves_up_and_an_abandoned_one_does_not(tmp_path: Path) -> None:
    near, far = MemoryStore(), DiskStore(tmp_path)
    with TieredStore([near, far]) as store:
        for block in BLOCKS[:2]:
            far.put(block)
        one, two = (arriving(found) for found in store.open_many([b.key for b in BLOCKS[:2]]))
        one.read(0)
        one.abandon()
        assert one.finish() is None
        assert near.stats().blocks == store.stats().hits == 0
        assert same(read_all(two), BLOCKS[1])
        assert (near.stats().blocks, store.stats().hits, far.stats().hits) == (1, 1, 1)
        found = store.open_many([b.key for b in BLOCKS[:2]])
        assert [type(one).__name__ for one in found] == ["ArrivingBlock", "Block"]


def test_old_formats_come_whole(tmp_path: Path) -> None:
    data = bytes.fromhex((Path(__file__).parent / "golden_block_v1.hex").read_text())
    from kvboost_rag.kv.codec import decode_block

    block = decode_block(data)
    with DiskStore(tmp_path) as disk:
        path = disk.files.path(block.key)
        assert path is not None
        path.parent.mkdir()
        path.write_bytes(data)
        assert same(disk.open_many([block.key])[0], block)
    shelf = Shelf()
    shelf.values[str(block_name(block.key))] = data
    with RemoteStore(shelf) as remote:
        assert same(remote.open_many([block.key])[0], block)


# -- a server that is slow, dies, or lies ----------------------------------------------------------------------------


def shelf_with(blocks: Sequence[Block], **link: Any) -> tuple[Shelf, RemoteStore]:
    shelf = Shelf()
    store = RemoteStore(shelf, link=Link(**{"timeout_s": 30.0, "attempts": 1, **link}))
    for block in blocks:
        store.put(block)
    return shelf, store


def no_call_is_left() -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if not [t for t in threading.enumerate() if t.name == "kvboost-remote"]:
            return True
        time.sleep(0.01)
    return False


class Broken:
    """A stream of which piece number ``at`` is the last one, until it is mended."""

    def __init__(self, shelf: Shelf, at: int, how: Exception | threading.Event) -> None:
        self.real, self.at, self.how, self.starts = shelf.stream, at, how, []  # type: ignore[var-annotated]
        shelf.stream = self  # type: ignore[assignment, method-assign]

    def __call__(self, names: Sequence[str], limit: int, starts: Sequence[int]) -> Iterator[Any]:
        self.starts.append(list(starts))
        for number, piece in enumerate(self.real(names, limit, starts)):
            if number == self.at and len(self.starts) == 1:
                if isinstance(self.how, Exception):
                    raise self.how
                self.how.wait(PATIENCE_S)
            yield piece


def test_a_second_attempt_goes_on_behind_the_first() -> None:
    shelf, store = shelf_with(BLOCKS[:2], attempts=2, backoff_s=0.001)
    shelf.piece = 1000
    broken = Broken(shelf, 20, ConnectionError("reset"))
    with store:
        found = [read_all(arriving(one)) for one in store.open_many([b.key for b in BLOCKS[:2]])]
        assert all(same(one, block) for one, block in zip(found, BLOCKS, strict=False))
    assert broken.starts == [[0, 0], [9000, 9000]]


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_server_that_goes_away_midway_is_a_loss_in_time(how: str) -> None:
    shelf, store = shelf_with(BLOCKS[:2], timeout_s=3.0 if how == "is silent" else 30.0)
    shelf.piece = len(encode_block(BLOCKS[0])) // 2  # header and the first layer
    stuck = threading.Event()
    Broken(shelf, 4, ConnectionError("reset") if how == "dies" else stuck)
    with store:
        for found in store.open_many([b.key for b in BLOCKS[:2]]):
            one = arriving(found)
            one.read(0)
            with pytest.raises(BlockLost) as caught:
                one.read(LAYERS - 1)
            assert caught.value.miss.reason == "unavailable"
            assert one.finish() is None
        stuck.set()
        stats = store.stats()
        assert (stats.hits, stats.misses) == (0, {"unavailable": 2})
        assert no_call_is_left()


def test_a_dead_server_is_misses_at_once_when_the_circuit_is_open() -> None:
    shelf, store = shelf_with(BLOCKS[:1], breaker=Breaker(failures=1, pause_s=1000))
    with store:
        shelf.failures = 1
        for _ in range(3):
            miss = store.open_many([BLOCKS[0].key])[0]
            assert isinstance(miss, Miss)
            assert miss.reason == "unavailable"
        assert shelf.calls.count("stream") == 1


def test_a_block_that_is_abandoned_frees_who_waits_and_ends_the_call() -> None:
    shelf, store = shelf_with(BLOCKS[:1])
    shelf.piece = len(encode_block(BLOCKS[0])) // 2
    stuck, lost = threading.Event(), []
    Broken(shelf, 2, stuck)
    with store:
        one = arriving(store.open_many([BLOCKS[0].key])[0])

        def wait() -> None:
            try:
                one.read(LAYERS - 1)
            except BlockLost as error:
                lost.append(error.miss.reason)

        waiter = threading.Thread(target=wait)
        waiter.start()
        one.abandon()
        waiter.join(PATIENCE_S)
        assert lost == ["unavailable"]
        assert store.stats().misses == {}, "nobody asked for it any more"
        stuck.set()
        assert no_call_is_left()


def test_every_byte_of_a_streamed_value_flipped_in_turn() -> None:
    block = make_block(1, tokens=2, layers=2)
    shelf, store = shelf_with([block])
    name, good = str(block_name(block.key)), encode_block(block)
    with store:
        for i in range(len(good)):
            shelf.values[name] = good[:i] + bytes([good[i] ^ 0x41]) + good[i + 1 :]
            found = store.open_many([block.key])[0]
            if isinstance(found, ArrivingBlock):
                with pytest.raises(BlockLost) as caught:
                    read_all(found)
                found = caught.value.miss
                assert name not in shelf.values, "removed"
            assert isinstance(found, Miss)
            assert found.reason in ("damaged", "foreign")
        shelf.values[name] = good
        assert same(read_all(arriving(store.open_many([block.key])[0])), block)


@pytest.mark.parametrize("cut", [0, 7, 60, 300, -1])
def test_a_truncated_value_is_damaged(cut: int) -> None:
    block = make_block(1)
    shelf, store = shelf_with([block])
    name = str(block_name(block.key))
    with store:
        shelf.values[name] = shelf.values[name][:cut]
        miss = store.open_many([block.key])[0]
        assert isinstance(miss, Miss)
        assert miss.reason == "damaged"
        assert name not in shelf.values


def test_what_must_not_be_used_is_not_handed_out(tmp_path: Path) -> None:
    shelf, store = shelf_with(BLOCKS[:2])
    one, two = (str(block_name(b.key)) for b in BLOCKS[:2])
    old = make_block(9, layers=LAYERS, tokens=64, created_s=time.time() - 100)
    with store:
        shelf.values[one] = shelf.values[two]
        shelf.values[str(block_name(old.key))] = encode_block(old)
        store.max_block_bytes = 1 << 19
        shelf.values[two] = bytes(1 << 20)
        found = store.open_many([BLOCKS[0].key, BLOCKS[1].key, "no key"])
        assert [one.reason for one in found if isinstance(one, Miss)] == ["mismatch", "foreign", "absent"]
    with RemoteStore(shelf, ttl_s=50) as strict:
        miss = strict.open_many([old.key])[0]
        assert isinstance(miss, Miss)
        assert miss.reason == "expired"
    with DiskStore(tmp_path, ttl_s=50) as disk:
        disk.put(old)
        miss = disk.open_many([old.key])[0]
        assert isinstance(miss, Miss)
        assert miss.reason == "expired"


@pytest.mark.parametrize("server", ["redis", "cluster", "s3", "file"])
def test_a_medium_streams_values_side_by_side_and_from_the_middle(server: str, request: pytest.FixtureRequest) -> None:
    with open_store(request.getfixturevalue(f"{server}_url"), memory_bytes=0) as store:
        assert isinstance(store, RemoteStore)
        medium = store.medium
        values = {f"blocks/{i}": bytes([i]) * size for i, size in enumerate((5_000_000, 300_000, 10, 7_000_000))}
        for name, value in values.items():
            medium.write(name, value)
        names, starts = [*values, "blocks/none"], [2_000_000, 0, 0, 0, 0]
        got: dict[int, list[Any]] = {i: [] for i in range(5)}
        for i, piece in medium.stream(names, 6_000_000, starts):
            got[i].append(piece)
        assert [pieces[0] for pieces in got.values()] == [5_000_000, 300_000, 10, TooLarge(7_000_000), None]
        bodies = [b"".join(pieces[1:]) for pieces in got.values()]
        assert bodies[:3] == [values[name][start:] for name, start in zip(names[:3], starts, strict=False)]
        assert bodies[3:] == [b"", b""]
        assert len(got[0]) > 2, "in pieces"


def test_a_server_that_sends_nothing_for_ever_is_not_listened_to_for_ever() -> None:
    shelf, store = shelf_with(BLOCKS[:2], timeout_s=0.3)

    def nothing(names: Sequence[str], limit: int, starts: Sequence[int]) -> Iterator[Any]:
        yield from ((i, 1000) for i in range(len(names)))
        while True:
            yield 0, b""

    shelf.stream = nothing  # type: ignore[assignment, method-assign]
    with store:
        found = store.open_many([block.key for block in BLOCKS[:2]])
        assert [miss.reason for miss in found if isinstance(miss, Miss)] == ["unavailable"] * 2
        assert no_call_is_left()


def test_what_is_deleted_while_it_arrives_does_not_move_up(tmp_path: Path) -> None:
    block = make_block(1, layers=LAYERS, tokens=64, head_dim=64, tags=("doc",))
    for delete in (lambda s: s.delete(block.key), lambda s: s.delete_tagged("doc"), lambda s: s.clear()):
        with open_store(tmp_path) as store:
            assert isinstance(store, TieredStore)
            store.put(block)
            store.tiers[0].clear()
            one = arriving(store.open_many([block.key])[0])
            delete(store)
            assert same(read_all(one), block), "the request that has it may use it"
            assert not store.contains(block.key)
