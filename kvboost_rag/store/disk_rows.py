"""What diskcache may keep for us, and how it evicts: block files by reference, plain keys, exact LRU.

Nothing is ever pickled or unpickled, whatever a tampered database says (CVE-2025-69872), and no file name that a row
holds is followed unless it is a block's.
"""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import diskcache

POLICY = "kvboost-least-recently-used"
# diskcache's own LRU drops ten rows at a time; ten blocks can be a large part of a store. One at a time is exact.
diskcache.EVICTION_POLICY[POLICY] = {
    **diskcache.EVICTION_POLICY["least-recently-used"],
    "cull": "SELECT {fields} FROM Cache ORDER BY access_time LIMIT min(?, 1)",
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
        return value.size, diskcache.core.MODE_BINARY, _UP + value.path, None

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> str:
        if mode != diskcache.core.MODE_BINARY or not isinstance(filename, str) or not _FILE.fullmatch(filename):
            raise RefusedRow("a row that is not of a block")
        return filename[len(_UP) :]

    def remove(self, file_path: str) -> None:
        if _FILE.fullmatch(file_path):  # a tampered row must not name other files
            with suppress(OSError):
                os.unlink(os.path.join(self._directory, file_path))


class BlockCache(diskcache.Cache):
    """diskcache's Cache, with the size limit applied to blocks alone, as the user means it."""

    def volume(self) -> int:
        size = self.reset("size")
        if type(size) is not int or size < 0:
            raise RefusedRow(f"a total size of {size!r}")
        return size
