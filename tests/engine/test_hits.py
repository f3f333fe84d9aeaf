"""What hits and what misses, and what a miss leaves behind."""

from __future__ import annotations

import random

import pytest

from kvboost_rag import KVBoost, Repair
from kvboost_rag.store import MemoryStore
from tests.engine.helpers import (
    DOCS,
    QUESTION,
    TOLERANCE,
    chat,
    full_prefill_gap,
    make_engine,
    prepared,
    segmented,
    spy,
)
from tests.tiny import tiny_model, tiny_tokenizer


def outcomes(engine: KVBoost, prompt: object, **options: object) -> list[str]:
    return [c.outcome for c in prepared(engine, prompt, **options)[1].chunks]


def test_any_order_any_place_any_number_hits() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    for _ in range(6):
        docs = random.choices(DOCS, k=5)
        assert outcomes(engine, chat(docs)) == ["hit"] * 5
        assert outcomes(engine, f"one token more {random.random()} " + "\n".join(docs)) == ["hit"] * 5


def test_one_changed_character_misses() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    for at in (0, len(DOCS[0]) // 2, len(DOCS[0]) - 1):
        changed = DOCS[0][:at] + "#" + DOCS[0][at + 1 :]
        assert outcomes(engine, chat([changed, DOCS[1]]), chunks=[changed])[0] == "miss"
        texts = [c.text for c in segmented(engine, chat([changed])).chunks]
        assert all(changed.startswith(text) and text != changed for text in texts), "at most its beginning may match"


def test_outer_whitespace_does_not_matter() -> None:
    engine = make_engine()
    engine.warm([f"  \n{DOCS[0]}\n\n"])
    assert outcomes(engine, chat([DOCS[0]])) == ["hit"]
    assert outcomes(engine, chat([DOCS[0]]), chunks=[f"\n{DOCS[0]} "]) == ["hit"]


def test_a_miss_is_forwarded_in_place_then_stored_then_hits() -> None:
    engine = make_engine()
    prompt = chat(DOCS[:2])
    first = engine.generate(prompt, chunks=DOCS[:2], max_new_tokens=3)
    assert [c.outcome for c in first.report.chunks] == ["miss", "miss"]
    assert first.report.forwarded_tokens == first.report.prompt_tokens
    assert first.report.exact, "misses are exact"
    assert first.report.stored_tokens == sum(c.num_tokens for c in first.report.chunks)
    assert full_prefill_gap(make_engine(), tiny_model(), prompt, chunks=DOCS[:2]) < TOLERANCE
    engine.forget()
    again = engine.generate(chat(DOCS[1::-1]), max_new_tokens=3)
    assert [c.outcome for c in again.report.chunks] == ["hit", "hit"]
    assert again.report.stored_tokens == 0


def test_stored_misses_are_the_blocks_that_a_warm_up_makes() -> None:
    asked, warmed = make_engine(), make_engine()
    asked.generate(chat(DOCS), chunks=DOCS, max_new_tokens=1)
    warmed.warm(DOCS)
    assert sorted(asked.store.keys()) == sorted(warmed.store.keys())
    for key in asked.store.keys():
        assert (asked.store.get(key).kv - warmed.store.get(key).kv).abs().max() < TOLERANCE


def test_the_same_unknown_chunk_twice_is_stored_once() -> None:
    engine = make_engine()
    report = engine.generate(chat([DOCS[0], DOCS[0]]), chunks=[DOCS[0]], max_new_tokens=1).report
    assert report.misses == 2
    assert report.stored_tokens == report.chunks[0].num_tokens
    assert len(list(engine.store.keys())) == 1


def test_without_a_store_every_chunk_is_computed_and_right() -> None:
    engine = make_engine(store=None)
    with spy(engine) as rows:
        report = engine.generate(chat(), chunks=DOCS, max_new_tokens=1).report
    assert rows.total == report.prompt_tokens, "no block is computed that nobody keeps"
    assert [c.reason for c in report.chunks] == ["store off"] * 4
    assert report.stored_tokens == 0
    assert report.exact


def test_an_evicted_block_is_a_miss_that_comes_back() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    for key in list(engine.store.keys()):
        engine.store.delete(key)
    first = engine.generate(chat(), max_new_tokens=1).report
    assert [(c.outcome, c.reason) for c in first.chunks] == [("miss", "absent")] * 4
    engine.forget()
    assert engine.generate(chat(), max_new_tokens=1).report.hits == 4


def test_a_hit_never_changes_the_prompt(family: str) -> None:
    engine = make_engine(family)
    cold = segmented(engine, chat(), chunks=DOCS)
    engine.warm(DOCS)
    warm = segmented(engine, chat(), chunks=DOCS)
    assert (cold.text, cold.token_ids) == (warm.text, warm.token_ids)
    assert cold.text == segmented(engine, chat(), reuse="off").text
    assert engine.tokens.decode(warm.token_ids) == warm.text


@pytest.mark.parametrize("policy", ["fast", "balanced", "faithful"])
def test_answers_do_not_depend_on_where_the_blocks_came_from(policy: str) -> None:
    engine, other = make_engine(), make_engine()
    engine.warm(DOCS)
    for doc in reversed(DOCS):
        other.warm([doc])
    one, two = (e.generate(chat(), max_new_tokens=8, repair=policy).token_ids for e in (engine, other))
    assert one == two


# -- cut-off chunks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.7, 0.8, 0.95])
def test_a_cut_off_chunk_reuses_its_blocks_beginning(share: float) -> None:
    engine = make_engine()
    engine.warm(DOCS)
    cut = DOCS[1][: int(len(DOCS[1]) * share)]
    prompt = chat([DOCS[0], cut])
    got, report = prepared(engine, prompt, repair="fast")
    chunk = got.prompt.chunks[1]
    assert report.hits == 2
    assert report.chunks[1].reason.startswith("cut-off")
    assert cut.startswith(chunk.text)
    assert len(cut) - len(chunk.text) < 12, "all but the last token or so"
    whole = engine.encoder().tokenize(DOCS[1])
    assert chunk.token_ids == whole[: len(chunk)]
    assert engine.tokens.decode(got.prompt.token_ids) == got.prompt.text
    assert full_prefill_gap(engine, tiny_model(), prompt, repair=Repair.full()) < TOLERANCE


def test_less_than_half_of_a_chunk_is_not_reused() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    assert segmented(engine, chat([DOCS[1][: int(len(DOCS[1]) * 0.4)]])).chunks == []


def test_a_chunk_cut_inside_a_character_sequence() -> None:
    engine = make_engine()
    text = "日本語と絵文字🙂🙂🙂" * 6
    engine.warm([text])
    for n in range(45, 60):
        got = segmented(engine, chat([text[:n]]))
        assert [engine.tokens.decode(c.token_ids) for c in got.chunks] == [c.text for c in got.chunks]
        assert engine.tokens.decode(got.token_ids) == got.text


def test_a_cut_off_chunk_of_another_model_in_the_same_store_is_passed_over() -> None:
    store = MemoryStore()
    other = make_engine(model=tiny_model(seed=5), store=store)
    engine = make_engine(store=store)
    other.warm(DOCS)
    cut = DOCS[0][:80]
    assert segmented(engine, chat([cut])).chunks == []
    engine.warm(DOCS)
    for e in (engine, other):
        assert outcomes(e, chat([cut])) == ["hit"]


# -- reports ---------------------------------------------------------------------------------------------------------


def test_chunks_that_are_not_in_the_prompt_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    for _ in range(2):
        report = engine.generate(chat([DOCS[0]]), chunks=[repr(DOCS[3]) + "!"], max_new_tokens=1).report
        assert any("1 of 1 given chunks" in w for w in report.warnings)
    assert sum("no known chunk was found" in r.message for r in caplog.records) == 1, "logged once"
    good = engine.generate(chat([DOCS[0]]), chunks=[DOCS[0]], max_new_tokens=1).report
    assert good.warnings == []


def test_report_knows_its_time_and_its_cost() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    report = engine.generate(chat(), max_new_tokens=3).report
    assert 0 < sum(report.stages.values()) <= report.total_s
    assert sum(t for name, t in report.stages.items() if name != "store") <= report.ttft_s <= report.total_s
    assert {"render", "match", "lookup", "compose", "score", "forward", "store"} <= set(report.stages)
    assert report.as_dict()["hits"] == 4
    for c, doc in zip(report.chunks, DOCS, strict=True):
        assert doc.startswith(c.text)
    assert "hit" in report.table()


def test_ttft_starts_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVBoost 0.9.0 started its clock after look-up, load and repair. A clock that ticks per reading shows the order."""
    from kvboost_rag.engine import engine as module
    from kvboost_rag.engine import report as report_module

    ticks = iter(range(10_000))
    for m in (module, report_module):
        monkeypatch.setattr(m, "perf_counter", lambda: float(next(ticks)))
    engine = make_engine()
    engine.warm(DOCS)
    report = engine.generate(chat(), max_new_tokens=1).report
    before_the_answer = [s for s in report.stages if s != "store"]
    assert report.ttft_s > 2 * len(before_the_answer) - 1


def test_verifying_scores_do_not_store_or_hold_anything() -> None:
    engine = make_engine()
    with spy(engine) as rows:
        report = engine.score(chat(DOCS), "the river", chunks=DOCS, repair="fast").report
    assert rows.total == report.forwarded_tokens + len(engine.tokens.plain("the river")) - 1
    assert list(engine.store.keys()) == []
    assert engine.stats()["prefixes"]["entries"] == 0  # type: ignore[index]


def test_raw_prompts_match_too() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    prompt = "Context:\n" + "\n---\n".join(DOCS) + QUESTION
    assert outcomes(engine, prompt) == ["hit"] * 4
    assert segmented(engine, prompt).token_ids[0] == tiny_tokenizer().bos_token_id
