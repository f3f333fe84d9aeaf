"""From what a user writes after ``store=`` to a store."""

from __future__ import annotations

from pathlib import Path

from kvboost_rag.errors import UsageError
from kvboost_rag.store.base import BlockStore
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store.memory import DEFAULT_MEMORY_BYTES, MemoryStore
from kvboost_rag.store.null import NullStore
from kvboost_rag.store.policy import check_write
from kvboost_rag.store.remote_url import check_path, check_url, open_remote, scheme_of
from kvboost_rag.store.tiered import TieredStore


def open_store(
    spec: str | Path | BlockStore | None,
    *,
    memory_bytes: int | None = None,
    limit_bytes: int | None = None,
    keep_text: bool = False,
    compression: str | None = None,
    policy: str | None = None,
    ttl_s: float | None = None,
    tenant_bytes: int | None = None,
    local: str | Path | None = None,
    write: str = "through",
) -> BlockStore:
    """The store that ``spec`` names.

    Args:
        spec: None (off), ``"memory"``, a folder (``~`` is expanded), a URL (``redis://``, ``rediss://``, ``s3://``,
            ``gs://``, ``az://``, ``file://``; see ``docs/store.md`` for its options), or a store, which is returned as
            it is.
        memory_bytes: budget of the memory tier (2 GiB); 0 for none.
        limit_bytes: most bytes of block files in a folder (20 GiB).
        keep_text: keep the texts of chunks in block headers.
        compression: ``"none"``, ``"int8"`` (half of bfloat16) or ``"int4"`` (a third): such blocks are not exact;
            ``"zstd"`` (seven tenths, exact), ``"int8+zstd"``, ``"int4+zstd"`` for folders and servers.
        policy: who goes first when a folder is full: ``"lru"``, ``"lfu"`` or ``"cost"``.
        ttl_s: blocks older than this are misses; 0 for no limit.
        tenant_bytes: most bytes of the blocks under one salt, in a folder, on a server (every machine that writes
            there must be given the same), or in ``"memory"``; the memory tier in front of a folder gives each tenant
            the same share of its own budget, in front of a server the same quota. 0 for no quota.
        local: with a URL: a folder on this machine that keeps what was fetched.
        write: ``"back"``: what is put is in memory at once, and in folder and server a little later; a killed process
            loses what waits. (The same option in a server's URL is for the server alone.)

    A folder remembers limit, compression, policy, time to live and quota: None leaves them as they are. A server does
    not.

    Raises:
        UsageError: no such kind of store, or an option that makes no sense.
        StoreError: the folder cannot be used.
        MissingExtraError: the client library of a server, or zstandard where it was asked for, is not installed.
    """
    if isinstance(spec, BlockStore):
        return spec
    if spec is None:
        return NullStore()
    check_write(write)
    if not isinstance(spec, str | Path) or not str(spec):
        raise UsageError(f"store={spec!r} names no store", hint='give a folder, a URL, "memory" or None')
    memory_bytes = DEFAULT_MEMORY_BYTES if memory_bytes is None else memory_bytes
    if spec == "memory":
        compression = compression or "none"
        return MemoryStore(
            memory_bytes, keep_text=keep_text, ttl_s=ttl_s, compression=compression, tenant_bytes=tenant_bytes
        )
    check_path(spec)
    url = str(spec) if scheme_of(str(spec)) else None
    if url is not None:
        check_url(url)  # wrong ones are told before a folder is made
    elif local is not None:
        raise UsageError("local= goes with a URL", hint="give the folder alone")
    tiers: list[BlockStore] = []
    in_memory = tenant_bytes
    folder = spec if url is None else local
    if folder is not None:
        disk = DiskStore(
            folder,
            limit_bytes,
            keep_text=keep_text,
            policy=policy,
            ttl_s=ttl_s,
            compression=compression,
            tenant_bytes=tenant_bytes,
        )
        compression, ttl_s = str(disk.choice), disk.settings.ttl_s
        in_memory = disk.settings.tenant_share(memory_bytes)
        tiers = [disk]
    if url is not None:
        anchors = tiers[0].anchors if tiers else None
        compression = compression or "none"
        tiers.append(
            open_remote(
                url,
                anchors=anchors,
                keep_text=keep_text,
                compression=compression,
                ttl_s=ttl_s,
                tenant_bytes=tenant_bytes,
            )
        )
    if memory_bytes:
        tiers.insert(0, MemoryStore(memory_bytes, keep_text=keep_text, ttl_s=ttl_s, tenant_bytes=in_memory))
    return tiers[0] if len(tiers) == 1 else TieredStore(tiers, write=write)
