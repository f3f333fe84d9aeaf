"""From what a user writes after ``store=`` to a store."""

from __future__ import annotations

import re
from pathlib import Path

from kvboost_rag.errors import UsageError
from kvboost_rag.store.base import BlockStore
from kvboost_rag.store.disk import DEFAULT_DISK_BYTES, DiskStore
from kvboost_rag.store.memory import DEFAULT_MEMORY_BYTES, MemoryStore
from kvboost_rag.store.null import NullStore
from kvboost_rag.store.tiered import TieredStore

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_PLANNED = ("redis", "rediss", "s3", "gs", "az")


def open_store(
    spec: str | Path | BlockStore | None,
    *,
    memory_bytes: int | None = None,
    limit_bytes: int | None = None,
    keep_text: bool = False,
) -> BlockStore:
    """The store that ``spec`` names.

    Args:
        spec: None (off), ``"memory"``, a folder (``~`` is expanded), or a store, which is returned as it is.
        memory_bytes: budget of the memory tier (2 GiB); 0 for a folder without one.
        limit_bytes: most bytes of block files in a folder (20 GiB).
        keep_text: keep the texts of chunks in block headers.

    Raises:
        UsageError: no such kind of store.
        StoreError: the folder cannot be used.
    """
    if isinstance(spec, BlockStore):
        return spec
    if spec is None:
        return NullStore()
    if not isinstance(spec, str | Path) or not str(spec):
        raise UsageError(f"store={spec!r} names no store", hint='give a folder, "memory" or None')
    memory_bytes = DEFAULT_MEMORY_BYTES if memory_bytes is None else memory_bytes
    if spec == "memory":
        return MemoryStore(memory_bytes, keep_text=keep_text)
    _refuse_url(str(spec))
    limit_bytes = DEFAULT_DISK_BYTES if limit_bytes is None else limit_bytes
    if memory_bytes == 0:
        return DiskStore(spec, limit_bytes, keep_text=keep_text)
    memory = MemoryStore(memory_bytes, keep_text=keep_text)
    return TieredStore([memory, DiskStore(spec, limit_bytes, keep_text=keep_text)])


def _refuse_url(spec: str) -> None:
    match = _URL.match(spec)
    if match is None:
        return
    scheme = match[1].lower()
    hint = 'for now: a folder, "memory" or None'
    if scheme in _PLANNED:
        raise UsageError(f"stores at {scheme}:// are planned, but not there yet", hint=hint)
    raise UsageError(f"unknown kind of store {scheme}://", hint=hint)
