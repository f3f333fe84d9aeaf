"""Copies between device and host in every legal order; a wait that is left out is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost_rag.errors import CapacityError
from kvboost_rag.model.paged.courier import Courier
from kvboost_rag.model.streaming.virtual import RaceError, VirtualBackend
from kvboost_rag.plan import KVBudget
from tests.engine.helpers import TOLERANCE, chat
from tests.paged.helpers import PAGE, least_budget, pair, stats

ORDERS = ["late", "early", "random"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_copies(order: Any, seed: int) -> None:
    paged, unlimited = pair(backend=VirtualBackend(order=order, seed=seed))
    ours, theirs = (e.generate(chat(), max_new_tokens=30) for e in (paged, unlimited))
    assert ours.token_ids == theirs.token_ids
    ours, theirs = (e.score(chat(), list(range(40, 70)), logits=True) for e in (paged, unlimited))
    assert (ours.logits - theirs.logits).abs().max() < TOLERANCE
    assert stats(paged)["bytes_in"] > 0
    assert stats(paged)["spilled_pages"] > 0


def budgeted_times(times: int) -> Any:
    return lambda engine: KVBudget(times * least_budget(engine).nbytes, PAGE)


@pytest.mark.parametrize("order", ORDERS)
def test_the_next_layer_is_on_its_way(order: Any) -> None:
    """Rows at the end, over a context on the host: every layer but the first finds its first segment under way."""
    paged, unlimited = pair(backend=VirtualBackend(order=order), budget=budgeted_times(3))
    ids, cache, theirs = torch.arange(10, 310), paged.adapter.new_cache(300), unlimited.adapter.new_cache(300)
    for start, end, fetched_ahead in ((0, 240, False), (240, 260, True), (260, 280, True), (100, 280, False)):
        before, rows = stats(paged)["prefetched_layers"], torch.arange(start, end)
        a, b = (
            e.adapter.forward(ids[start:end], rows, c, keep_logits=0) for e, c in ((paged, cache), (unlimited, theirs))
        )
        assert (a - b).abs().max() < TOLERANCE
        # Rows on the host are written at every layer: there nothing may be fetched before.
        layers = paged.adapter.spec.num_layers - 1 if fetched_ahead else 0
        assert stats(paged)["prefetched_layers"] - before == layers
    assert cache.table.host_tokens > 100


def test_what_was_fetched_ahead_is_forgotten_when_the_host_writes() -> None:
    paged, unlimited = pair(budget=budgeted_times(3))
    ids, rows = torch.arange(10, 310), torch.arange(240, 260)
    query, found = torch.randn(1, 4, 20, 16), []
    for engine in (paged, unlimited):
        cache = engine.adapter.new_cache(300)
        engine.adapter.forward(ids[:240], torch.arange(240), cache)
        engine.adapter.forward(ids[240:260], rows, cache)
        kv = torch.ones(2, 1, 2, 20, 16)
        cache.at(rows)
        plan = cache.plan(rows)
        plan.attend(0, query, *cache.update(kv[0], kv[1], 0), 0.25)  # type: ignore[attr-defined]
        for _, _, view in cache.fill(0, 40):  # behind the back of layer 1, which is on its way
            view.mul_(-1)
        found.append(plan.attend(1, query, *cache.update(kv[0], kv[1], 1), 0.25))  # type: ignore[attr-defined]
    assert (found[0] - found[1]).abs().max() < TOLERANCE


class Forgetful(VirtualBackend):
    """Leaves out one kind of wait."""

    forgets = ""

    def wait(self, stream: Any, event: Any) -> None:
        if stream != self.forgets:
            VirtualBackend.wait(self, stream, event)

    def synchronize(self, event: Any) -> None:
        if self.forgets != "host":
            VirtualBackend.wait(self, "compute", event)


def forgetful(what: str, **options: Any) -> Forgetful:
    backend = Forgetful(**options)
    backend.forgets = what
    return backend


@pytest.mark.parametrize(
    ("what", "message"), [("copy", "before what it copies|still being read"), ("compute", "before the copy")]
)
def test_a_missing_wait_is_caught(what: str, message: str) -> None:
    paged, _ = pair(backend=forgetful(what))
    with pytest.raises(RaceError, match=message):
        paged.generate(chat(), max_new_tokens=30, repair="balanced")


def test_a_host_that_does_not_wait_is_caught() -> None:
    with pytest.raises(RaceError, match="still reads it"):
        pair(backend=forgetful("host"))[0].generate(chat(), max_new_tokens=60)


def test_without_the_checker_the_poison_shows() -> None:
    paged, _ = pair(backend=forgetful("host", check=False))
    assert paged.score(chat(), list(range(40, 70)), repair="fast", logits=True).logits is not None
    cache = paged.adapter.new_cache(64)
    ids = torch.arange(10, 74)
    for i in range(64):
        out = paged.adapter.forward(ids[i : i + 1], torch.tensor([i]), cache)
    assert out.isnan().any()


def test_landing_happens_before_the_segment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on the host without settling first reads what is not there yet."""
    paged, _ = pair(backend=VirtualBackend(order="late"))
    monkeypatch.setattr(Courier, "settle", lambda self: None)
    monkeypatch.setattr(Courier, "quiet", lambda self: None)
    cache = paged.adapter.new_cache(64)
    reference = pair()[1]
    theirs = reference.adapter.new_cache(64)
    ids = torch.arange(10, 74)
    gap = torch.tensor(0.0)
    for i in range(64):
        a, b = (
            e.adapter.forward(ids[i : i + 1], torch.tensor([i]), c) for e, c in ((paged, cache), (reference, theirs))
        )
        gap = torch.maximum(gap, (a - b).abs().max())
    assert gap.isnan() or gap > 100 * TOLERANCE


# --- host memory --------------------------------------------------------------------------------------------


def budgeted(**more: Any) -> Any:
    return lambda engine: KVBudget(least_budget(engine).nbytes, PAGE, **more)


def test_beyond_host_memory_is_refused_with_both_numbers() -> None:
    paged, _ = pair(budget=budgeted(host=0))
    with pytest.raises(CapacityError, match=r"needs \S+ GiB of host memory, \S+ GiB may be taken"):
        paged.generate(chat(), max_new_tokens=8)
    assert paged.generate("Hi", max_new_tokens=2).token_ids, "what fits still runs"


def test_disk_takes_what_memory_may_not(tmp_path: Any) -> None:
    paged, unlimited = pair(budget=lambda e: KVBudget(least_budget(e).nbytes, PAGE, host=100_000, disk=tmp_path))
    for repair in ("balanced", "fast"):
        ours, theirs = (e.generate(chat(), repair=repair, max_new_tokens=20) for e in (paged, unlimited))
        assert ours.token_ids == theirs.token_ids
    found = stats(paged)
    assert found["disk_bytes"] > 0
    assert 0 < found["host_bytes"] <= 100_000
    assert not list(tmp_path.iterdir()), "files have no name: nothing is left behind"


def test_a_disk_that_takes_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvboost_rag.model.paged import host

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    paged, _ = pair(budget=lambda e: KVBudget(least_budget(e).nbytes, PAGE, host=0, disk=tmp_path))
    monkeypatch.setattr(host, "_reserve", full)
    with pytest.raises(CapacityError, match="No space left"):
        paged.generate(chat(), max_new_tokens=8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("lock", "pinned"), [(None, "whole"), (0, "pageable")])
def test_page_locking_falls_back_and_says_so(lock: int | None, pinned: str, caplog: pytest.LogCaptureFixture) -> None:
    paged, unlimited = pair(backend=VirtualBackend(lock_each=lock))
    ours, theirs = (e.generate(chat(), max_new_tokens=8) for e in (paged, unlimited))
    assert ours.token_ids == theirs.token_ids
    assert stats(paged)["pinned"] == pinned
    warnings = [r for r in caplog.records if "page-locked" in r.getMessage()]
    told = [r.getMessage().partition(" could not")[0] for r in warnings]
    expected = ["blocks in memory", "host memory"] if pinned == "pageable" else []
    assert sorted(told) == expected, "told once, not per block or segment"
