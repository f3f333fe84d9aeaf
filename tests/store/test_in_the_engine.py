"""What an answer shows of the store behind it: compression never passes for exact, servers serve several engines."""

from __future__ import annotations

import fcntl
import sqlite3
from pathlib import Path

import pytest
import torch

from kvboost_rag.kv.block import Block
from kvboost_rag.store import BlockStore, RemoteStore, TieredStore, open_store
from tests.engine.helpers import DOCS, SYSTEM, chat, make_engine, prepared


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_compressed_blocks_hit_and_say_so(tmp_path: Path, kind: str) -> None:
    first = make_engine(store=tmp_path, compression=kind)
    first.warm(DOCS)
    done, report = prepared(first, chat())
    assert [c.outcome for c in report.chunks] == ["hit"] * len(DOCS)
    assert {c.reason for c in report.chunks} == {f"canonical block, {kind}"}
    first.close()
    with make_engine(store=tmp_path) as second:  # another process: the same hits, the same logits
        again, report = prepared(second, chat())
        assert [c.outcome for c in report.chunks] == ["hit"] * len(DOCS)
        assert torch.equal(again.logits, done.logits)


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_a_plan_says_what_the_store_will_take(tmp_path: Path, kind: str) -> None:
    texts = [" ".join(f"word{(7 * i + j) % 50}" for j in range(60)) for i in range(4)]
    with make_engine(store=tmp_path, compression=kind) as engine:
        planned = engine.plan_warm(texts).bytes
        assert engine.warm(texts).bytes == planned
        held = sum(block.packed.nbytes if block.packed else block.nbytes for block in blocks_of(engine.store))
        assert 0.7 * held < planned < 1.3 * held


@pytest.mark.parametrize(("kind", "exact"), [("none", True), ("int8", False)])
def test_a_compressed_block_of_the_very_head_is_not_exact(kind: str, exact: bool) -> None:
    with make_engine(compression=kind) as engine:
        engine.warm(DOCS[:1], head=SYSTEM)
        report = prepared(engine, chat(DOCS[:1]), repair="fast")[1]
        suffix = "" if exact else f", {kind}"
        assert [c.reason for c in report.chunks] == [f"block of this very head{suffix}"]
        assert report.exact is exact


def test_a_warm_up_on_one_machine_serves_another(remote_url: str) -> None:
    with make_engine(store=open_store(remote_url)) as one:
        assert one.warm(DOCS).stored == len(DOCS)
        done, _ = prepared(one, chat())
    with make_engine(store=open_store(remote_url)) as two:
        again, report = prepared(two, chat())
        assert [c.outcome for c in report.chunks] == ["hit"] * len(DOCS)
        assert torch.equal(again.logits, done.logits)
        assert two.warm(DOCS).stored == 0


def test_no_lock_is_held_while_the_model_runs(tmp_path: Path) -> None:
    """Whenever the model runs, another process could write to the store: its locks are free, its index takes writes."""
    forwards: list[int] = []

    def others_can_write(*args: object) -> None:
        with (tmp_path / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        other = sqlite3.connect(tmp_path / "index" / "cache.db", timeout=0, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
        other.close()
        forwards.append(1)

    with make_engine(store=tmp_path) as engine:
        handle = engine.model.register_forward_pre_hook(others_can_write)
        engine.warm(DOCS[:2])
        engine.generate(chat(), max_new_tokens=3)
        handle.remove()
    assert len(forwards) > 4


def test_an_engine_goes_on_when_its_server_dies(remote_url: str) -> None:
    with make_engine(store=open_store(remote_url, memory_bytes=0)) as engine:
        engine.warm(DOCS)
        assert isinstance(engine.store, RemoteStore)
        for name in ("read", "stream", "write", "create", "exists", "delete", "entries"):
            setattr(engine.store.medium, name, _dead)
        result = engine.generate(chat(), max_new_tokens=3)
        assert {c.outcome for c in result.report.chunks} == {"miss"}
        assert all("unavailable" in c.reason for c in result.report.chunks)


def blocks_of(store: BlockStore) -> list[Block]:
    last = store.tiers[-1] if isinstance(store, TieredStore) else store
    return [block for key in last.keys() if isinstance(block := last.get(key), Block)]


def _dead(*args: object) -> None:
    raise ConnectionError("gone")
