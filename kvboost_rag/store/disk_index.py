"""diskcache as the index of a store on disk: which blocks there are, their sizes, and who has to go.

Each row says ``key → file, size, tags``; diskcache's triggers add the sizes up, its LRU column orders the rows, its
``cull`` drops rows and, through :class:`~kvboost_rag.store.disk_rows.BlockDisk`, the files with them. Ours is this:

* Files are renamed into place and removed *inside* the transaction that changes their row. So processes cannot remove
  each other's fresh files, and a crash leaves at worst a row without a file or a file without a row, both harmless.
* The index can be lost: the files say everything it knows. A damaged database is dropped and built again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import diskcache

from kvboost_rag.kv.block import BlockHeader
from kvboost_rag.store.disk_adopt import RowWriter
from kvboost_rag.store.disk_files import BlockFiles, IndexUnavailable, folder_lock
from kvboost_rag.store.disk_folder import DIR_MODE, FILE_MODE
from kvboost_rag.store.disk_quota import Quota
from kvboost_rag.store.disk_rows import BlockCache, BlockDisk
from kvboost_rag.store.settings import StoreSettings

log = logging.getLogger("kvboost_rag.store")
T = TypeVar("T")

_BROKEN = (sqlite3.Error, diskcache.Timeout)
_TAMPERED = (TypeError, ValueError, KeyError, AttributeError, AssertionError)  # diskcache on a tampered database


class BlockIndex:
    """The rows of one store. Safe from several threads and processes.

    Args:
        files: the store's files.
        settings: limit, quota, and who goes first.
        timeout_s: how long to wait for another process's transaction.
    """

    def __init__(self, files: BlockFiles, settings: StoreSettings, timeout_s: float = 30.0) -> None:
        self._files = files
        self._rows = RowWriter(files)
        self._settings = settings
        self._timeout = timeout_s
        self.quota = Quota(settings.tenant_bytes)
        self._folder = files.root / "index"
        self._database = self._folder / "cache.db"
        self._complete = files.root / ".indexed"  # present when every file that was there has a row
        self._lock = threading.RLock()
        self._cache: Any = None
        self._inode = -1  # of the database that is open
        with folder_lock(files.root), suppress(*_BROKEN):  # a full disk: tried again on every use
            self._open()

    def publish(self, staged: Path, path: Path, key: str, size: int, header: BlockHeader) -> int:
        """Move a staged file into place with its row, dropping what must go for it; the number of blocks dropped.
        A file that is there already stays: replacing it would make the block vanish for a moment.

        Raises:
            QuotaFull: pinned blocks leave the tenant no room.
            IndexUnavailable, OSError
        """

        def work(cache: Any) -> int:
            if path.exists():  # another process was faster, or an attempt whose commit failed
                self._rows.adopt(cache, key)
                return self._cull(cache, [key])
            cache.delete(key)  # a row that lost its file
            self.quota.require(cache, header.salt, size)
            self._rows.add(cache, key, size, header)
            dropped = self._cull(cache, [key])
            self._files.publish(staged, path)
            return dropped

        return self.run(work)

    def touch(self, keys: Iterable[str]) -> int:
        """Note use of ``keys``, in this order; rows that are missing are added. The number of blocks dropped when
        that showed the store to be over its limit. Raises IndexUnavailable."""

        def work(cache: Any) -> int:
            lacking = [key for key in keys if cache.get(key) is None]
            for key in lacking:
                self._rows.adopt(cache, key)
            return self._cull(cache, lacking)

        return self.run(work)

    def _cull(self, cache: Any, added: Sequence[str]) -> int:
        """Drop what must go: of the tenants whose keys were ``added`` first, then of all. Inside a transaction."""
        return self.quota.cull(cache, added) + int(cache.cull())

    def delete(self, key: str) -> bool:
        """Drop the row and the file of ``key``. True if there was a file. Raises IndexUnavailable."""
        path = self._files.path(key)

        def work(cache: Any) -> bool:
            had = path is not None and path.exists()
            cache.delete(key)
            if path is not None:
                path.unlink(missing_ok=True)
                cache.unpin([key])
                self._files.pin(key, False)
            return had

        return self.run(work)

    def forget(self, key: str) -> None:
        """Drop the row of ``key`` if its file is gone. Raises IndexUnavailable."""
        path = self._files.path(key)
        self.run(lambda cache: cache.delete(key) if path is None or not path.exists() else None)

    def totals(self) -> tuple[int, int]:
        """(blocks, bytes). Raises IndexUnavailable."""
        return self.run(lambda cache: (len(cache), cache.volume()), write=False)

    def keys(self) -> list[str]:
        """All keys. Raises IndexUnavailable."""
        return self.run(lambda cache: list(cache.iterkeys()), write=False)

    def clear(self) -> None:
        """Drop every row, its file, and every pin. Raises IndexUnavailable."""
        self.run(lambda cache: (cache.clear(), cache.unpin_all()))

    def integrity(self, fix: bool) -> list[str]:
        """diskcache's own check of its database. Raises IndexUnavailable."""

        def work(cache: Any) -> list[str]:
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # diskcache reports by warnings
                return [str(warning.message) for warning in cache.check(fix=fix)]

        return self.run(work, write=False)

    def rebuild(self, why: object) -> None:
        """Drop the database and build it from the block files."""
        with self._lock, folder_lock(self._files.root):
            self._disconnect()
            if _inode(self._database) == self._inode:  # else another process was faster
                self._discard(why)
            self._open()

    def close(self) -> None:
        """Close this thread's connection."""
        with self._lock:
            self._disconnect()

    def run(self, work: Callable[[Any], T], *, write: bool = True) -> T:
        """``work`` on the cache, as one transaction if ``write``; a damaged database is built again, once.

        Raises:
            IndexUnavailable: it is locked, or the disk is full.
        """
        with self._lock:
            try:
                return self._attempt(work, write)
            except _BROKEN as error:
                self._disconnect()  # also ends a transaction that could not be rolled back
                if _is_passing(error):
                    raise IndexUnavailable(str(error) or "locked") from error
                broken = error
            try:
                self.rebuild(broken)
                return self._attempt(work, write)
            except _BROKEN as error:
                self._disconnect()
                raise IndexUnavailable(str(error) or "locked") from error

    def _attempt(self, work: Callable[[Any], T], write: bool) -> T:
        if self._cache is None or _inode(self._database) != self._inode:  # built again by another process
            with folder_lock(self._files.root):
                self._disconnect()
                self._open()
        with self._cache.transact() if write else nullcontext():
            return work(self._cache)

    def _disconnect(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _open(self) -> None:
        """Connect; a database that is damaged, or locked for good, is built again. Hold the folder's lock."""
        try:
            self._cache = self._connect()
        except (*_BROKEN, *_TAMPERED) as error:
            if _is_full(error):
                raise
            self._discard(error)
            self._cache = self._connect()
        self._inode = _inode(self._database)
        if not self._complete.exists():
            self._rows.fill(self._cache)
            os.close(os.open(self._complete, os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        if self.quota.limit is not None:
            self._rows.note_tenants(self._cache)

    def _connect(self) -> Any:
        self._folder.mkdir(mode=DIR_MODE, exist_ok=True)
        if not self._database.exists() or not self._database.stat().st_size:
            self._complete.unlink(missing_ok=True)  # whatever was complete, this one is not
        with suppress(FileExistsError):  # so that SQLite takes over the private mode, for its side files too
            os.close(os.open(self._database, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        cache = BlockCache(
            str(self._folder),
            self._settings.policy,
            timeout=self._timeout,
            disk=BlockDisk,
            size_limit=self._settings.limit_bytes,
            cull_limit=0,  # we cull, when the new row is in
            sqlite_temp_store=2,  # memory: else every statement's undo log of a long transaction goes to a file
            sqlite_mmap_size=0,  # a database that is truncated under a mapping would end the process (SIGBUS)
            statistics=0,
            tag_index=0,
        )
        cache.volume(), len(cache)  # does it answer?
        return cache

    def _discard(self, why: object) -> None:
        log.warning("the index of %s is built again from its block files: %s", self._files.root, why)
        self._complete.unlink(missing_ok=True)
        for path in self._folder.glob("*"):
            with suppress(OSError):
                path.unlink()

    def complete(self) -> None:
        """Add the rows of files that lack one: after a kill, or where the index did not answer. Walks all files.
        Raises IndexUnavailable."""
        rows = set(self.keys())
        lacking = [key for path in self._files.walk() if (key := self._files.key(path)) and key not in rows]
        if lacking:
            self.touch(lacking)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _is_full(error: Exception) -> bool:
    """Whether the medium takes no writes: nothing that building the database again could mend."""
    return isinstance(error, sqlite3.OperationalError) and any(word in str(error) for word in ("full", "readonly"))


def _is_passing(error: Exception) -> bool:
    """Whether the database is only busy, or the disk full: then it is sound and stays."""
    return isinstance(error, diskcache.Timeout) or _is_full(error) or "locked" in str(error)
