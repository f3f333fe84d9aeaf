"""``--on-low-fidelity``, ``--cost-model`` and ``--spot-check`` reach the engine, and do there what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from kvboost_rag import KVBoost
from kvboost_rag.cli import common
from kvboost_rag.cli.ask import answer_options
from kvboost_rag.engine.guard import OnLowFidelity
from kvboost_rag.engine.spot import SpotChecker
from kvboost_rag.engine.verdicts import Verdict
from kvboost_rag.store import MemoryStore
from tests.cli.conftest import FakeEngine, run

TEXT = "The lighthouse of Harrow was built in 1871 by two brothers who had never seen the sea before that year."
FAILED = Verdict("balanced", False, 0.5, 0.5, 1, 20, 0.1, 0.9, 1.7e9)
SHORT = ("--max-tokens", 4, "--reuse", "chunks")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text(json.dumps({"text": TEXT}))
    return path


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch, tiny: Any, tokenizer: Any, store: MemoryStore) -> KVBoost:
    """Commands run over a real engine, made with their options, on a store that holds the chunk."""

    def make(options: common.EngineOptions) -> KVBoost:
        return KVBoost(tiny, tokenizer, store=store, filler_tokens=40, prefix_bytes=0, **options.answers)

    monkeypatch.setattr(common, "make_engine", make)
    monkeypatch.setattr(MemoryStore, "close", lambda self: None)
    engine = KVBoost(tiny, tokenizer, store=store, filler_tokens=40)
    engine.warm([TEXT])
    return engine


def test_options_reach_from_pretrained(docs: Path, engine: FakeEngine) -> None:
    assert run("ask", "Harrow", docs, "--on-low-fidelity", "full", "--cost-model").exit_code == 0
    assert engine.options
    kwargs = engine.options.kwargs()
    assert {"on_low_fidelity": "full", "cost_model": True}.items() <= kwargs.items()
    assert "spot_check" not in kwargs


def test_what_is_not_given_is_left_to_the_library(docs: Path, engine: FakeEngine) -> None:
    assert run("ask", "Harrow", docs).exit_code == 0
    assert engine.options
    assert not set(common.ANSWER_OPTIONS) & set(engine.options.kwargs())


def test_the_choices_are_the_librarys() -> None:
    @answer_options
    def command(**options: Any) -> None: ...

    given = {p.name: p.type for p in command.__click_params__}  # type: ignore[attr-defined]
    choice = given["on_low_fidelity"]
    assert isinstance(choice, click.Choice)
    assert list(choice.choices) == list(get_args(OnLowFidelity))
    assert set(given) == set(common.ANSWER_OPTIONS)


@pytest.mark.parametrize("words", [("--spot-check", "2"), ("--spot-check", "-0.1"), ("--on-low-fidelity", "shrug")])
def test_a_wrong_value_is_status_2(docs: Path, engine: FakeEngine, words: tuple[str, str]) -> None:
    assert run("ask", "Harrow", docs, *words).exit_code == 2
    assert engine.options is None


def test_spot_check_compares_the_answer_before_the_command_ends(docs: Path, warm: KVBoost) -> None:
    result = run("ask", "When was it built?", docs, *SHORT, "--spot-check", 1)
    assert result.exit_code == 0, result.output
    assert "spot check: against full prefill the mean KL is" in result.stderr
    found = json.loads(run("ask", "When was it built?", docs, *SHORT, "--spot-check", 1, "--json").stdout)
    assert found["spot_check"]["checked"] == 1
    assert found["spot_check"]["mean_kl"] > 0


def test_spot_check_says_when_there_was_nothing_to_compare(docs: Path, warm: KVBoost) -> None:
    result = run("ask", "When was it built?", docs, "--max-tokens", 4, "--reuse", "off", "--spot-check", 1)
    assert "spot check: not compared" in result.stderr
    assert "spot_check" not in json.loads(run("ask", "When?", docs, *SHORT, "--json").stdout)


@pytest.mark.parametrize(("mode", "exact"), [("full", True), ("warn", False)])
def test_a_failed_verdict_decides_what_ask_does(docs: Path, warm: KVBoost, mode: str, exact: bool) -> None:
    warm.engine.verdicts.keep(warm.repair, FAILED)
    found = json.loads(run("ask", "When was it built?", docs, *SHORT, "--on-low-fidelity", mode, "--json").stdout)
    assert found["report"]["exact"] is exact
    assert any("failed" in w or "verif" in w for w in found["report"]["warnings"])


def test_a_spot_check_that_failed_is_not_called_an_exact_answer(
    docs: Path, warm: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(checker: SpotChecker, watch: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(SpotChecker, "_check", broken)
    result = run("ask", "When was it built?", docs, *SHORT, "--spot-check", 1)
    assert result.exit_code == 0
    assert "the comparison with full prefill failed" in result.stderr
