"""Blocks that wait to be written: they are found, they can be deleted for good, and none holds up the others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvboost_rag.kv.block import Block
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store import BlockStore, MemoryStore, RemoteStore, TieredStore
from tests.store.blocks import make_block, same
from tests.store.test_remote import Shelf

BLOCKS = [make_block(i, tags=("doc",)) for i in range(3)]


class Gate(Shelf):
    """A server whose writes of blocks begin, and go on when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.open = threading.Event(), threading.Event()

    def write(self, name: str, value: bytes) -> None:
        if name.startswith("blocks/"):
            self.begun.set()
            self.open.wait(30)
        super().write(name, value)

    def blocks(self) -> list[str]:
        return [name for name in self.values if name.startswith("blocks/")]


def remote(gate: Gate) -> BlockStore:
    return RemoteStore(gate, write="back")


def tiered(gate: Gate) -> BlockStore:
    return TieredStore([MemoryStore(), RemoteStore(gate)], write="back")


def both(gate: Gate) -> BlockStore:
    return TieredStore([MemoryStore(), RemoteStore(gate, write="back")])


def one_by_one(store: BlockStore) -> int:
    return sum([store.delete(block.key) for block in BLOCKS])


def by_tag(store: BlockStore) -> int:
    return store.delete_tagged("doc")


@pytest.mark.parametrize("make", [remote, tiered, both])
@pytest.mark.parametrize("delete", [one_by_one, by_tag, BlockStore.clear])
def test_what_was_deleted_while_it_waited_does_not_come_back(
    make: Callable[[Gate], BlockStore], delete: Callable[[BlockStore], int]
) -> None:
    gate = Gate()
    with make(gate) as store:
        for block in BLOCKS:
            assert store.put(block)
        assert gate.begun.wait(30), "the first is being written"
        releaser = threading.Timer(0.05, gate.open.set)  # the deletion has to wait for that one
        releaser.start()
        delete_all = store.clear if delete is BlockStore.clear else lambda: delete(store)
        assert delete_all() >= (0 if delete is BlockStore.clear else len(BLOCKS))
        releaser.join()
        assert not any(store.contains(block.key) for block in BLOCKS)
    assert gate.blocks() == []


def test_a_block_that_only_waits_is_found_in_every_way() -> None:
    gate = Gate()
    with TieredStore([MemoryStore(0), RemoteStore(gate)], write="back") as store:
        for block in BLOCKS:
            assert store.put(block), "the first tier takes none"
        for block in BLOCKS:
            assert same(store.get(block.key), block)
            assert same(store.open_many([block.key])[0], block)
            assert isinstance(store.layers(block.key), LayeredBlock)
        gate.open.set()


class Broken(MemoryStore):
    """Has no memory for one block, and fails at another."""

    def put(self, block: Block) -> bool:
        if block.key == BLOCKS[0].key:
            raise MemoryError
        if block.key == BLOCKS[1].key:
            raise RuntimeError("this tier has a fault")
        return super().put(block)


def test_a_block_that_cannot_be_written_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    slow = Broken()
    with TieredStore([MemoryStore(), slow], write="back") as store:
        for block in BLOCKS:
            assert store.put(block)
        assert store.flush(30), "nothing waits for ever"
        assert same(slow.get(BLOCKS[2].key), BLOCKS[2])
        assert len([r for r in caplog.records if "a block that waited was not stored" in r.message]) == 2
