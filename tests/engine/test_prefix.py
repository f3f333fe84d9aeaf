"""Exact reuse: repeated prompts and conversations. Approximate KV is never handed out as exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.engine.prefix import Held, PrefixCache
from tests.engine.helpers import DOCS, TOLERANCE, chat, full_prefill_gap, hf_greedy, make_engine, prepared, segmented
from tests.tiny import sentencepiece_like_tokenizer, tiny_model

TURNS = ("What is the name of the river?", "And who lived there?", "Thank you. Was that in 1887?", "日本語で 🙂 please")


def held(engine: KVBoost) -> dict[str, int]:
    return engine.stats()["prefixes"]  # type: ignore[return-value]


@pytest.mark.parametrize("reuse", ["prefix", "chunks"])
def test_a_repeated_prompt_forwards_one_token(family: str, reuse: str) -> None:
    engine = make_engine(family, reuse=reuse)
    first = engine.generate(chat(), max_new_tokens=6)
    second = engine.generate(chat(), max_new_tokens=6)
    assert first.report.forwarded_tokens == first.report.prompt_tokens
    assert second.report.forwarded_tokens == 1
    assert second.report.prefix_tokens == second.report.prompt_tokens - 1
    assert second.report.exact
    assert second.token_ids == first.token_ids == engine.generate(chat(), reuse="off", max_new_tokens=6).token_ids


@pytest.mark.parametrize("reuse", ["prefix", "chunks"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "yarn"])
@pytest.mark.parametrize("max_new", [1, 7])
def test_conversations_are_exact_and_hardly_prefilled(family: str, reuse: str, max_new: int) -> None:
    engine = make_engine(family, reuse=reuse)
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief. " * 10}]
    earlier = 0
    for turn, question in enumerate(TURNS):
        messages.append({"role": "user", "content": question})
        result = engine.generate(messages, max_new_tokens=max_new)
        plain = engine.generate(messages, max_new_tokens=max_new, reuse="off")
        assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
        assert result.report.exact
        if turn:
            assert result.report.prefix_tokens >= 0.95 * earlier
        earlier = result.report.prompt_tokens
        messages.append({"role": "assistant", "content": result.text})


def test_a_conversation_in_a_tokenizer_that_marks_word_starts() -> None:
    tokenizer = sentencepiece_like_tokenizer()
    engine = make_engine(tokenizer=tokenizer)
    messages: list[dict[str, str]] = []
    for question in TURNS[:3]:
        messages.append({"role": "user", "content": question})
        result = engine.generate(messages, max_new_tokens=5)
        assert result.token_ids == engine.generate(messages, max_new_tokens=5, reuse="off").token_ids
        messages.append({"role": "assistant", "content": result.text})


@pytest.mark.real_model
def test_a_conversation_with_the_real_model(smollm2: Any) -> None:
    with KVBoost(smollm2.model, smollm2.tokenizer, store="memory", filler_tokens=32) as engine:
        messages: list[dict[str, str]] = []
        earlier = 0
        for turn, question in enumerate(TURNS[:2]):
            messages.append({"role": "user", "content": question})
            result = engine.generate(messages, max_new_tokens=6)
            ids = segmented(engine, messages, reuse="off").token_ids
            assert result.token_ids == hf_greedy(smollm2.model, ids, 6)[: len(result.token_ids)]
            assert not turn or result.report.prefix_tokens >= 0.95 * earlier
            earlier = result.report.prompt_tokens
            messages.append({"role": "assistant", "content": result.text})


def test_the_answer_too_is_part_of_the_prefix() -> None:
    engine = make_engine(reuse="prefix")
    prompt = [40, 50, 60, 70]
    answer = engine.generate(prompt, max_new_tokens=20)
    longer = engine.generate([*prompt, *answer.token_ids, 41], max_new_tokens=4)
    assert longer.report.prefix_tokens == len(prompt) + len(answer.token_ids) - 1
    assert longer.token_ids == hf_greedy(tiny_model(), [*prompt, *answer.token_ids, 41], 4)


def test_a_prefix_that_parts_midway_is_reused_up_to_there(family: str) -> None:
    engine = make_engine(family, reuse="prefix")
    ids = list(range(20, 120))
    engine.generate(ids, max_new_tokens=3)
    other = [*ids[:60], 300, *ids[61:]]
    result = engine.generate(other, max_new_tokens=5)
    assert result.report.prefix_tokens == 60
    assert result.token_ids == hf_greedy(tiny_model(family), other, 5)


# -- approximate history ---------------------------------------------------------------------------------------------


def approximate_conversation(engine: KVBoost) -> tuple[list[dict[str, str]], Any]:
    """A "fast" answer over blocks, and the next turn after it."""
    engine.warm(DOCS)
    messages = chat()
    first = engine.generate(messages, repair="fast", max_new_tokens=8)
    assert not first.report.exact
    return [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}], first


def test_exact_requests_take_only_the_exact_head_of_an_approximate_answer() -> None:
    engine = make_engine()
    follow, first = approximate_conversation(engine)
    head = first.report.chunks[0].start
    for messages in (chat(), follow):
        got, report = prepared(engine, messages, reuse="prefix")
        assert report.exact
        assert report.prefix_exact
        assert 0 < report.prefix_tokens <= head
        assert full_prefill_gap(engine, tiny_model(), messages, reuse="prefix") < TOLERANCE
    assert got.exact_tokens == got.prompt.num_tokens


def test_a_later_turn_under_the_same_policy_continues_and_says_so() -> None:
    engine = make_engine()
    follow, first = approximate_conversation(engine)
    result = engine.generate(follow, repair="fast", max_new_tokens=4)
    assert result.report.prefix_tokens >= 0.95 * first.report.prompt_tokens
    assert not result.report.prefix_exact
    assert not result.report.exact
    assert {c.outcome for c in result.report.chunks} == {"prefix"}


def test_full_repair_behind_approximate_history_is_not_called_exact() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    messages = chat()
    first = engine.generate(messages, repair=Repair.full(), max_new_tokens=6)
    assert first.report.exact
    follow = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
    assert full_prefill_gap(engine, tiny_model(), follow, repair=Repair.full()) < TOLERANCE
    _, exact = prepared(engine, follow, repair=Repair.full())
    assert exact.exact
    other, _ = approximate_conversation(make_engine())
    engine.forget()
    engine.generate(messages, repair="fast", max_new_tokens=6)
    _, report = prepared(engine, other, repair="fast")
    assert not report.exact


@pytest.mark.parametrize("policy", ["balanced", "faithful", "full"])
def test_another_policy_does_not_get_it(policy: str) -> None:
    engine = make_engine()
    follow, first = approximate_conversation(engine)
    repair: Any = Repair.full() if policy == "full" else policy
    _, report = prepared(engine, follow, repair=repair)
    assert report.prefix_tokens <= first.report.chunks[0].start
    assert report.prefix_exact


def test_policies_are_told_apart_by_what_they_do_not_by_their_name() -> None:
    engine = make_engine()
    follow, first = approximate_conversation(engine)
    impostor = Repair(first=30, name="fast")
    _, report = prepared(engine, follow, repair=impostor)
    assert report.prefix_tokens <= first.report.chunks[0].start


def test_full_repair_never_inherits_approximate_kv() -> None:
    engine = make_engine()
    follow, _ = approximate_conversation(engine)
    assert full_prefill_gap(engine, tiny_model(), follow, repair=Repair.full()) < TOLERANCE


def test_salt_keeps_conversations_apart() -> None:
    one, two = make_engine(salt="a"), make_engine(salt="b")
    two.engine.prefixes = one.engine.prefixes  # even in one cache
    one.generate(chat(), max_new_tokens=2)
    assert two.generate(chat(), max_new_tokens=2).report.prefix_tokens == 0
    assert one.generate(chat(), max_new_tokens=2).report.prefix_tokens > 0


def test_a_chunk_behind_a_held_turn_still_hits() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    messages = chat(DOCS[:2])
    first = engine.generate(messages, max_new_tokens=5)
    messages += [{"role": "assistant", "content": first.text}, *chat(DOCS[2:])[1:]]
    got, report = prepared(engine, messages)
    assert [c.outcome for c in report.chunks] == ["prefix", "prefix", "hit", "hit"]
    assert report.repaired_tokens <= 0.15 * sum(len(c) for c in got.prompt.chunks[2:])


def test_a_held_prefix_is_never_written_into() -> None:
    engine = make_engine(reuse="prefix")
    engine.generate(chat(), max_new_tokens=5)
    kept = next(iter(engine.engine.prefixes._entries.values()))
    before = kept.kv.clone()
    for repair in ("fast", "faithful", Repair.deviation(0.2)):
        engine.generate(chat(question=" Another question?"), max_new_tokens=4, repair=repair, reuse="chunks")
    n = len(kept.token_ids)
    assert torch.equal(kept.kv[:, :, :, :n], before[:, :, :, :n])


@pytest.mark.parametrize("policy", ["fast", "balanced", "faithful"])
@pytest.mark.parametrize("head", [False, True])
def test_what_is_held_does_not_change_the_choice_of_tokens(policy: str, head: bool) -> None:
    """The same request twice: the second finds its head held, and must repair the same tokens and say the same."""
    engine = make_engine(repair=policy)
    engine.warm(DOCS, head=chat()[0]["content"] if head else None)
    first, second = (engine.generate(chat(), max_new_tokens=8) for _ in range(2))
    assert second.report.prefix_tokens > first.report.prefix_tokens == 0
    assert second.report.repaired_positions == first.report.repaired_positions
    assert second.token_ids == first.token_ids


def test_off_neither_uses_nor_leaves_anything() -> None:
    engine = make_engine()
    engine.generate(chat(), max_new_tokens=2, reuse="off")
    assert held(engine)["entries"] == 0
    engine.generate(chat(), max_new_tokens=2)
    report = engine.generate(chat(), max_new_tokens=2, reuse="off").report
    assert report.forwarded_tokens == report.prompt_tokens
    engine.forget()
    assert held(engine) == {"entries": 0, "bytes": 0, "limit_bytes": 1 << 30}


# -- the byte budget -------------------------------------------------------------------------------------------------


def entry(ids: tuple[int, ...], *, exact: int | None = None, policy: str = "fast") -> Held:
    kv = torch.zeros(1, 2, 1, len(ids), 4)
    return Held("fp", "", policy, "", (), ids, len(ids) if exact is None else exact, kv)


def longest(cache: PrefixCache, ids: tuple[int, ...]) -> int:
    hit = cache.longest(ids, fingerprint="fp", salt="", limit=len(ids))
    return hit.num_tokens if hit else 0


def test_least_recently_used_goes_first_and_the_budget_holds() -> None:
    size = entry((1,) * 10).nbytes
    cache = PrefixCache(3 * size)
    texts = [tuple(range(i * 100, i * 100 + 10)) for i in range(4)]
    for t in texts[:3]:
        assert cache.add(entry(t))
    assert longest(cache, texts[0]) == 10  # used: now the youngest
    cache.add(entry(texts[3]))
    assert [longest(cache, t) for t in texts] == [10, 0, 10, 10]
    assert cache.nbytes <= cache.limit_bytes
    assert not cache.add(entry(tuple(range(31))))
    assert [longest(cache, t) for t in texts] == [10, 0, 10, 10], "what does not fit drives nothing out"


def test_a_longer_turn_replaces_the_shorter_one() -> None:
    cache = PrefixCache(1 << 20)
    cache.add(entry((1, 2, 3)))
    cache.add(entry((1, 2, 3, 4)))
    assert len(cache) == 1
    cache.add(entry((1, 2, 3, 4, 5), exact=2))
    assert len(cache) == 2, "less exact: the other one still has something"
    assert longest(cache, (1, 2, 3, 4, 5)) == 4


def test_an_engine_without_a_budget_holds_nothing() -> None:
    engine = make_engine(prefix_bytes=0)
    engine.generate(chat(), max_new_tokens=2)
    assert held(engine)["entries"] == 0
    assert engine.generate(chat(), max_new_tokens=2).report.prefix_tokens == 0


def test_the_engines_budget_counts_all_that_is_held() -> None:
    engine = make_engine(prefix_bytes=400_000)
    for i in range(12):
        engine.generate(f"{i} " + "the river " * 20, max_new_tokens=2)
        assert held(engine)["bytes"] <= 400_000
    entries = engine.engine.prefixes._entries.values()
    assert held(engine)["bytes"] == sum(e.kv.untyped_storage().nbytes() for e in entries)
    assert 1 < held(engine)["entries"] < 12
