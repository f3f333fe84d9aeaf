"""From a block's file and header to its row in the index; also for files whose rows were lost."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import BlockHeader
from kvboost_rag.kv.codec import read_header
from kvboost_rag.store.disk_files import BlockFiles, block_name
from kvboost_rag.store.disk_rows import BlockFile

_UNUSED_SHARE = 0.01  # of a file's age: how long it counts as unused when its row was lost


class RowWriter:
    """Adds rows for the files of one store. Every method may raise what the index's database raises."""

    def __init__(self, files: BlockFiles) -> None:
        self._files = files

    def add(self, cache: Any, key: str, size: int, header: BlockHeader | None, used_s: float | None = None) -> None:
        """Add the row of a block, used last at ``used_s`` (unix time; now), and say whose it is; without a header it is
        nobody's. The key has none yet. Inside a transaction."""
        name, tags, cost_s = block_name(key), header.tags if header else (), header.cost_s if header else 0.0
        assert name is not None, key
        cache.insert(key, BlockFile(name, size, cost_s), json.dumps(list(tags)) if tags else None, used_s)
        self._own(cache, key, size, header)

    def adopt(self, cache: Any, key: str) -> None:
        """Add the row of a file that lacks one. Inside a transaction."""
        path = self._files.path(key)
        if path is None or key in cache:
            return
        with suppress(OSError):
            self.add(cache, key, path.stat().st_size, self._describe(path))

    def fill(self, cache: Any) -> None:
        """A row for every block file. Row by row in the order of keys, because that is how indexes grow fast."""
        with cache.transact():
            present, now = set(cache.iterkeys()), time.time()
            for path in sorted(self._files.blocks.iterdir()):
                for name in sorted(os.listdir(path)) if path.is_dir() and not path.is_symlink() else ():
                    key = self._files.key(path / name)
                    if key is not None and key not in present:
                        with suppress(OSError):
                            self._fill_one(cache, key, path / name, now)
            cache.pin(self._files.pinned())

    def _fill_one(self, cache: Any, key: str, path: Path, now: float) -> None:
        info = path.lstat()
        # Who was written first counts as used first; but nobody as unused for long, for that is not known any more.
        age_s = max(0.0, now - info.st_mtime_ns / 1e9)
        self.add(cache, key, info.st_size, self._describe(path), now - age_s * _UNUSED_SHARE)

    def note_tenants(self, cache: Any) -> None:
        """Say whose the rows are that were written before there were tenants, by the headers of their files."""
        with cache.transact():
            for key in cache.tenants.unknown(len(cache)):
                path = self._files.path(key)
                with suppress(OSError):
                    if path is not None:
                        self._own(cache, key, path.stat().st_size, self._describe(path))

    def _own(self, cache: Any, key: str, size: int, header: BlockHeader | None) -> None:
        cache.tenants.own(key, cache.tenants.of_salt(header.salt if header is not None else ""), size)

    def _describe(self, path: Path) -> BlockHeader | None:
        """The header of a block file, or None: whoever asks for the block will find out."""
        with suppress(BlockFormatError, OSError):
            return read_header(self._files.read(path)[0])[0]
        return None
