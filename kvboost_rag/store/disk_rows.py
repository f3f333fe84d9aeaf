"""What diskcache may keep for us, and how it evicts: block files by reference, plain keys, our own orders.

Nothing is ever pickled or unpickled, whatever a tampered database says (CVE-2025-69872), and no file name that a row
holds is followed unless it is a block's.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import diskcache

from kvboost_rag.store.disk_tenants import Tenants
from kvboost_rag.store.policy import POLICIES

# diskcache's own orders drop ten rows at a time; ten blocks can be a large part of a store. One at a time is exact.
# The newest row stays: under "lfu" it would go before it could be used.
_FREE = "key NOT IN (SELECT key FROM Pins)"
_INIT = "CREATE INDEX IF NOT EXISTS Cache_access_time ON Cache (access_time)"
for _name, _order in POLICIES.items():
    diskcache.EVICTION_POLICY[f"kvboost-{_name}"] = {
        "init": _INIT,
        "get": "access_time = {now}, access_count = access_count + 1",
        "cull": f"SELECT {{fields}} FROM Cache WHERE {_FREE} AND rowid != (SELECT MAX(rowid) FROM Cache) "
        f"ORDER BY {_order} LIMIT min(?, 1)",
    }
_UP = "../"  # diskcache resolves file names from its own folder, index/
_FILE = re.compile(r"\.\./blocks/[0-9a-f]{2}/[0-9a-f]{62}\.kvb")


class RefusedRow(sqlite3.DatabaseError):
    """A row that we never write: handled like any other damage of the database."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """What a row points to."""

    path: str  # relative to the store's root
    size: int  # bytes
    cost_s: float = 0.0  # seconds of compute that the block saves


class BlockDisk(diskcache.Disk):
    """Plain values only, both ways; block files by reference."""

    def put(self, key: object) -> tuple[Any, bool]:
        if type(key) not in (str, bytes, int, float):
            raise RefusedRow(f"a key of type {type(key).__name__}")
        return super().put(key)  # type: ignore[no-any-return]

    def get(self, key: Any, raw: bool) -> Any:
        if not raw:
            raise RefusedRow("a pickled key")
        return super().get(key, raw)

    def store(self, value: object, read: bool, key: object = diskcache.UNKNOWN) -> tuple[int, int, str | None, object]:
        if not isinstance(value, BlockFile):
            raise RefusedRow(f"a value of type {type(value).__name__}")
        return value.size, diskcache.core.MODE_BINARY, _UP + value.path, float(value.cost_s)

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> str:
        if mode != diskcache.core.MODE_BINARY or not isinstance(filename, str) or not _FILE.fullmatch(filename):
            raise RefusedRow("a row that is not of a block")
        return filename[len(_UP) :]

    def remove(self, file_path: str) -> None:
        if _FILE.fullmatch(file_path):  # a tampered row must not name other files
            with suppress(OSError):
                os.unlink(os.path.join(self._directory, file_path))


class BlockCache(diskcache.Cache):
    """diskcache's Cache, with the size limit applied to blocks alone, as the user means it, and with pins.

    The queries here use the one private name ``_sql`` (a statement on this thread's connection): diskcache has no
    public way to ask for rows by anything but their key.
    """

    def __init__(self, folder: str, policy: str, **settings: Any) -> None:
        super().__init__(folder, eviction_policy="none", **settings)
        self._order = POLICIES[policy]
        self._sql("CREATE TABLE IF NOT EXISTS Pins (key TEXT PRIMARY KEY)")
        self.tenants = Tenants(self._sql_now, self._order)
        self.reset("eviction_policy", f"kvboost-{policy}")

    def _sql_now(self, *statement: Any) -> Any:
        """``_sql`` of this moment: it belongs to the calling thread's connection."""
        return self._sql(*statement)

    def insert(self, key: str, file: BlockFile, tags: str | None, used_s: float | None = None) -> None:
        """A row for a key that has none: what :meth:`set` comes to then, in one statement (an index is built from a
        million files). ``used_s``: its last use, unix time; None: now."""
        size, mode, filename, cost_s = self.disk.store(file, False)
        now = time.time()
        self._sql(
            "INSERT INTO Cache (key, raw, store_time, access_time, access_count, tag, size, mode, filename, value) "
            "VALUES (?, 1, ?, ?, 0, ?, ?, ?, ?, ?)",
            (key, now, now if used_s is None else used_s, tags, size, mode, filename, cost_s),
        )

    def volume(self) -> int:
        size = self.reset("size")
        if type(size) is not int or size < 0:
            raise RefusedRow(f"a total size of {size!r}")
        return size

    def victims(self, count: int, *, pinned: bool = False) -> list[str]:
        """Keys of up to ``count`` rows that would go first; ``pinned``: of all, else of those that may go."""
        order = self._order.format(now=time.time())
        where = "" if pinned else f"WHERE {_FREE}"
        return self._keys(f"SELECT key FROM Cache {where} ORDER BY {order} LIMIT ?", (count,))

    def unused(self, since_s: float, count: int) -> list[str]:
        """Keys of up to ``count`` rows that were not used since then (unix time), and are not pinned."""
        return self._keys(f"SELECT key FROM Cache WHERE access_time < ? AND {_FREE} LIMIT ?", (since_s, count))

    def stored_before(self, time_s: float, count: int) -> list[str]:
        """Keys of up to ``count`` rows that are older than that (unix time), pinned or not."""
        return self._keys("SELECT key FROM Cache WHERE store_time < ? LIMIT ?", (time_s, count))

    def tags(self, part: str) -> list[tuple[str, str]]:
        """(key, tags as stored) of the rows whose tags contain ``part`` as text."""
        return [(str(k), str(t)) for k, t in self._sql("SELECT key, tag FROM Cache WHERE instr(tag, ?)", (part,))]

    def pin(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._sql("INSERT OR IGNORE INTO Pins VALUES (?)", (key,))

    def unpin(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._sql("DELETE FROM Pins WHERE key = ?", (key,))

    def unpin_all(self) -> None:
        self._sql("DELETE FROM Pins")

    def pinned(self) -> tuple[int, int]:
        """(pinned rows, their bytes)."""
        query = "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM Cache WHERE key IN (SELECT key FROM Pins)"
        ((count, size),) = self._sql(query).fetchall()
        return int(count), int(size)

    def size_of(self, key: str) -> int | None:
        """Bytes of a row's file, or None without a row."""
        rows = self._sql("SELECT size FROM Cache WHERE key = ?", (key,)).fetchall()
        return int(rows[0][0]) if rows else None

    def _keys(self, query: str, values: tuple[object, ...]) -> list[str]:
        return [key for (key,) in self._sql(query, values) if isinstance(key, str)]
