"""Several real processes on one folder, some of them killed in the middle of what they do."""

from __future__ import annotations

import multiprocessing
import random
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import encode_block
from kvboost_rag.store import DiskStore, Miss
from tests.store import workers
from tests.store.blocks import make_block, same


@pytest.fixture(scope="module")
def context() -> Any:
    context = multiprocessing.get_context("forkserver")  # one server imports torch, every process starts from it
    context.set_forkserver_preload(["tests.store.workers"])
    return context


def start(context: Any, target: Any, *args: object) -> tuple[BaseProcess, Connection]:
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*args, there), daemon=True)
    process.start()
    there.close()
    return process, here


def block_of(seed: int) -> Block:
    return make_block(seed, **workers.SHAPE)  # type: ignore[arg-type]


def assert_whole(store: DiskStore, seeds: list[int]) -> int:
    """Every block is absent or exact; the number of exact ones."""
    found = [store.get(block_of(seed).key) for seed in seeds]
    for seed, result in zip(seeds, found, strict=True):
        assert result == Miss("absent") if isinstance(result, Miss) else same(result, block_of(seed))
    return sum(isinstance(result, Block) for result in found)


@pytest.mark.parametrize("shared", [True, False], ids=["same keys", "different keys"])
def test_processes_write_at_once(context: Any, tmp_path: Path, shared: bool) -> None:
    seeds = [list(range(15)) if shared else list(range(15 * i, 15 * i + 15)) for i in range(3)]
    started = [start(context, workers.put_blocks, tmp_path, part) for part in seeds]
    for _, pipe in started:
        assert pipe.recv() == "ready"
    for _, pipe in started:
        pipe.send("go")
    reports = [[pipe.recv() for _ in range(16)] for _, pipe in started]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0
    assert all(ok for report in reports for _, ok in report[:-1])
    assert len({report[-1] for report in reports}) == 1  # one manifest entry, the same for all
    with DiskStore(tmp_path) as store:
        everything = sorted({seed for part in seeds for seed in part})
        assert assert_whole(store, everything) == len(everything)
        assert store.stats().blocks == len(everything)
        assert store.check() == []


def test_killed_at_random_points(context: Any, tmp_path: Path) -> None:
    rng, written = random.Random(1), []
    limit = 12 * len(encode_block(block_of(0)))
    for round_ in range(6):
        started = [start(context, workers.churn, tmp_path, 1000 * (2 * round_ + i), limit) for i in range(2)]
        for process, pipe in started:
            for _ in range(rng.randint(1, 12)):
                seed, ok = pipe.recv()
                written.append(seed)
                assert ok
            process.kill()
        for process, _ in started:
            process.join()
            assert process.exitcode == -signal.SIGKILL
        with DiskStore(tmp_path, limit) as store:
            store.check(fix=True)
            assert store.check() == []
            assert_whole(store, written[-20:])
            assert store.stats().bytes <= limit + len(encode_block(block_of(0)))
    with DiskStore(tmp_path, limit) as store:
        assert store.put(block_of(999_999))
        assert sum(path.stat().st_size for path in store.files.walk()) <= limit


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("function", "nth"), [("write", 1), ("write", 2), ("write", 3), ("fsync", 2), ("replace", 2)])
def test_killed_at_each_step(context: Any, tmp_path: Path, function: str, nth: int, before: bool) -> None:
    process = context.Process(target=workers.die_in, args=(tmp_path, function, nth, before))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with DiskStore(tmp_path) as store:
        exact = assert_whole(store, [0, 1, 2])
        store.check(fix=True)
        assert store.check() == []
        assert assert_whole(store, [0, 1, 2]) == exact == store.stats().blocks
        assert all(store.put(block_of(seed)) for seed in range(3))
        assert list(store.files.tmp.iterdir()) == []
