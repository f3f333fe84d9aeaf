"""Spot checks: the right figures, in idle time, for a share of requests that their content decides; never in the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.engine import spot as spot_module
from kvboost_rag.engine.divergence import divergence
from kvboost_rag.engine.report import Report
from kvboost_rag.engine.request import Request
from kvboost_rag.engine.spot import SLICE_ROWS, SpotChecker
from kvboost_rag.errors import UsageError
from tests.engine.helpers import DOCS, chat, make_engine, reference, segmented, spy
from tests.paged.helpers import pair
from tests.tiny import tiny_model

N = 6


def make(share: float = 1.0, **options: Any) -> KVBoost:
    engine = make_engine(spot_check=share, on_low_fidelity="ignore", **{"prefix_bytes": 0, **options})
    engine.warm(DOCS)
    engine.engine.eos_ids = frozenset()
    return engine


@pytest.fixture
def engine() -> Iterator[KVBoost]:
    with make() as e:
        yield e


def spot(engine: KVBoost) -> SpotChecker:
    assert engine.engine.spot is not None
    return engine.engine.spot


def settle(engine: KVBoost) -> dict[str, Any]:
    """Figures once nothing is left to check."""
    spot(engine).wait()
    return spot(engine).stats()


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_the_figures_are_those_of_the_model_itself(engine: KVBoost, policy: str) -> None:
    ids = engine.generate(chat(), max_new_tokens=N, repair=policy).token_ids
    found = settle(engine)
    prompt = segmented(engine, chat())
    full, _ = reference(tiny_model(), [*prompt.token_ids, *ids[:-1]])
    full = full[prompt.num_tokens - 1 :]
    ours = engine.score(chat(), ids, repair=policy, logits=True).logits
    assert ours is not None
    assert found["checked"] == 1
    assert found["mean_kl"] == pytest.approx(float(divergence(full, ours).mean()), rel=1e-3)
    assert found["agreement"] == pytest.approx(float((full.argmax(-1) == ours.argmax(-1)).float().mean()))
    assert found["worst_kl"] == found["mean_kl"] > 1e-3


def test_paged_kv_is_checked_alike() -> None:
    """A check's own prefill lies in pages, too, most of them in host memory."""
    paged, unlimited = pair(spot_check=1.0, cost_model=True, on_low_fidelity="ignore", prefix_bytes=0)
    with paged, unlimited:
        for engine in (paged, unlimited):
            engine.generate(chat(), max_new_tokens=N)
        ours, theirs = settle(paged), settle(unlimited)
        assert ours["checked"] == theirs["checked"] == 1
        assert ours["mean_kl"] == pytest.approx(theirs["mean_kl"], rel=1e-2)


def test_figures_roll(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([(1.0, 0.5), (0.25, 1.0), RuntimeError("odd"), (0.75, 0.0)])

    def check(watch: Any) -> Any:
        value = next(found)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(spot(engine), "_check", check)
    for i in range(4):
        engine.generate(chat(question=f"\n\n{i}?"), max_new_tokens=1)
        settle(engine)
    stats = engine.stats()["spot"]
    want = {"share": 1.0, "checked": 3, "dropped": 0, "errors": 1, "waiting": 0}
    assert stats == {**want, "mean_kl": pytest.approx(2 / 3), "agreement": pytest.approx(0.5), "worst_kl": 1.0}


def test_only_the_first_tokens_of_an_answer_are_compared(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_module, "ANSWER_TOKENS", 3)
    ids = engine.generate(chat(), max_new_tokens=8).token_ids
    long = settle(engine)["mean_kl"]
    ours = engine.score(chat(), ids[:3], logits=True).logits
    full, _ = reference(tiny_model(), [*segmented(engine, chat()).token_ids, *ids[:2]])
    assert ours is not None
    assert long == pytest.approx(float(divergence(full[-3:], ours).mean()), rel=1e-3)


def test_sampled_answers_and_continued_conversations_are_checked() -> None:
    with make(prefix_bytes=1 << 28) as engine:
        first = engine.generate(chat(), max_new_tokens=N, temperature=1.0, seed=3)
        turns = [*chat(), {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        second = engine.generate(turns, max_new_tokens=N)
        assert not second.report.exact
        found = settle(engine)
        assert (found["checked"], found["errors"]) == (2, 0)


# --- which requests -------------------------------------------------------------------------------------------------


def test_it_is_off_by_default() -> None:
    engine = make_engine()
    assert engine.engine.spot is None
    assert engine.stats()["spot"] is None


def test_exact_answers_are_not_checked(engine: KVBoost) -> None:
    for options in ({"reuse": "off"}, {"reuse": "prefix"}, {"repair": Repair.full()}, {"chunks": ["unknown"]}):
        prompt = "unknown text" if "chunks" in options else chat()
        engine.generate(prompt, max_new_tokens=2, **options)
    engine.score(chat(), "the river")
    found = settle(engine)
    assert found["checked"] == found["waiting"] == 0
    assert found["mean_kl"] is None


def test_content_decides_and_the_share_is_kept() -> None:
    one, two = make(0.25), make(0.25)

    def chosen(engine: KVBoost, question: str) -> bool:
        request = Request.build(
            chat(question=question), reuse="chunks", repair=engine.repair, options={"max_new_tokens": 1}
        )
        return spot(engine).watch(request, engine.engine.segment(request, Report())[0]) is not None

    questions = [f"\n\nQuestion {i}?" for i in range(200)]
    first = [chosen(one, q) for q in questions]
    assert first == [chosen(two, q) for q in questions]
    assert 25 < sum(first) < 80
    assert not any(chosen(make(1e-9), q) for q in questions[:20])


@pytest.mark.parametrize("share", [-0.1, 1.5, "1", True, None])
def test_a_wrong_share_is_refused(share: Any) -> None:
    with pytest.raises(UsageError, match="spot_check"):
        make_engine(spot_check=share)


# --- never in the way -----------------------------------------------------------------------------------------------


def test_answers_are_what_they_are_without(engine: KVBoost) -> None:
    plain = make_engine(on_low_fidelity="ignore", prefix_bytes=0)
    plain.warm(DOCS)
    plain.engine.eos_ids = frozenset()
    for options in ({}, {"temperature": 1.0, "seed": 5}, {"repair": "fast"}):
        want = plain.generate(chat(), max_new_tokens=N, **options)
        got = engine.generate(chat(), max_new_tokens=N, **options)
        *_, streamed = engine.stream(chat(), max_new_tokens=N, **options)
        later = asyncio.run(engine.agenerate(chat(), max_new_tokens=N, **options))
        assert streamed.result is not None
        for result in (got, streamed.result, later):
            assert result.token_ids == want.token_ids
            assert result.report.forwarded_tokens == want.report.forwarded_tokens


def test_a_check_waits_while_a_request_runs_and_runs_a_few_rows_at_a_time(engine: KVBoost) -> None:
    other = engine.stream(chat(DOCS[:1]), max_new_tokens=40)
    next(other)
    with spy(engine) as rows:
        report = engine.generate(chat(), max_new_tokens=1).report
        before = len(rows.calls)
        assert spot(engine).stats()["waiting"] + (spot(engine)._worker is not None) > 0
        assert spot(engine).stats()["checked"] == 0
        other.close()
        assert settle(engine)["checked"] == 1
    slices = rows.calls[before:]
    assert sum(slices) == report.prompt_tokens
    assert max(slices) <= SLICE_ROWS


@pytest.mark.parametrize(
    "job",
    [
        lambda e: e.generate(chat(), max_new_tokens=1),
        lambda e: e.score(chat(), "the river"),
        lambda e: e.verify([{"question": "which?", "passages": DOCS[:2]}], max_new_tokens=1),
        lambda e: e.warm(["A text that nobody has seen before."]),
    ],
    ids=["generate", "score", "verify", "warm"],
)
def test_whatever_the_engine_works_at_goes_first(engine: KVBoost, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    call = engine.adapter._call

    def watched(*args: Any) -> Any:
        if threading.current_thread().name != "kvboost-spot":
            seen.append(spot(engine)._running)
        return call(*args)

    monkeypatch.setattr(engine.adapter, "_call", watched)
    job(engine)
    assert seen
    assert min(seen) == 1
    assert spot(engine)._running == 0


def test_a_request_comes_between_two_slices(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is stopped in its middle, a whole request is answered, and the check is right all the same."""
    reached, go_on = threading.Event(), threading.Event()
    checker = spot(engine)
    original, seen = checker._may_go_on, []

    def gate() -> bool:
        seen.append(1)
        if len(seen) == 3:
            reached.set()
            assert go_on.wait(60)
        return original()

    monkeypatch.setattr(checker, "_may_go_on", gate)
    engine.generate(chat(), max_new_tokens=N)
    assert reached.wait(60)
    stream = engine.stream(chat(DOCS[:2]), max_new_tokens=20, reuse="off")
    next(stream)
    go_on.set()
    stream.close()
    interrupted = settle(engine)
    with make() as calm:
        calm.generate(chat(), max_new_tokens=N)
        assert interrupted["mean_kl"] == pytest.approx(settle(calm)["mean_kl"], rel=1e-6)


def test_too_many_are_dropped(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_module, "MOST_WAITING", 2)
    blocker = engine.stream("plain text", max_new_tokens=40, reuse="off")
    next(blocker)
    for i in range(6):
        engine.generate(chat(question=f"\n\n{i}?"), max_new_tokens=1)
    blocker.close()
    found = settle(engine)
    assert found["checked"] + found["dropped"] == 6
    assert found["dropped"] >= 3, "one is being checked, two wait"


def test_errors_are_counted_and_later_checks_go_on(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.adapter.new_cache

    def no_room(capacity: int) -> Any:
        if threading.current_thread().name == "kvboost-spot":
            raise RuntimeError("no room")
        return real(capacity)

    monkeypatch.setattr(engine.adapter, "new_cache", no_room)
    assert len(engine.generate(chat(), max_new_tokens=2).token_ids) == 2
    assert settle(engine)["errors"] == 1
    monkeypatch.undo()
    engine.generate(chat(), max_new_tokens=2)
    assert (settle(engine)["checked"], settle(engine)["errors"]) == (1, 1)


def test_a_model_that_changed_meanwhile_is_no_judge(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = engine.stream("plain text", max_new_tokens=40, reuse="off")
    next(blocker)
    engine.generate(chat(), max_new_tokens=1)
    other = make_engine(model=tiny_model(seed=9)).adapter.fingerprint
    monkeypatch.setattr(engine.adapter, "_fingerprint", other)
    blocker.close()
    found = settle(engine)
    assert (found["checked"], found["dropped"]) == (0, 1)


def test_closing_drops_what_waits(engine: KVBoost) -> None:
    blocker = engine.stream("plain text", max_new_tokens=40, reuse="off")
    next(blocker)
    for i in range(3):
        engine.generate(chat(question=f"\n\n{i}?"), max_new_tokens=1)
    engine.close()
    assert spot(engine)._worker is None
    found = spot(engine).stats()
    assert (found["checked"], found["dropped"], found["waiting"]) == (0, 3, 0)
    blocker.close()
    engine.close()


def test_no_thread_holds_an_idle_engine() -> None:
    engine = make()
    engine.generate(chat(), max_new_tokens=1)
    settle(engine)
    assert not [t for t in threading.enumerate() if t.name == "kvboost-spot"]


def test_logits_are_kept_not_computed(engine: KVBoost) -> None:
    blocker = engine.stream("plain text", max_new_tokens=40, reuse="off")
    next(blocker)
    with make_engine(prefix_bytes=0, on_low_fidelity="ignore") as plain:
        plain.warm(DOCS)
        plain.engine.eos_ids = frozenset()
        with spy(plain) as want:
            plain.generate(chat(), max_new_tokens=N)
    with spy(engine) as rows:
        engine.generate(chat(), max_new_tokens=N)
    assert rows.calls == want.calls
    blocker.close()
    assert torch.is_grad_enabled()
