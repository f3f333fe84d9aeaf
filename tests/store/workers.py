"""What the other processes of the tests do."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from kvboost_rag.store import DiskStore, Miss
from tests.store.blocks import make_block, same

# 32 KiB each: several pages, so that a kill can land inside a write
SHAPE = {"layers": 8, "tokens": 16, "head_dim": 32}


def put_blocks(folder: Path, seeds: list[int], pipe: Connection) -> None:
    """Put, read back and report every block, then the winner of a manifest entry."""
    with DiskStore(folder) as store:
        pipe.send("ready")
        pipe.recv()
        winner = store.put_meta("head", str(os.getpid()).encode())
        for seed in seeds:
            block = make_block(seed, **SHAPE)  # type: ignore[arg-type]
            pipe.send((seed, store.put(block) and same(store.get(block.key), block)))
        pipe.send(winner)


def churn(folder: Path, first_seed: int, limit_bytes: int, pipe: Connection) -> None:
    """Put blocks without end, evicting as it goes, and report each; until killed."""
    store = DiskStore(folder, limit_bytes)
    for seed in range(first_seed, first_seed + 100_000):
        block = make_block(seed, **SHAPE)  # type: ignore[arg-type]
        store.put(block)
        found = store.get(block.key)
        store.put_meta(f"{seed}", b"x")
        pipe.send((seed, isinstance(found, Miss) or same(found, block)))  # the other process may evict it at once


def die_in(folder: Path, module_function: str, nth: int, before: bool) -> None:
    """Put blocks and be killed at the ``nth`` call of an ``os`` function, before or after what it does."""
    store = DiskStore(folder)
    real, calls = getattr(os, module_function), [0]

    def deadly(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == nth and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, module_function, deadly)
    for seed in range(3):
        store.put(make_block(seed, **SHAPE))  # type: ignore[arg-type]


def churn_and_tend(folder: Path, first_seed: int, pipe: Connection) -> None:
    """Like :func:`churn`, with the limits that the folder remembers, and with maintenance in between; until killed."""
    store = DiskStore(folder, lock_timeout_s=60)
    for seed in range(first_seed, first_seed + 100_000):
        block = make_block(seed, tags=(str(seed % 7),), cost_s=seed % 5, **SHAPE)  # type: ignore[arg-type]
        store.put(block)
        found = store.get(block.key)
        if seed % 5 == 0:
            store.pin([block.key])
        if seed % 11 == 0:
            store.unpin(store.keys())
            store.prune(max_bytes=4 * block.nbytes)
        if seed % 13 == 0:
            store.delete_tagged("3")
        pipe.send((seed, isinstance(found, Miss) or same(found, block)))


def churn_as_tenants(folder: Path, first_seed: int, pipe: Connection) -> None:
    """Put blocks of three tenants without end, under the quota that the folder remembers; until killed."""
    store = DiskStore(folder, lock_timeout_s=60)
    for seed in range(first_seed, first_seed + 100_000):
        block = make_block(seed, salt=f"tenant-{seed % 3}", **SHAPE)  # type: ignore[arg-type]
        store.put(block)
        found = store.get(block.key)
        pipe.send((seed, isinstance(found, Miss) or same(found, block)))
