"""``engine.verify`` and ``kvboost-rag verify``: reuse against full prefill on the user's own questions."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvboost_rag import KVBoost, Repair
from kvboost_rag.cli import common, main
from kvboost_rag.errors import ContextLengthError, UsageError
from kvboost_rag.verify import VerifyItem, read_items, verify
from kvboost_rag.verify.run import divergence

PASSAGES = [
    "The lighthouse of Harrow was built in 1871 by two brothers who had never seen the sea before that year.",
    "Bread in Velmar is baked before dawn, and the ovens are fired with apple wood from the orchards above the town.",
    "The ferry runs twice a day in winter and hourly in summer, except when there is fog on the river.",
]
ITEM = {"question": "When was the lighthouse built?", "passages": PASSAGES}


@pytest.fixture
def engine(tiny: Any, tokenizer: Any) -> KVBoost:
    return KVBoost(tiny, tokenizer, store="memory", filler_tokens=40, name="tiny")


def test_full_repair_is_exact(engine: KVBoost) -> None:
    report = engine.verify([ITEM], policy=Repair.full(), max_new_tokens=6)
    assert report.kl < 1e-5
    assert report.agreement == 1.0
    assert report.ok
    assert not report.changed
    assert "exactly" in report.verdict


def test_full_repair_is_no_prompt_that_reused_nothing(engine: KVBoost) -> None:
    report = engine.verify([ITEM], policy=Repair.full(), max_new_tokens=2)
    assert not any("reused nothing" in note for note in report.notes)


def test_a_question_that_cannot_be_answered_is_named(engine: KVBoost) -> None:
    """Of thousands of lines one is too long: which?"""
    long = {"question": "When?", "passages": [" ".join(PASSAGES) * 200]}
    with pytest.raises(ContextLengthError, match="question 2 of 3: the prompt has"):
        engine.verify([ITEM, long, ITEM], max_new_tokens=2)


def test_where_nothing_was_reused_the_verdict_says_so(engine: KVBoost) -> None:
    item = {"prompt": "A question without its passages.", "chunks": PASSAGES}
    report = engine.verify([item], max_new_tokens=2)
    assert "Nothing was measured" in report.verdict
    assert any("1 of 1 prompts reused nothing" in note for note in report.notes)
    assert not report.kept


def test_reuse_is_measured_on_stored_blocks_even_where_the_store_was_empty(engine: KVBoost) -> None:
    report = engine.verify([ITEM], policy="fast", max_new_tokens=6)
    (item,) = report.items
    assert report.warmed_chunks == 3
    assert item.reused_tokens > 0
    assert item.repaired_tokens == 0
    assert item.forwarded_tokens < item.prompt_tokens
    assert report.kl > 1e-3  # a random tiny model notices every stale key
    assert engine.verify([ITEM], policy="fast", max_new_tokens=6).warmed_chunks == 0


def test_figures_are_those_of_score(engine: KVBoost) -> None:
    item = VerifyItem.build(ITEM)
    report = engine.verify([item], policy="balanced", max_new_tokens=5)
    options: dict[str, Any] = {"chunks": PASSAGES, "logits": True}
    answer = engine.generate(item.prompt, chunks=PASSAGES, repair=Repair.full(), max_new_tokens=5)
    engine.forget()
    full = engine.score(item.prompt, answer.token_ids, repair=Repair.full(), **options)
    ours = engine.score(item.prompt, answer.token_ids, repair="balanced", **options)
    assert full.logits is not None
    assert ours.logits is not None
    assert report.kl == pytest.approx(float(divergence(full.logits, ours.logits).mean()), rel=1e-3)
    assert report.items[0].full_text == answer.text


def test_nothing_held_takes_part_and_nothing_is_held(engine: KVBoost) -> None:
    before = engine.verify([ITEM], policy="fast", max_new_tokens=4)
    item = VerifyItem.build(ITEM)
    engine.generate(item.prompt, chunks=PASSAGES, repair=Repair.full(), max_new_tokens=4)
    held = len(engine.engine.prefixes)
    after = engine.verify([ITEM], policy="fast", max_new_tokens=4)
    assert after.kl == pytest.approx(before.kl)
    assert len(engine.engine.prefixes) == held == 1


def test_messages_and_prompts_with_chunks(engine: KVBoost) -> None:
    messages = [{"role": "user", "content": f"{PASSAGES[0]}\n{PASSAGES[1]}\nWhen?"}]
    text = f"Context: {PASSAGES[2]}\nQuestion: how often?"
    report = engine.verify(
        [{"messages": messages, "chunks": PASSAGES[:2]}, {"prompt": text, "chunks": PASSAGES[2:]}], max_new_tokens=3
    )
    assert [i.reused_tokens > 0 for i in report.items] == [True, True]
    assert report.items[0].question.endswith("When?")


def test_a_prompt_that_reuses_nothing_is_noted(engine: KVBoost) -> None:
    report = engine.verify([{"prompt": "nothing of it is here", "chunks": [PASSAGES[0]]}], max_new_tokens=2)
    assert any("reused nothing" in note for note in report.notes)
    assert report.items[0].warnings


def test_thresholds_decide(engine: KVBoost) -> None:
    strict = engine.verify([ITEM], policy="fast", max_new_tokens=6, max_kl=1e-6)
    assert not strict.ok
    assert "too far" in strict.verdict
    assert engine.verify([ITEM], policy="fast", max_new_tokens=6, max_kl=1e6, min_agreement=0).ok


@pytest.mark.parametrize(
    "item", [{"question": "no passages?"}, {"passages": ["x"]}, {"question": "q", "passages": "text"}, ["list"], {}]
)
def test_what_is_no_item_is_refused_with_the_shape(engine: KVBoost, item: Any) -> None:
    with pytest.raises(UsageError, match="question"):
        engine.verify([item])


def test_no_items(engine: KVBoost) -> None:
    with pytest.raises(UsageError, match="nothing to verify"):
        verify(engine, [])


def test_html_is_self_contained_and_escaped(engine: KVBoost) -> None:
    report = engine.verify([{**ITEM, "question": "<script>alert(1)</script>"}], policy="fast", max_new_tokens=6)
    page = report.html()
    assert page.startswith("<!doctype html>")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=|https?://", page)
    assert page.count('title="KL ') == len(report.items[0].tokens)


def test_changed_answers_stand_side_by_side(engine: KVBoost) -> None:
    report = engine.verify([ITEM], policy="fast", max_new_tokens=6)
    (item,) = report.changed  # a random tiny model notices every stale key
    assert repr(item.full_text) in report.table()
    assert repr(item.reuse_text) in report.table()
    page = report.html()
    assert page.count("<div class=pair>") == 1
    assert html.escape(item.reuse_text) in page
    same = engine.verify([ITEM], policy=Repair.full(), max_new_tokens=6)
    assert "<div class=pair>" not in same.html()


def test_report_is_jsonable_and_readable(engine: KVBoost) -> None:
    report = engine.verify([ITEM], policy="fast", max_new_tokens=6)
    loaded = json.loads(json.dumps(report.as_dict()))
    assert loaded["questions"] == 1
    assert loaded["kl"] == report.kl
    assert loaded["items"][0]["tokens"]
    table = report.table()
    assert report.verdict in table
    assert "few" in table


def test_divergence_is_zero_only_for_the_same_distribution() -> None:
    a = torch.randn(3, 11)
    assert divergence(a, a + 5.0).max() < 1e-9
    assert (divergence(a, torch.randn(3, 11)) > 0).all()


# --- files and command line --------------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    lines = [ITEM, {**ITEM, "question": "How often does the ferry run?"}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return file


def test_read_items_names_the_bad_line(questions: Path) -> None:
    assert len(read_items(questions)) == 2
    assert len(read_items(questions, 1)) == 1
    questions.write_text(questions.read_text() + "{not json\n")
    with pytest.raises(UsageError, match=r"questions\.jsonl:4"):
        read_items(questions)


@pytest.mark.parametrize(
    "line",
    [
        {"messages": {"role": "user", "content": "x"}, "chunks": ["a"]},
        {"messages": 7, "chunks": ["a"]},
        {"prompt": "", "chunks": ["a"]},
        {"question": "x", "passages": 5},
        {"question": "x", "passages": {"a": "b"}},
        {"question": "x", "passages": ["a", None]},
        ["question", "passages"],
    ],
)
def test_a_line_of_the_wrong_shape_is_named(line: Any, questions: Path) -> None:
    questions.write_text(questions.read_text() + json.dumps(line))
    with pytest.raises(UsageError, match=r"questions\.jsonl:4"):
        read_items(questions)


def test_lines_end_where_json_says_so_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Other ends of lines that Unicode knows may stand inside a JSON string."""
    file, passage = tmp_path / "web.jsonl", "Anton\u2028Grieg\x85kept\u2029it."
    line = json.dumps({"question": "Who?", "passages": [passage]}, ensure_ascii=False)
    file.write_bytes(f"{line}\r\n{line}\n".encode("utf-8-sig"))
    assert [item.chunks for item in read_items(file)] == [(passage,)] * 2


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, engine: KVBoost) -> Any:
    monkeypatch.setattr(common, "make_engine", lambda options: engine)

    def call(*args: str) -> Any:
        return CliRunner().invoke(main, ["verify", *args])

    return call


def test_command_passes_prints_json_and_writes_html(cli: Any, questions: Path, tmp_path: Path) -> None:
    page = tmp_path / "verify.html"
    loose = ("--max-kl", "1000", "--min-agreement", "0", "--max-tokens", "4", "--no-progress")
    result = cli(str(questions), "--json", "--html", str(page), *loose)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["questions"] == 2
    assert "ferry" in page.read_text(encoding="utf-8")


def test_command_refuses_a_page_in_no_folder_before_it_begins(cli: Any, questions: Path, tmp_path: Path) -> None:
    result = cli(str(questions), "--html", str(tmp_path / "nowhere" / "page.html"))
    assert result.exit_code == 2
    assert "page.html" in result.stderr
    assert "questions" not in result.stderr.replace("questions.jsonl", "")


def test_command_keeps_the_verdict_unless_told_not_to(cli: Any, questions: Path, engine: KVBoost) -> None:
    few = (str(questions), "--limit", "1", "--max-tokens", "2", "--max-kl", "1000", "--min-agreement", "0")
    assert "keeps this verdict" not in cli(*few, "--no-keep").stderr
    assert engine.engine.verdicts.get(engine.repair) is None
    assert "keeps this verdict" in cli(*few).stderr
    verdict = engine.engine.verdicts.get(engine.repair)
    assert verdict is not None
    assert (verdict.ok, verdict.max_kl, verdict.questions) == (True, 1000, 1)


def test_command_fails_past_a_threshold(cli: Any, questions: Path) -> None:
    result = cli(str(questions), "--repair", "fast", "--max-kl", "0.000001", "--max-tokens", "4", "--limit", "1")
    assert result.exit_code == 1
    assert "too far" in result.stdout
    assert "1/1 questions" in result.stderr


def test_command_refuses_a_malformed_file_as_a_wrong_call(cli: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"q": 1}\n')
    result = cli(str(bad))
    assert result.exit_code == 2
    assert "bad.jsonl:1" in result.stderr
