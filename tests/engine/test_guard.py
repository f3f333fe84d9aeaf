"""Verdicts of verifications: kept in the store, and what an engine does about those that failed or are missing."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag import KVBoost, Repair
from kvboost_rag.config import NAMED_REPAIRS
from kvboost_rag.engine.verdicts import Verdict, Verdicts
from kvboost_rag.errors import UnknownOptionError
from kvboost_rag.store import MemoryStore
from tests.engine.helpers import DOCS, QUESTION, chat, make_engine
from tests.tiny import tiny_model

ITEM = {"question": QUESTION.strip(), "passages": list(DOCS)}
PASSED = Verdict("balanced", True, 0.01, 0.99, 1, 20, 0.1, 0.9, 1.7e9)
FAILED = replace(PASSED, ok=False, kl=0.5, agreement=0.5, changed=12)


def ruled(mode: str = "warn", *, store: Any = None, **verdicts: Verdict) -> KVBoost:
    """A warm engine over a store with these verdicts on named policies."""
    store = store or MemoryStore()
    first = make_engine(store=store)
    first.warm(DOCS)
    for name, verdict in verdicts.items():
        assert first.engine.verdicts.keep(NAMED_REPAIRS[name], verdict)
    return make_engine(store=store, on_low_fidelity=mode)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == "kvboost_rag" and r.levelno == logging.WARNING]


def answer(engine: KVBoost, **options: Any) -> Any:
    engine.forget()
    return engine.generate(chat(), max_new_tokens=6, **options)


def plain(policy: str | Repair) -> Any:
    """The answer of an engine that asks nobody."""
    engine = make_engine(on_low_fidelity="ignore")
    engine.warm(DOCS)
    return answer(engine, repair=policy)


# --- nobody verified ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["warn", "repair", "full"])
def test_unverified_reuse_warns_once_and_changes_nothing(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = ruled(mode)
    for policy in ("balanced", "fast", "balanced"):
        got = answer(engine, repair=policy)
        assert got.report.warnings == []
        assert got.report.repair == policy
        assert not got.report.exact
    (message,) = warned(caplog)
    assert "kvboost-rag verify" in message
    assert got.token_ids == plain("balanced").token_ids


def test_exact_answers_never_warn(caplog: pytest.LogCaptureFixture) -> None:
    engine = ruled(balanced=FAILED)
    for options in ({"reuse": "off"}, {"reuse": "prefix"}, {"repair": Repair.full()}):
        assert answer(engine, **options).report.exact
    make_engine().generate(chat(), chunks=DOCS, max_new_tokens=1)  # misses are forwarded
    engine.score(chat(), "the river")
    assert warned(caplog) == []


def test_ignore_is_silent_and_does_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    for engine in (ruled("ignore"), ruled("ignore", balanced=FAILED)):
        got = answer(engine)
        assert (got.report.repair, got.report.warnings) == ("balanced", [])
        assert got.report.reused_tokens > 0
    assert warned(caplog) == []


def test_a_verdict_that_passed_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    for mode in ("warn", "repair", "full"):
        engine = ruled(mode, balanced=PASSED)
        assert answer(engine).report.warnings == []
    assert warned(caplog) == []


# --- verified, and failed -------------------------------------------------------------------------------------------


def test_warn_says_so_once_and_in_every_report(caplog: pytest.LogCaptureFixture) -> None:
    engine = ruled("warn", balanced=FAILED)
    for _ in range(2):
        got = answer(engine)
        assert got.report.reused_tokens > 0
        assert any("failed its verification" in w and "0.5000" in w for w in got.report.warnings)
    assert len(warned(caplog)) == 1
    assert got.token_ids == plain("balanced").token_ids


def test_repair_falls_back_to_faithful_where_that_passed(caplog: pytest.LogCaptureFixture) -> None:
    engine = ruled("repair", balanced=FAILED, faithful=PASSED)
    got = answer(engine)
    assert (got.report.reuse, got.report.repair) == ("chunks", "faithful")
    assert got.token_ids == plain("faithful").token_ids
    assert "faithful" in got.report.warnings[0]
    assert "failed its verification" in got.report.table()
    answer(engine)
    assert len(warned(caplog)) == 1


@pytest.mark.parametrize(
    ("mode", "policy", "verdicts"),
    [
        ("repair", "balanced", {"balanced": FAILED}),
        ("repair", "balanced", {"balanced": FAILED, "faithful": FAILED}),
        ("repair", "faithful", {"faithful": FAILED}),
        ("full", "balanced", {"balanced": FAILED, "faithful": PASSED}),
        ("full", "fast", {"fast": FAILED}),
    ],
)
def test_else_full_prefill(mode: str, policy: str, verdicts: dict[str, Verdict]) -> None:
    engine = ruled(mode, **verdicts)
    got = answer(engine, repair=policy)
    assert got.report.exact
    assert got.report.reuse == "prefix"
    assert got.report.forwarded_tokens == got.report.prompt_tokens
    assert got.token_ids == answer(make_engine(store=None), reuse="off").token_ids
    assert "full prefill" in got.report.warnings[0]


def test_streaming_and_batches_fall_back_too() -> None:
    engine = ruled("full", balanced=FAILED)
    *_, last = engine.stream(chat(), max_new_tokens=2)
    assert last.result is not None
    assert last.result.report.exact
    engine.forget()
    assert all(r.report.exact for r in engine.generate_batch([chat(), chat(DOCS[:2])], max_new_tokens=2))


def test_a_score_measures_what_it_was_asked_for() -> None:
    failed = ruled("full", balanced=FAILED)
    ours = failed.score(chat(), "the river", repair="balanced")
    other = ruled("ignore").score(chat(), "the river", repair="balanced")
    assert ours.report.repair == "balanced"
    assert ours.logprobs.tolist() == other.logprobs.tolist()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UnknownOptionError, match="repair"):
        make_engine(on_low_fidelity="repairs")


# --- what a verdict holds for ---------------------------------------------------------------------------------------


def test_verify_keeps_its_verdict_for_other_engines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_engine(store=tmp_path) as engine:
        report = engine.verify([ITEM], policy="fast", max_new_tokens=4, max_kl=1e-6)
        assert report.kept
        assert not report.ok
        assert report.as_dict()["kept"] is True
    with make_engine(store=tmp_path, on_low_fidelity="full") as again:
        assert answer(again, repair="fast").report.exact
        assert not answer(again, repair="balanced").report.exact, "the verdict is on fast alone"
        second = again.verify([ITEM], policy="fast", max_new_tokens=4, max_kl=1e6, min_agreement=0)
        assert second.items[0].reused_tokens > 0, "a verification measures reuse whatever the last one found"
        assert not answer(again, repair="fast").report.exact, "the last verdict holds, at once"
    with make_engine(store=tmp_path, on_low_fidelity="full") as third:
        caplog.clear()
        assert not answer(third, repair="fast").report.exact
        assert warned(caplog) == []


def test_nothing_is_kept_where_nothing_was_measured() -> None:
    engine = make_engine()
    assert not engine.verify([ITEM], policy=Repair.full(), max_new_tokens=2).kept
    assert not engine.verify([{"prompt": "none of it is here", "chunks": [DOCS[0]]}], max_new_tokens=2).kept
    assert not engine.verify([ITEM], max_new_tokens=2, keep=False).kept
    for policy in (Repair.full(), NAMED_REPAIRS["balanced"]):
        assert engine.engine.verdicts.get(policy) is None
    assert engine.verify([ITEM], max_new_tokens=2).kept


def test_a_verdict_holds_for_its_model_context_policy_and_compression() -> None:
    def known(repair: Repair = NAMED_REPAIRS["balanced"], **options: Any) -> bool:
        engine = make_engine(store=store, **options)
        return Verdicts(engine.engine.encoder).get(repair) is not None

    store = MemoryStore()
    make_engine(store=store).engine.verdicts.keep(NAMED_REPAIRS["balanced"], FAILED)
    assert known()
    assert known(replace(NAMED_REPAIRS["balanced"], name="mine")), "a name means nothing"
    assert not known(replace(NAMED_REPAIRS["balanced"], cap=0.16))
    assert not known(filler_tokens=20)
    assert not known(model=tiny_model(seed=7))
    store.compression = "int8"
    assert not known()


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b"{}", b'{"ok": true}', PASSED.to_bytes().replace(b"0.01", b'"x"')]
)
def test_an_unreadable_verdict_is_none(value: bytes) -> None:
    engine = make_engine()
    engine.warm(DOCS)
    engine.engine.store.put_meta(engine.engine.verdicts._name(engine.repair), value)
    assert Verdict.from_bytes(value) is None
    assert answer(engine).report.warnings == []


def test_verdicts_survive_the_trip() -> None:
    assert Verdict.from_bytes(FAILED.to_bytes()) == FAILED
