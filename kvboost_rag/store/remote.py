"""Blocks on a server that many machines share: Redis, Valkey, or an object store.

What comes from there counts as hostile: sizes are looked at before anything is fetched, a value becomes a block only if
checksums, format and key agree, and a damaged one is removed. What does not come in time is a miss with the reason
``unavailable``; after a few such the server is left alone for a while (see :mod:`~kvboost_rag.store.remote_link`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from kvboost_rag.errors import BlockFormatError, StoreError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.choice import parse_compression
from kvboost_rag.kv.codec import encode_parts
from kvboost_rag.kv.frames import require_zstd
from kvboost_rag.store.anchor_table import Records
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.arriving import ArrivingBlock
from kvboost_rag.store.base import BlockStore, Miss, Problem, StoreStats
from kvboost_rag.store.counters import Counters, admit
from kvboost_rag.store.disk_files import block_name, block_of_name
from kvboost_rag.store.policy import check_quota, check_ttl, check_write
from kvboost_rag.store.remote_absent import Presence
from kvboost_rag.store.remote_anchors import AnchorSync
from kvboost_rag.store.remote_check import check_blocks, drop_all, measure
from kvboost_rag.store.remote_link import Link, Medium, Unavailable
from kvboost_rag.store.remote_meta import RemoteManifest
from kvboost_rag.store.remote_queue import Ticker, WriteQueue
from kvboost_rag.store.remote_quota import RemoteQuota, tenant_of
from kvboost_rag.store.remote_read import BlockFetcher

MAX_BLOCK_BYTES = 1 << 30
REFRESH_S = 30.0
Asked = Callable[[Sequence[str], int], Mapping[str, Block | ArrivingBlock | Miss]]


class RemoteStore(BlockStore):
    """Blocks behind ``medium``.

    Args:
        medium: the server; this store closes it.
        anchors: the index of known texts to keep in step with the server's; a new one in memory if None.
        keep_text: keep the chunk's text in headers.
        compression: for what is written from here (see :data:`~kvboost_rag.kv.choice.CHOICES`).
        ttl_s: blocks older than this are misses.
        tenant_bytes: most bytes of the blocks under one salt: who would have more loses others of his own. 0 or None
            for no quota. Every machine that writes must be given the same.
        write: ``"through"``: ``put`` returns when the block is there; ``"back"``: it is sent in the background, and is
            lost if the process is killed before.
        timeout_s: most seconds that a look-up waits.
        write_timeout_s: most seconds that one write waits.
        max_block_bytes: larger values are not fetched.
        refresh_s: how often texts that other machines added are fetched, in the background.

    Raises:
        UsageError: an argument makes no sense.
        MissingExtraError: a compression whose library is not installed.
    """

    arrives = True

    def __init__(
        self,
        medium: Medium,
        *,
        anchors: AnchorIndex | None = None,
        keep_text: bool = False,
        compression: str = "none",
        ttl_s: float | None = None,
        tenant_bytes: int | None = None,
        write: str = "through",
        timeout_s: float = 5.0,
        write_timeout_s: float = 60.0,
        max_block_bytes: int = MAX_BLOCK_BYTES,
        refresh_s: float = REFRESH_S,
        link: Link | None = None,
    ) -> None:
        check_write(write)
        if min(timeout_s, write_timeout_s, refresh_s, max_block_bytes) <= 0:
            raise UsageError("time-outs, refresh_s and max_block_bytes must be positive")
        self.medium = medium
        self.keep_text, self._choice = keep_text, parse_compression(compression)
        self.compression = self._choice.rounding
        if self._choice.framed:
            require_zstd()
        self.ttl_s, self.max_block_bytes = check_ttl(ttl_s), max_block_bytes
        self.link = link or Link(timeout_s)
        self._write_timeout = write_timeout_s
        self._counters = Counters()
        self._manifest = RemoteManifest(medium, self.link, self._warn)
        self._quota = RemoteQuota(medium.ledger(), medium.write, check_quota(tenant_bytes))
        self._presence = Presence(medium, self.link, self._warn)
        self._fetcher = BlockFetcher(medium, self.link, self.ttl_s, self._remove, self._warn)
        self._unreadable = self._fetcher.unreadable
        self._queue = WriteQueue(self._send) if write == "back" else None
        self.anchors = AnchorIndex() if anchors is None else anchors
        self.sync = AnchorSync(self.anchors, medium, self.link)
        try:
            self.sync.refresh()
            self.sync.push_missing()
        except Unavailable as error:
            self._warn(error)
        self._ticker: Ticker | None = Ticker(self._tick, refresh_s)
        self.anchors.on_new = self._note

    # -- blocks --------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Block | Miss:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[Block | Miss]:
        return [found for found in self._look_up(keys, self._fetcher.fetch) if not isinstance(found, ArrivingBlock)]

    def open_many(self, keys: Sequence[str]) -> list[Block | ArrivingBlock | Miss]:
        return self._look_up(keys, self._fetcher.open)

    def _look_up(self, keys: Sequence[str], ask: Asked) -> list[Block | ArrivingBlock | Miss]:
        started = time.perf_counter()
        found: dict[str, Block | ArrivingBlock | Miss] = {}
        for key in dict.fromkeys(keys):
            waiting = self._queue.get(key) if self._queue else None
            if waiting is not None:
                found[key] = waiting
            elif block_name(key) is None:
                found[key] = Miss("absent", "not a key")
        wanted = [key for key in dict.fromkeys(keys) if key not in found]
        if wanted:
            found |= ask(wanted, self.max_block_bytes)
            self._quota.saw(found.values())
        seconds = (time.perf_counter() - started) / max(1, len(keys))
        for block in found.values():
            if isinstance(block, ArrivingBlock):
                block.then(self._counters.result).then(lambda whole, seconds: self._quota.saw([whole]))
        return [r if isinstance(r := found[key], ArrivingBlock) else self._counters.result(r, seconds) for key in keys]

    def _remove(self, key: str) -> bool:
        name = block_name(key)
        try:
            return name is not None and self.link.call(lambda: self._delete(name), timeout_s=self._write_timeout)
        except Unavailable:
            return False

    def _delete(self, name: str) -> bool:
        had = self.medium.delete([name]) > 0
        self._quota.removed(name)
        return had

    def put(self, block: Block) -> bool:
        if block.key == block.derive_key() and self._is_there(block.key):
            return True
        try:
            block = admit(block, keep_text=self.keep_text, compression=self.compression)
        except MemoryError as error:
            return self._counters.unfit(error)
        if self._queue is None:
            return self._send(block)
        return self._queue.add(block) or self._counters.skip("queue", "too many blocks wait to be written to it")

    def _is_there(self, key: str) -> bool:
        if key in self._unreadable or key in self._presence.absent:
            return False
        return (self._queue is not None and key in self._queue) or self._presence.ask(key) is True

    def _send(self, block: Block) -> bool:
        """Write a block to the server; False, with one warning, if it did not get there."""
        started, name = time.perf_counter(), str(block_name(block.key))
        try:
            value = b"".join(encode_parts(block, framed=self._choice.framed))
        except (BlockFormatError, MemoryError) as error:
            return self._counters.unfit(error)
        limit = min(self.medium.max_value_bytes, self.max_block_bytes, self._quota.limit or self.max_block_bytes)
        if len(value) > limit:
            return self._counters.skip("too large", f"{len(value)} bytes do not fit the limit of {limit}")
        try:
            write = lambda: self._quota.write(name, value, block.header.salt)  # noqa: E731
            self._counters.count("evictions", self.link.call(write, timeout_s=self._write_timeout))
        except Unavailable as error:
            return self._counters.skip("unavailable", f"the remote store does not take it ({error})")
        self._presence.absent.drop(block.key)
        self._unreadable.discard(block.key)
        return self._counters.wrote(time.perf_counter() - started)

    def contains(self, key: str) -> bool:
        return (self._queue is not None and key in self._queue) or self._presence.there(key)

    def delete(self, key: str) -> bool:
        waited = self._queue is not None and self._queue.drop(key)
        return self._remove(key) or waited

    def delete_tagged(self, tag: str) -> int:
        waiting = self._queue.tagged(tag) if self._queue is not None else []
        return sum([self.delete(key) for key in waiting]) + super().delete_tagged(tag)

    def touch(self, key: str) -> None:
        self._quota.touch(key)

    def tenant_usage(self, salt: str) -> int:
        """Bytes of the blocks under ``salt``, as far as they were written under a quota; 0 if the server does not
        answer."""
        with suppress(Unavailable):
            return self.link.call(lambda: self._quota.ledger.held(tenant_of(salt)))
        return 0

    def keys(self) -> Iterator[str]:
        """All keys; none if the server does not answer."""
        try:
            listed = self.link.call(lambda: list(self.medium.entries("blocks")), timeout_s=self._write_timeout)
        except Unavailable as error:
            self._warn(error)
            return iter(())
        return iter([key for name, _ in listed if (key := block_of_name(name)) is not None])

    def stats(self) -> StoreStats:
        """Counters and sizes. Blocks are counted for two seconds or up to 10,000: after that, ``complete`` is False."""
        stats = self.quick_stats()
        with suppress(Unavailable):
            stats.blocks, stats.bytes, stats.complete = measure(self.medium, self.link)
        return stats

    def quick_stats(self) -> StoreStats:
        stats = self._counters.stats(self.medium.kind)
        stats.complete = False
        stats.tenant_bytes = self._quota.limit
        stats.known_chunks, stats.compression, stats.ttl_s = len(self.anchors), str(self._choice), self.ttl_s
        return stats

    def check(self, fix: bool = False) -> list[Problem]:
        """Fetches every block. With ``fix`` under a quota, blocks that were written without one count from then on."""
        problems = check_blocks(self.medium, self.link, self.max_block_bytes, fix, self._quota.adopt)
        return problems + [Problem("anchors", "memory", text, fix) for text in self.anchors.check(fix)]

    def clear(self) -> int:
        if self._queue is not None:
            self._queue.clear()
        self._manifest.forget()
        dropped = 0
        try:
            dropped = drop_all(self.medium, self.link, "blocks", self._write_timeout)
            drop_all(self.medium, self.link, "meta", self._write_timeout)
            self.link.call(self._quota.ledger.clear, timeout_s=self._write_timeout)
            self.sync.clear()
        except Unavailable as error:
            self._warn(error)
        self._presence.absent.clear()
        self.anchors.clear()
        return dropped

    # -- manifest ------------------------------------------------------------------------------------------------------

    def get_meta(self, name: str) -> bytes | None:
        return self._manifest.get(name)

    def put_meta(self, name: str, value: bytes) -> bytes:
        return self._manifest.put(name, value)

    def set_meta(self, name: str, value: bytes) -> bool:
        return self._manifest.set(name, value)

    # -- life ----------------------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Take in the texts that other machines added; how many were new. 0 if the server does not answer."""
        try:
            return self.sync.refresh()
        except (Unavailable, StoreError) as error:  # StoreError: the index was closed meanwhile
            self._warn(error)
            return 0

    def flush(self) -> None:
        """Send what waits: blocks of write-back, and known texts."""
        if self._queue is not None:
            self._queue.flush(self._write_timeout)
        self.sync.flush()

    def close(self) -> None:
        if self._ticker is None:
            return
        self._ticker.close()
        self._ticker = None
        left = self._queue.close(self._write_timeout) if self._queue is not None else 0
        if left or not self.sync.flush():
            self._counters.warn("close", f"closed with {left} blocks unsent, or new texts: the remote does not answer")
        self.anchors.on_new = None
        self.medium.close()

    def _note(self, records: Records) -> None:
        self.sync.note(records)
        if self._ticker is not None:
            self._ticker.wake()

    def _tick(self) -> None:
        if self.sync.flush():
            self.refresh()

    def _warn(self, error: Exception) -> None:
        self._counters.warn("unavailable", f"the {self.medium.kind} store does not answer, going on without: {error}")
