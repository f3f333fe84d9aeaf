"""From a block's file and header to its row in the index; also for files whose rows were lost."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.block import BlockHeader
from kvboost_rag.kv.codec import read_header
from kvboost_rag.store.disk_files import BlockFiles, block_name
from kvboost_rag.store.disk_rows import BlockFile


class RowWriter:
    """Adds rows for the files of one store. Every method may raise what the index's database raises."""

    def __init__(self, files: BlockFiles) -> None:
        self._files = files

    def add(self, cache: Any, key: str, size: int, header: BlockHeader | None) -> None:
        """Add the row of a block, and say whose it is; without a header it is nobody's. The key has none yet. Inside a
        transaction."""
        name, tags, cost_s = block_name(key), header.tags if header else (), header.cost_s if header else 0.0
        assert name is not None, key
        cache.insert(key, BlockFile(name, size, cost_s), json.dumps(list(tags)) if tags else None)
        self._own(cache, key, size, header)

    def adopt(self, cache: Any, key: str) -> None:
        """Add the row of a file that lacks one. Inside a transaction."""
        path = self._files.path(key)
        if path is None or key in cache:
            return
        with suppress(OSError):
            self.add(cache, key, path.stat().st_size, self._describe(path))

    def fill(self, cache: Any) -> None:
        """A row for every block file, in the order in which they were written."""
        found = []
        for path in self._files.walk():
            key = self._files.key(path)
            with suppress(OSError):
                found.append((path.stat().st_mtime_ns, key))
        with cache.transact():
            for _, key in sorted((mtime, key) for mtime, key in found if key is not None):
                self.adopt(cache, key)
            cache.pin(self._files.pinned())

    def note_tenants(self, cache: Any) -> None:
        """Say whose the rows are that were written before there were tenants, by the headers of their files."""
        with cache.transact():
            for key in cache.tenants.unknown():
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
