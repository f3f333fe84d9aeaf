"""The store that is off: nothing is kept, every look-up says so."""

from __future__ import annotations

from collections.abc import Iterator

from kvboost_rag.kv.block import Block
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.base import BlockStore, Miss, Problem, StoreStats
from kvboost_rag.store.counters import Counters


class NullStore(BlockStore):
    """Keeps no block. The manifest still works, within this object's life: a frozen head must stay the same."""

    def __init__(self) -> None:
        self.anchors = AnchorIndex()
        self._meta: dict[str, bytes] = {}
        self._counters = Counters()

    def get(self, key: str) -> Block | Miss:
        return self._counters.result(Miss("store off"))

    def put(self, block: Block) -> bool:
        self._counters.count("skipped_writes")
        return False

    def contains(self, key: str) -> bool:
        return False

    def delete(self, key: str) -> bool:
        return False

    def keys(self) -> Iterator[str]:
        return iter(())

    def stats(self) -> StoreStats:
        stats = self._counters.stats("null")
        stats.known_chunks = len(self.anchors)
        return stats

    def check(self, fix: bool = False) -> list[Problem]:
        return [Problem("anchors", "memory", text, fix) for text in self.anchors.check(fix)]

    def clear(self) -> int:
        self._meta.clear()
        self.anchors.clear()
        return 0

    def get_meta(self, name: str) -> bytes | None:
        return self._meta.get(name)

    def put_meta(self, name: str, value: bytes) -> bytes:
        return self._meta.setdefault(name, bytes(value))

    def set_meta(self, name: str, value: bytes) -> bool:
        self._meta[name] = bytes(value)
        return True
