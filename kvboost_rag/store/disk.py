"""Blocks in a folder: self-describing files, read by mapping them, with diskcache as the index beside them.

A look-up goes from the key straight to the file; the index is only told of it, in batches. So reads never wait for a
lock, and the index can be busy, damaged or gone without a block being lost. ``docs/store-format.md`` has the layout.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvboost_rag.errors import BlockFormatError, MissingExtraError, StoreError, UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.choice import parse_compression
from kvboost_rag.kv.codec import encode_parts
from kvboost_rag.kv.frames import require_zstd
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.arriving import ArrivingBlock
from kvboost_rag.store.base import BlockStore, Miss, Problem, StoreStats
from kvboost_rag.store.counters import Counters, T, admit
from kvboost_rag.store.disk_care import Care, check_prune, index_needed
from kvboost_rag.store.disk_check import check_store
from kvboost_rag.store.disk_files import BlockFiles, IndexUnavailable
from kvboost_rag.store.disk_folder import open_folder
from kvboost_rag.store.disk_quota import QuotaFull
from kvboost_rag.store.disk_read import BlockReader
from kvboost_rag.store.disk_uses import Uses
from kvboost_rag.store.manifest import Manifest
from kvboost_rag.store.readers import Readers
from kvboost_rag.store.settings import DEFAULT_DISK_BYTES, StoreSettings, folder_settings, usable

__all__ = ["DEFAULT_DISK_BYTES", "DEFAULT_FREE_BYTES", "DiskStore"]

DEFAULT_FREE_BYTES = 1 << 30
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskStore(BlockStore):
    """Blocks in ``folder``, which several processes may share (on a local file system).

    Args:
        folder: created, private to the user, if it is not there.
        limit_bytes: most bytes of block files.
        min_free_bytes: space on the medium that is left to others: a write that would go below is skipped.
        keep_text: keep the chunk's text in headers.
        lock_timeout_s: how long to wait for another process's transaction on the index.
        policy: who goes first when the limit is reached: ``"lru"``, ``"lfu"`` or ``"cost"`` (see
            :data:`~kvboost_rag.store.policy.POLICIES`).
        ttl_s: blocks older than this are misses, and go; 0 for no limit.
        compression: for what is written from now on: ``"none"``, ``"int8"``, ``"int4"``, ``"zstd"`` (exact), or both
            (``"int8+zstd"``).
        tenant_bytes: most bytes of the blocks under one salt: who would have more loses others of his own. 0 for no
            quota.

    Limit, policy, time to live, compression and quota are remembered by the folder: what is not given (None) is as it
    was given last, or 20 GiB, ``"lru"``, no limit, ``"none"`` and no quota.

    Raises:
        UsageError: an argument makes no sense.
        StoreError: the folder cannot be used: not a folder, not writable, or of a newer layout.
        MissingExtraError: diskcache is not installed, or the library of a ``compression`` that is given.
    """

    prunable = True
    arrives = True

    def __init__(
        self,
        folder: str | Path,
        limit_bytes: int | None = None,
        *,
        min_free_bytes: int = DEFAULT_FREE_BYTES,
        keep_text: bool = False,
        lock_timeout_s: float = 30.0,
        policy: str | None = None,
        ttl_s: float | None = None,
        compression: str | None = None,
        tenant_bytes: int | None = None,
    ) -> None:
        given = {"limit_bytes": limit_bytes, "policy": policy, "ttl_s": ttl_s, "compression": compression}
        given = {n: v for n, v in {**given, "tenant_bytes": tenant_bytes}.items() if v is not None}
        StoreSettings(**given)  # type: ignore[arg-type]  # wrong values are told before a folder is made
        if compression is not None and parse_compression(compression).framed:
            require_zstd()
        if min_free_bytes < 0:
            raise UsageError(f"a free-space floor of {min_free_bytes} bytes", hint="give at least 0")
        try:
            from kvboost_rag.store.disk_index import BlockIndex
        except ImportError as error:
            raise MissingExtraError(f"a store on disk needs diskcache: {error}", hint="pip install diskcache") from None
        self.folder = open_folder(folder)
        self.min_free_bytes, self.keep_text = min_free_bytes, keep_text
        self.counters = Counters()
        self._uses = Uses(self._tell)
        self._readers = Readers()
        try:
            self.settings = folder_settings(self.folder, **given)
            self.limit_bytes = self.settings.limit_bytes
            self.choice = usable(self.settings.compression, self.counters.warn)
            self.compression = self.choice.rounding
            self.files = BlockFiles(self.folder)
            self.index = BlockIndex(self.files, self.settings, lock_timeout_s)
            self._reader = BlockReader(self.files, self.settings.ttl_s, self._forget, self.delete)
            self.care = Care(self.files, self.index)
            self.manifest = Manifest(self.files, self.counters)
        except OSError as error:
            raise StoreError(f"cannot open the store in {self.folder}: {error}", hint="choose another folder") from None
        self.anchors = AnchorIndex(self.folder / "anchors.bin")
        self.files.sweep()
        if limit_bytes is not None or tenant_bytes is not None:  # perhaps smaller ones than before
            with suppress(IndexUnavailable, OSError):
                self.counters.count("evictions", self.care.fit(self.limit_bytes))

    def get(self, key: str) -> Block | Miss:
        return self.counters.result(*self._timed(self._reader.block, key))

    def layers(self, key: str) -> LayeredBlock | Miss:
        return self.counters.result(*self._timed(self._reader.layers, key))

    def _timed(self, read: Callable[[str], T | Miss], key: str) -> tuple[T | Miss, float]:
        started = time.perf_counter()
        found = read(key)
        if not isinstance(found, Miss):
            self.touch(key)
        return found, time.perf_counter() - started

    def get_many(self, keys: Sequence[str]) -> list[Block | Miss]:
        return list(self._readers.pool().map(self.get, keys)) if len(keys) > 1 else [self.get(key) for key in keys]

    def open_many(self, keys: Sequence[str]) -> list[Block | ArrivingBlock | Miss]:
        return list(self._readers.pool().map(self._open, keys))

    def _open(self, key: str) -> Block | ArrivingBlock | Miss:
        found, seconds = self._timed(self._reader.opened, key)
        if isinstance(found, LayeredBlock):
            return ArrivingBlock(found, seconds).then(self.counters.result)
        return self.counters.result(found, seconds)

    def put(self, block: Block) -> bool:
        started = time.perf_counter()
        path = self.files.path(block.key)
        if self.contains(block.key) and block.key == block.derive_key():
            self.touch(block.key)
            return True
        assert path is not None, block.key
        try:
            block = admit(block, keep_text=self.keep_text, compression=self.compression)
            parts = encode_parts(block, framed=self.choice.framed)
        except (BlockFormatError, MemoryError) as error:
            return self.counters.unfit(error)
        size = sum(len(part) for part in parts)
        limit = min(self.limit_bytes, self.settings.tenant_bytes or self.limit_bytes)
        if size > limit:
            return self.counters.skip("too large", f"{size} bytes do not fit the limit of {limit}")
        try:
            if shutil.disk_usage(self.folder).free - size < self.min_free_bytes:
                return self.counters.skip("floor", f"less than {self.min_free_bytes} bytes would stay free on the disk")
            self._write(block, parts, path, size)
        except QuotaFull as error:
            return self.counters.skip("quota", str(error))
        except OSError as error:
            cause = "full" if error.errno in _NO_ROOM else "write"
            return self.counters.skip(cause, f"cannot write to {self.folder}: {error}")
        return self.counters.wrote(time.perf_counter() - started)

    def contains(self, key: str) -> bool:
        path = self.files.path(key)
        return path is not None and os.path.exists(path)

    def delete(self, key: str) -> bool:
        self._uses.drop(key)
        try:
            return self.index.delete(key)
        except (IndexUnavailable, OSError):
            path = self.files.path(key)
            had = self.contains(key)
            if path is not None:
                with suppress(OSError):
                    path.unlink()
            return had

    def keys(self) -> Iterator[str]:
        self.flush()
        try:
            return iter(self.index.keys())
        except (IndexUnavailable, OSError):
            return iter([key for key in map(self.files.key, self.files.walk()) if key is not None])

    def stats(self) -> StoreStats:
        """Counters and sizes; ``bytes`` counts block files, headers included."""
        self.flush()
        stats = self.counters.stats("disk")
        with suppress(IndexUnavailable, OSError):
            stats.blocks, stats.bytes = self.index.totals()
            stats.pinned, stats.tenants = self.care.pinned(), self.care.tenants()
        stats.tenant_bytes = self.settings.tenant_bytes
        stats.limit_bytes, stats.compression = self.limit_bytes, str(self.choice)
        stats.policy, stats.ttl_s = self.settings.policy, self.settings.ttl_s
        stats.known_chunks = len(self.anchors)
        return stats

    def check(self, fix: bool = False) -> list[Problem]:
        self.flush()
        return check_store(self.files, self.index, self.manifest, self.anchors, fix)

    def prune(self, max_bytes: int | None = None, older_than_s: float | None = None) -> int:
        check_prune(max_bytes, older_than_s)
        self.flush()
        with index_needed(self.folder):
            dropped = self.care.prune(max_bytes, older_than_s, self.settings.ttl_s)
        self.counters.count("evictions", dropped)
        return dropped

    def delete_tagged(self, tag: str) -> int:
        self._uses.drop()
        with index_needed(self.folder):
            return self.care.delete_tagged(tag)

    def pin(self, keys: Iterable[str]) -> int:
        self.flush()
        with index_needed(self.folder):
            return self.care.pin(keys, self.limit_bytes)

    def unpin(self, keys: Iterable[str]) -> None:
        with index_needed(self.folder):
            self.care.unpin(keys)

    def clear(self) -> int:
        self._uses.drop()
        dropped = self.care.clear()
        self.manifest.clear()
        self.anchors.clear()
        return dropped

    def get_meta(self, name: str) -> bytes | None:
        return self.manifest.get(name)

    def put_meta(self, name: str, value: bytes) -> bytes:
        return self.manifest.put(name, value)

    def set_meta(self, name: str, value: bytes) -> bool:
        return self.manifest.set(name, value)

    def tenant_usage(self, salt: str) -> int:
        """Bytes of the blocks under ``salt``.

        Raises:
            StoreError: the index does not answer.
        """
        self.flush()
        with index_needed(self.folder):
            return self.care.held_by(salt)

    def touch(self, key: str) -> None:
        if self._uses.note(key):
            self._readers.pool().submit(self.flush)  # a look-up does not wait for the index

    def flush(self) -> None:
        """Tell the index what was used. Happens by itself every so often, and on :meth:`close`."""
        self._uses.flush()

    def _tell(self, keys: Iterable[str]) -> None:
        self.counters.count("evictions", self.index.touch(keys))

    def close(self) -> None:
        self.flush()
        self._readers.close()
        self.anchors.close()
        self.index.close()

    def _write(self, block: Block, parts: list[memoryview | bytes], path: Path, size: int) -> None:
        self.flush()  # recency decides who goes
        with self.files.staged(parts) as staged:
            try:
                dropped = self.index.publish(staged, path, block.key, size, block.header)
                self.counters.count("evictions", dropped)
            except IndexUnavailable as error:
                self.counters.warn("index", f"the index of {self.folder} does not answer ({error}); going on without")
                if staged.exists():
                    self.files.publish(staged, path)
                self.touch(block.key)  # its row comes later

    def _forget(self, key: str) -> None:
        with suppress(IndexUnavailable, OSError):
            self.index.forget(key)
