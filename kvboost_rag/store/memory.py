"""Blocks in host memory, within a byte budget, least recently used out first."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.choice import parse_compression
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.base import Allocate, BlockStore, Miss, Problem, StoreStats
from kvboost_rag.store.counters import Counters, admit
from kvboost_rag.store.held import Held
from kvboost_rag.store.policy import PINNED_SHARE, check_quota, check_ttl, is_expired

DEFAULT_MEMORY_BYTES = 2 << 30


class MemoryStore(BlockStore):
    """Blocks held in this process.

    Args:
        limit_bytes: most bytes of K and V held at once.
        keep_text: keep the chunk's text in headers.
        ttl_s: blocks that were computed longer ago are misses, and go; 0 or None for no limit.
        compression: ``"none"``, ``"int8"`` or ``"int4"``: more blocks fit, each hit costs the time to unpack.
        tenant_bytes: most bytes of the blocks under one salt: who would have more loses others of his own. 0 or None
            for no quota.
        allocate: gives the memory that K and V lie in; see :meth:`keep_in`.

    Raises:
        UsageError: an argument makes no sense.
    """

    kind = "memory"  # in stats

    def __init__(
        self,
        limit_bytes: int = DEFAULT_MEMORY_BYTES,
        *,
        keep_text: bool = False,
        ttl_s: float | None = None,
        compression: str = "none",
        tenant_bytes: int | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        if limit_bytes < 0:
            raise UsageError(f"a memory limit of {limit_bytes} bytes", hint="give at least 0")
        choice = parse_compression(compression)
        if choice.framed:
            raise UsageError(
                f"{compression} in memory", hint="zstd is for folders and servers; here none, int8 or int4"
            )
        self.compression = choice.rounding
        self.ttl_s, self.tenant_bytes = check_ttl(ttl_s), check_quota(tenant_bytes)
        self.anchors = AnchorIndex()
        self.limit_bytes = limit_bytes
        self.keep_text = keep_text
        self._allocate = allocate
        self._lock = threading.RLock()
        self._blocks: OrderedDict[str, Held] = OrderedDict()  # oldest use first
        self._pinned: dict[str, int] = {}  # key → bytes
        self._bytes = 0
        self._held: Counter[str] = Counter()  # salt → bytes
        self._meta: dict[str, bytes] = {}
        self._counters = Counters()

    def get(self, key: str) -> Block | Miss:
        started = time.perf_counter()
        with self._lock:
            held = self._blocks.get(key)
            if held is None:
                return self._counters.result(Miss("absent"))
            self._blocks.move_to_end(key)
        if is_expired(held.header, self.ttl_s, time.time()):
            self.delete(key)
            return self._counters.result(Miss("expired", f"older than {self.ttl_s:g} s"))
        try:
            block = self._lend(key, held)
        except MemoryError:
            return self._counters.result(Miss("unavailable", "out of memory"))
        return self._counters.result(block, time.perf_counter() - started)

    def _lend(self, key: str, held: Held) -> Block:
        return held.block(key)

    def put(self, block: Block) -> bool:
        started = time.perf_counter()
        with self._lock:
            if block.key in self._blocks and block.key == block.derive_key():
                self._blocks.move_to_end(block.key)
                return True
        try:
            held = Held.of(admit(block, keep_text=self.keep_text, compression=self.compression), self.compression)
        except MemoryError as error:
            return self._counters.unfit(error)
        limit = min(self.limit_bytes, self.tenant_bytes or self.limit_bytes)
        if held.nbytes > limit:
            return self._counters.skip("too large", f"{held.nbytes} bytes do not fit the memory limit of {limit}")
        return self._take(block, held, started)

    def _take(self, block: Block, held: Held, started: float) -> bool:
        """Keep ``block``, which may be kept as ``held``, in memory of our own."""
        try:
            held = held.owned(self._allocate)  # may copy: outside of the lock
        except MemoryError as error:
            return self._counters.unfit(error)
        with self._lock:
            return self._insert(block.key, held, started)

    def _insert(self, key: str, held: Held, started: float) -> bool:
        if key in self._blocks:  # another thread was faster
            return True
        if not self._make_room(held):
            return False
        self._blocks[key] = held
        self._bytes += held.nbytes
        self._held[held.header.salt] += held.nbytes
        return self._counters.wrote(time.perf_counter() - started)

    def _make_room(self, held: Held) -> bool:
        """Drop blocks until ``held`` fits; False, and counted, where pinned ones are in the way."""
        salt = held.header.salt
        while self.tenant_bytes is not None and self._held[salt] + held.nbytes > self.tenant_bytes:
            if not self._evict(salt):
                return self._counters.skip("quota", "pinned blocks fill the tenant's quota")
        while self._bytes + held.nbytes > self.limit_bytes:
            if not self._evict():
                return self._counters.skip("pins", "pinned blocks fill the memory limit")
        return True

    def _evict(self, salt: str | None = None) -> bool:
        """Drop the least recently used block, of a tenant if given. False if only pinned ones are left."""
        oldest = next(
            (
                key
                for key, held in self._blocks.items()
                if key not in self._pinned and (salt is None or held.header.salt == salt)
            ),
            None,
        )
        if oldest is None:
            return False
        self.delete(oldest)
        self._counters.count("evictions")
        return True

    def keep_in(self, allocate: Allocate | None) -> None:
        self._allocate = allocate

    def touch(self, key: str) -> None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def contains(self, key: str) -> bool:
        with self._lock:
            return key in self._blocks

    def delete(self, key: str) -> bool:
        with self._lock:
            held = self._blocks.pop(key, None)
            self._pinned.pop(key, None)
            if held is not None:
                self._bytes -= held.nbytes
                self._held[held.header.salt] -= held.nbytes
        return held is not None

    def delete_tagged(self, tag: str) -> int:
        with self._lock:
            keys = [key for key, held in self._blocks.items() if tag in held.header.tags]
        return sum(self.delete(key) for key in keys)

    def pin(self, keys: Iterable[str]) -> int:
        count = 0
        with self._lock:
            for key in keys:
                held = self._blocks.get(key)
                if held is not None and self._may_pin(key, held):
                    self._pinned[key] = held.nbytes
                    count += 1
        return count

    def _may_pin(self, key: str, held: Held) -> bool:
        """Whether all pinned blocks, and the tenant's, stay within their shares with this one."""
        others = {pinned: size for pinned, size in self._pinned.items() if pinned != key}
        if sum(others.values()) + held.nbytes > self.limit_bytes * PINNED_SHARE:
            return False
        own = sum(size for pinned, size in others.items() if self._blocks[pinned].header.salt == held.header.salt)
        return self.tenant_bytes is None or own + held.nbytes <= self.tenant_bytes * PINNED_SHARE

    def size_of(self, keys: Iterable[str]) -> int:
        """Bytes of those of ``keys`` that are here."""
        with self._lock:
            return sum(held.nbytes for key in set(keys) if (held := self._blocks.get(key)) is not None)

    def tenant_usage(self, salt: str) -> int:
        """Bytes of the blocks under ``salt``."""
        with self._lock:
            return self._held[salt]

    def unpin(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._pinned.pop(key, None)

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._blocks))

    def stats(self) -> StoreStats:
        stats = self._counters.stats(self.kind)
        with self._lock:
            stats.blocks, stats.bytes, stats.pinned = len(self._blocks), self._bytes, len(self._pinned)
            stats.tenants = sum(size > 0 for size in self._held.values())
        stats.limit_bytes, stats.compression = self.limit_bytes, self.compression
        stats.tenant_bytes = self.tenant_bytes
        stats.policy, stats.ttl_s = "lru", self.ttl_s
        stats.known_chunks = len(self.anchors)
        return stats

    def check(self, fix: bool = False) -> list[Problem]:
        with self._lock:
            wrong = [key for key, held in self._blocks.items() if held.derived_key() != key]
        problems = [Problem("mismatch", key, "contents lead to another key", fix and self.delete(key)) for key in wrong]
        return problems + [Problem("anchors", self.kind, text, fix) for text in self.anchors.check(fix)]

    def clear(self) -> int:
        with self._lock:
            dropped = self._drop_blocks()
            self._meta.clear()
        self.anchors.clear()
        return dropped

    def _drop_blocks(self) -> int:
        dropped = len(self._blocks)
        self._blocks.clear()
        self._pinned.clear()
        self._held.clear()
        self._bytes = 0
        return dropped

    def get_meta(self, name: str) -> bytes | None:
        with self._lock:
            return self._meta.get(name)

    def put_meta(self, name: str, value: bytes) -> bytes:
        with self._lock:
            return self._meta.setdefault(name, bytes(value))

    def set_meta(self, name: str, value: bytes) -> bool:
        with self._lock:
            self._meta[name] = bytes(value)
        return True
