"""Longer runs, by ``make stress``: processes that write, read, evict, prune and pin at once, killed at random."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag.errors import StoreError
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import DiskStore, Miss
from kvboost_rag.store.policy import POLICIES
from tests.store import workers
from tests.store.blocks import make_block, same
from tests.store.test_processes import block_of, context, start

__all__ = ["context"]
pytestmark = pytest.mark.slow
ROUNDS = 12


def kill_after(started: list[Any], rng: random.Random, low: int, high: int) -> None:
    """Kill each worker after it reported ``low`` to ``high`` good steps."""
    for process, pipe in started:
        for _ in range(rng.randint(low, high)):
            seed, ok = pipe.recv()
            assert ok, seed
        process.kill()
    for process, _ in started:
        process.join()
        assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_at_once_with_kills(context: Any, tmp_path: Path, policy: str) -> None:
    rng = random.Random(policy)
    limit = 16 * len(encode_block(block_of(0)))
    DiskStore(tmp_path, limit, policy=policy).close()
    for round_ in range(ROUNDS):
        first = 10_000 * round_
        started = [start(context, workers.churn_and_tend, tmp_path, first + 1000 * i) for i in range(3)]
        kill_after(started, rng, 1, 25)
        with DiskStore(tmp_path) as store:
            store.check(fix=True)
            assert store.check() == []
            for seed in range(first, first + 3000, 1000):
                for one in range(seed, seed + 25):
                    found = store.get(block_of(one).key)
                    assert found == Miss("absent") if isinstance(found, Miss) else same(found, block_of(one))
            assert store.stats().bytes <= limit + len(encode_block(block_of(0)))


def test_quotas_hold_under_kills(context: Any, tmp_path: Path) -> None:
    rng = random.Random(5)
    one = len(encode_block(make_block(0, salt="tenant-0", **workers.SHAPE)))  # type: ignore[arg-type]
    DiskStore(tmp_path, 100 * one, tenant_bytes=4 * one).close()
    for round_ in range(ROUNDS // 2):
        started = [start(context, workers.churn_as_tenants, tmp_path, 10_000 * round_ + 1000 * i) for i in range(3)]
        kill_after(started, rng, 10, 30)
        with DiskStore(tmp_path) as store:
            store.check(fix=True)
            assert store.check() == []
            used = [store.tenant_usage(f"tenant-{i}") for i in range(3)]
            assert sum(used) == store.stats().bytes
            assert all(0 < size <= 4 * one for size in used), used


@pytest.mark.parametrize("compression", ["int8", "zstd"])
def test_every_byte_of_a_whole_store_flipped_in_turn(tmp_path: Path, compression: str) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    blocks = [replace(b := make_block(i, tokens=32, layers=1), kv=b.kv.clamp(1, 2)) for i in range(2)]
    with DiskStore(tmp_path, compression=compression) as store:
        store.put(replace(blocks[1], header=replace(blocks[1].header, salt="s"), key=""))
        store.put(blocks[0])
    expected: dict[str, object] = {}
    with DiskStore(tmp_path) as store:
        expected = {key: store.get(key) for key in store.keys()}
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        good = path.read_bytes()
        step = max(1, len(good) // 400)  # the database is large: some of its bytes
        for at in range(0, len(good), step):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x5A]) + good[at + 1 :])
            try:
                with DiskStore(tmp_path, min_free_bytes=0) as store:
                    for key, block in expected.items():
                        found = store.get(key)
                        assert isinstance(found, Miss) or same(found, block)  # type: ignore[arg-type]
                        if isinstance(found, Miss):
                            store.put(block)  # type: ignore[arg-type]
            except StoreError:
                if path.name != "store-format":  # another layout's number, told as such
                    raise
            path.write_bytes(good)
