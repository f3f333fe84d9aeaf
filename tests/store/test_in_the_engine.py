"""What an answer shows of the store behind it: compression never passes for exact, servers serve several engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvboost_rag.store import RemoteStore, open_store
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


def test_an_engine_goes_on_when_its_server_dies(remote_url: str) -> None:
    with make_engine(store=open_store(remote_url, memory_bytes=0)) as engine:
        engine.warm(DOCS)
        assert isinstance(engine.store, RemoteStore)
        for name in ("read", "stream", "write", "create", "exists", "delete", "entries"):
            setattr(engine.store.medium, name, _dead)
        result = engine.generate(chat(), max_new_tokens=3)
        assert {c.outcome for c in result.report.chunks} == {"miss"}
        assert all("unavailable" in c.reason for c in result.report.chunks)


def _dead(*args: object) -> None:
    raise ConnectionError("gone")
