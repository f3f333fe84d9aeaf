"""Forwarded tokens are counted where the model is called; policies stay within their budgets."""

from __future__ import annotations

import pytest

from kvboost_rag import Repair
from tests.engine.helpers import DOCS, POLICIES, chat, make_engine, prepared, spy

UNKNOWN = "A document that nobody knows yet, not even the store."


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_every_row_is_reported(family: str, policy: str) -> None:
    engine = make_engine(family)
    engine.warm(DOCS)
    prompt = chat([DOCS[0], UNKNOWN, DOCS[2]])
    for options in ({}, {"chunks": [UNKNOWN]}):
        with spy(engine) as rows:
            _, report = prepared(engine, prompt, repair=POLICIES[policy], **options)
        assert rows.total == report.forwarded_tokens
        main = report.forwarded_tokens - report.scoring_tokens
        assert rows.calls[-1] == main
        assert main + report.reused_tokens == report.prompt_tokens
        assert sum(c.repaired_tokens for c in report.chunks) == report.repaired_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_forwards_what_it_reports_and_one_row_per_token(policy: str) -> None:
    engine = make_engine()
    engine.warm(DOCS)
    engine.engine.eos_ids = frozenset()
    engine.generate(chat(["Its context is computed once."]), chunks=["Its context is computed once."], max_new_tokens=1)
    with spy(engine) as rows:
        options = {"chunks": [UNKNOWN], "repair": POLICIES[policy], "max_new_tokens": 5}
        report = engine.generate(chat([*DOCS, UNKNOWN]), **options).report
    assert report.new_tokens == 5
    assert report.stored_tokens > 0
    assert rows.total == report.forwarded_tokens + 4 + report.stored_tokens  # the first token costs no row of its own
    with spy(engine) as rows:
        score = engine.score(chat(DOCS), [40, 41, 42], repair=POLICIES[policy])
    assert rows.total == score.report.forwarded_tokens + 2


@pytest.mark.parametrize("reuse", ["off", "prefix"])
def test_plain_modes_count_too(reuse: str) -> None:
    engine = make_engine(reuse=reuse)
    for _ in range(2):
        with spy(engine) as rows:
            report = engine.generate(chat(), max_new_tokens=1).report
        assert rows.total == report.forwarded_tokens
        assert report.forwarded_tokens + report.reused_tokens == report.prompt_tokens


def test_fast_forwards_glue_and_misses_alone(family: str) -> None:
    engine = make_engine(family)
    engine.warm(DOCS)
    got, report = prepared(engine, chat([DOCS[3], UNKNOWN, DOCS[0]]), chunks=[UNKNOWN], repair="fast")
    glue = sum(len(s) for s in got.prompt.segments if s.kind == "glue")
    miss = next(len(s) for s in got.prompt.chunks if s.text == UNKNOWN)
    assert report.forwarded_tokens == glue + miss
    assert report.repaired_tokens == report.scoring_tokens == 0
    assert (report.hits, report.misses) == (2, 1)


def test_the_last_token_is_forwarded_even_inside_a_chunk() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    prompt = f"Read: {DOCS[0]}"
    with spy(engine) as rows:
        got, report = prepared(engine, prompt, repair="fast")
    assert got.prompt.segments[-1].kind == "chunk"
    glue = sum(len(s) for s in got.prompt.segments if s.kind == "glue")
    assert rows.total == report.forwarded_tokens == glue + 1
    assert report.reused_tokens + report.forwarded_tokens == report.prompt_tokens


@pytest.mark.parametrize(("policy", "share"), [("balanced", 0.15), ("faithful", 0.30)])
@pytest.mark.parametrize("docs", [DOCS[:1], DOCS, [d * 6 for d in DOCS], [d[:35] for d in DOCS]])
def test_named_policies_stay_within_their_total(policy: str, share: float, docs: list[str]) -> None:
    engine = make_engine()
    engine.warm(docs)
    got, report = prepared(engine, chat(docs), repair=policy)
    context = sum(len(s) for s in got.prompt.chunks)
    assert report.hits == len(docs)
    assert 0 < report.repaired_tokens <= share * context


@pytest.mark.parametrize(("policy", "share"), [("balanced", 0.15), ("faithful", 0.30)])
def test_the_budget_is_of_what_is_reused_now(policy: str, share: float) -> None:
    """Misses are computed anyway and held turns are done with: neither buys the reused chunks more repair."""
    engine = make_engine()
    engine.warm(DOCS[:1])
    got, report = prepared(engine, chat(DOCS), chunks=DOCS, repair=policy)
    assert (report.hits, report.misses) == (1, 3)
    assert report.repaired_tokens <= share * len(got.prompt.chunks[0])


def test_a_cap_bounds_any_union() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    repair = Repair(first=20, last=20, query=0.5, blend=0.5, cap=0.25)
    got, report = prepared(engine, chat(), repair=repair)
    assert report.repaired_tokens <= 0.25 * sum(len(s) for s in got.prompt.chunks)


def test_repair_costs_less_than_prefill() -> None:
    """KVBoost 0.9.0's blending ran the whole prompt and then threw most of it away."""
    engine = make_engine()
    engine.warm([d * 4 for d in DOCS])
    for policy in ("fast", "balanced", "faithful", "boundary", "attention"):
        _, report = prepared(engine, chat([d * 4 for d in DOCS]), repair=POLICIES[policy])
        assert report.forwarded_tokens < 0.5 * report.prompt_tokens, policy


def test_short_chunks_leave_half_of_the_budget_to_what_the_question_is_about() -> None:
    """Where the first eight tokens of every chunk are more than the budget, it went to the first chunks alone."""
    docs = [text[i : i + 40].strip() for text in DOCS for i in (0, 40)]
    engine = make_engine()
    engine.warm(docs)
    got, report = prepared(engine, chat(docs), repair="balanced")
    chosen, chunks = set(report.repaired_positions), got.prompt.chunks
    edges = [sum(p in chosen for p in range(c.start, c.start + 8)) for c in chunks]
    inner = [sum(p in chosen for p in range(c.start + 8, c.end)) for c in chunks]
    context = sum(len(c) for c in chunks)
    assert 8 * len(docs) > 0.13 * context, "or it is no such prompt"
    assert min(edges) >= 1
    assert sum(inner) >= 0.2 * len(chosen)


def test_boundary_tokens_that_fit_are_all_taken() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    got, report = prepared(engine, chat(), repair=Repair(first=8, query=0.1))
    for c in got.prompt.chunks:
        assert set(range(c.start, c.start + 8)) <= set(report.repaired_positions)
    got, report = prepared(engine, chat(), repair=Repair(first=100, cap=0.5))  # nobody else asks for any of it
    assert report.repaired_tokens == int(0.5 * sum(len(c) for c in got.prompt.chunks))


@pytest.mark.parametrize("repair", [Repair(first=8, query=0.2, cap=0.001), Repair(blend=0.2, cap=0.001)])
def test_nothing_is_scored_where_no_token_may_be_added(repair: Repair) -> None:
    engine = make_engine()
    engine.warm(DOCS)
    _, report = prepared(engine, chat(), repair=repair)
    assert (report.repaired_tokens, report.scoring_tokens) == (0, 0)
    assert "score" not in report.stages, "a cost model would learn that scoring takes no time"
