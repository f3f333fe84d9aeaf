"""Blocks in host memory, within a byte budget, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.base import BlockStore, Miss, Problem, StoreStats
from kvboost_rag.store.counters import Counters, admit

DEFAULT_MEMORY_BYTES = 2 << 30


class MemoryStore(BlockStore):
    """Blocks held in this process.

    Args:
        limit_bytes: most bytes of K and V held at once.
        keep_text: keep the chunk's text in headers.
    """

    def __init__(self, limit_bytes: int = DEFAULT_MEMORY_BYTES, *, keep_text: bool = False) -> None:
        if limit_bytes < 0:
            raise UsageError(f"a memory limit of {limit_bytes} bytes", hint="give at least 0")
        self.anchors = AnchorIndex()
        self.limit_bytes = limit_bytes
        self.keep_text = keep_text
        self._lock = threading.RLock()
        self._blocks: OrderedDict[str, Block] = OrderedDict()  # oldest use first
        self._bytes = 0
        self._meta: dict[str, bytes] = {}
        self._counters = Counters()

    def get(self, key: str) -> Block | Miss:
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
        return self._counters.result(Miss("absent") if block is None else block)

    def put(self, block: Block) -> bool:
        block = admit(block, keep_text=self.keep_text)
        with self._lock:
            if block.key in self._blocks:
                self._blocks.move_to_end(block.key)
                return True
        if block.nbytes > self.limit_bytes:
            detail = f"{block.nbytes} bytes do not fit the memory limit of {self.limit_bytes}"
            return self._counters.skip("too large", detail)
        block = _own(block)  # may copy: outside of the lock
        with self._lock:
            self._insert(block)
        return True

    def _insert(self, block: Block) -> None:
        if block.key in self._blocks:  # another thread was faster
            return
        while self._bytes + block.nbytes > self.limit_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self._bytes -= oldest.nbytes
            self._counters.count("evictions")
        self._blocks[block.key] = block
        self._bytes += block.nbytes
        self._counters.count("writes")

    def touch(self, key: str) -> None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def contains(self, key: str) -> bool:
        with self._lock:
            return key in self._blocks

    def delete(self, key: str) -> bool:
        with self._lock:
            block = self._blocks.pop(key, None)
            self._bytes -= block.nbytes if block is not None else 0
        return block is not None

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._blocks))

    def stats(self) -> StoreStats:
        stats = self._counters.stats("memory")
        with self._lock:
            stats.blocks, stats.bytes = len(self._blocks), self._bytes
        stats.limit_bytes = self.limit_bytes
        stats.known_chunks = len(self.anchors)
        return stats

    def check(self, fix: bool = False) -> list[Problem]:
        with self._lock:
            wrong = [key for key, block in self._blocks.items() if block.derive_key() != key]
        problems = [Problem("mismatch", key, "contents lead to another key", fix and self.delete(key)) for key in wrong]
        return problems + [Problem("anchors", "memory", text, fix) for text in self.anchors.check(fix)]

    def clear(self) -> int:
        with self._lock:
            dropped = len(self._blocks)
            self._blocks.clear()
            self._meta.clear()
            self._bytes = 0
        self.anchors.clear()
        return dropped

    def get_meta(self, name: str) -> bytes | None:
        with self._lock:
            return self._meta.get(name)

    def put_meta(self, name: str, value: bytes) -> bytes:
        with self._lock:
            return self._meta.setdefault(name, bytes(value))


def _own(block: Block) -> Block:
    """``block`` with a tensor that pins no more than its own bytes (a slice would keep the whole of what it was cut
    from alive, uncounted) and lives in host memory."""
    kv = block.kv.detach().cpu().contiguous()
    if kv.untyped_storage().nbytes() > kv.nbytes + kv.nbytes // 4 + 4096:
        kv = kv.clone()
    return block if kv is block.kv else replace(block, kv=kv)
