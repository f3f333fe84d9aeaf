"""Repair.full() is a full prefill; reuse="off" is the plain model; blocks are what they claim to be."""

from __future__ import annotations

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from tests.engine.helpers import (
    DOCS,
    QUESTION,
    TOLERANCE,
    chat,
    full_prefill_gap,
    hf_greedy,
    make_engine,
    prepared,
    reference,
    segmented,
)
from tests.tiny import tiny_model


def test_full_repair_over_composed_blocks_is_a_full_prefill(family: str) -> None:
    engine = make_engine(family)
    engine.warm(DOCS)
    prompt = chat([DOCS[2], DOCS[0], DOCS[3]])
    got, report = prepared(engine, prompt, repair=Repair.full())
    assert [c.outcome for c in report.chunks] == ["hit"] * 3
    assert full_prefill_gap(engine, tiny_model(family), prompt, repair=Repair.full()) < TOLERANCE
    without = full_prefill_gap(engine, tiny_model(family), prompt, repair="fast")
    assert without > 100 * TOLERANCE, "the blocks are approximate here, else this test shows nothing"


def test_score_after_full_repair_equals_transformers(family: str) -> None:
    engine = make_engine(family)
    engine.warm(DOCS)
    ids = list(segmented(engine, chat()).token_ids)
    continuation = [40, 50, 60, 70]
    score = engine.score(chat(), continuation, repair=Repair.full(), logits=True)
    logits, _ = reference(tiny_model(family), ids + continuation)
    assert score.logits is not None
    assert (score.logits - logits[len(ids) - 1 : -1]).abs().max() < TOLERANCE
    expected = logits[len(ids) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
    assert torch.allclose(score.logprobs, expected, atol=TOLERANCE)


def test_reuse_off_is_the_plain_model(family: str) -> None:
    engine = make_engine(family, reuse="off")
    result = engine.generate(chat(), max_new_tokens=12)
    fresh = tiny_model(family)
    ids = engine.tokens.tokenizer.apply_chat_template(chat(), add_generation_prompt=True, return_dict=False)
    assert segmented(engine, chat()).token_ids == tuple(ids)
    for attention in ("sdpa", "eager"):
        fresh.set_attn_implementation(attention)
        assert result.token_ids == hf_greedy(fresh, ids, 12)
    assert result.report.exact
    assert result.report.forwarded_tokens == len(ids)
    assert hf_greedy(engine.adapter.model, ids, 12) == result.token_ids, "and the user's model generates as before"


def test_a_moved_chunk_is_exact_in_the_first_layer(family: str) -> None:
    """Layer 0 sees tokens and positions only: whatever a block was computed after, it must be exact there."""
    engine = make_engine(family)
    engine.warm(DOCS)
    for place in (0, 1, 3):
        docs = [d for d in DOCS if d != DOCS[1]]
        docs.insert(place, DOCS[1])
        got, _ = prepared(engine, chat(docs), repair="fast")
        _, layers = reference(tiny_model(family), got.prompt.token_ids)
        chunk = got.prompt.chunks[place]
        at = slice(chunk.start, chunk.end)
        assert chunk.text == DOCS[1]
        for kind in (0, 1):
            assert (got.cache.kv[0, kind, :, at] - layers[0][kind][:, at]).abs().max() < TOLERANCE
        deeper = (got.cache.kv[-1, 0, :, at] - layers[-1][0][:, at]).abs().max()
        assert deeper > 100 * TOLERANCE


def test_own_head_block_is_exact_without_repair(family: str) -> None:
    engine = make_engine(family)
    messages = chat([DOCS[0]])
    engine.warm(DOCS, head=messages[0]["content"])
    assert full_prefill_gap(engine, tiny_model(family), messages, repair="fast") < TOLERANCE
    _, report = prepared(engine, messages, repair="balanced")
    assert report.exact
    assert report.repaired_tokens == 0
    assert report.chunks[0].outcome == "hit"
    _, second = prepared(engine, chat([DOCS[1], DOCS[0]]), repair="fast")
    assert not second.exact, "only the first chunk may use its own-head block"


def test_own_head_block_serves_that_head_alone() -> None:
    engine = make_engine()
    engine.warm(DOCS[:1], head="Another head.")
    _, report = prepared(engine, chat(DOCS[:1]), repair="fast")
    assert not report.exact
    assert report.chunks[0].reason == "canonical block"


def test_batched_blocks_equal_single_blocks(family: str) -> None:
    """No chunk sees another, and padding is invisible."""
    engine = make_engine(family)
    encoder = engine.encoder()
    chunks = [encoder.tokenize(text) for text in (DOCS[0], "short", DOCS[3] * 3)]
    together = encoder.encode(chunks)
    for ids, block in zip(chunks, together, strict=True):
        alone = encoder.encode([ids])[0]
        assert alone.key == block.key
        assert alone.kv.shape[3] == len(ids)
        assert (alone.kv - block.kv).abs().max() < TOLERANCE
    others = encoder.encode([chunks[0], encoder.tokenize("something else entirely"), chunks[1]])
    assert (others[0].kv - together[0].kv).abs().max() < TOLERANCE


def test_a_block_is_the_unrotated_kv_after_the_context(family: str) -> None:
    engine = make_engine(family)
    encoder = engine.encoder()
    ids = encoder.tokenize(DOCS[0])
    context = encoder._contexts["canonical"].token_ids
    block = encoder.encode([ids])[0]
    _, layers = reference(tiny_model(family), context + ids)
    for layer, (keys, values) in enumerate(layers):
        placed = torch.empty_like(block.kv[layer, 0])
        engine.adapter.rope.rotate_into(placed, block.kv[layer, 0], len(context))
        assert (placed - keys[:, len(context) :]).abs().max() < TOLERANCE
        assert (block.kv[layer, 1] - values[:, len(context) :]).abs().max() < TOLERANCE


def test_the_same_chunk_twice_in_one_prompt() -> None:
    engine = make_engine()
    engine.warm(DOCS)
    prompt = chat([DOCS[0], DOCS[1], DOCS[0]])
    got, report = prepared(engine, prompt, repair="fast")
    assert [(c.outcome, s.text) for c, s in zip(report.chunks, got.prompt.chunks, strict=True)] == [
        ("hit", DOCS[0]), ("hit", DOCS[1]), ("hit", DOCS[0]),
    ]  # fmt: skip
    assert full_prefill_gap(engine, tiny_model(), prompt, repair=Repair.full()) < TOLERANCE


def test_nested_and_overlapping_chunks_leftmost_then_longest() -> None:
    engine = make_engine()
    inner, outer = DOCS[0][10:60], DOCS[0]
    overlap = DOCS[0][40:] + " " + DOCS[1][:40]
    engine.warm([inner, outer, overlap])
    prompt = f"{DOCS[0]} {DOCS[1]}{QUESTION}"
    assert [s.text for s in segmented(engine, prompt).chunks] == [outer]
    assert [s.text for s in segmented(engine, f"xx {inner} yy").chunks] == [inner]
    assert full_prefill_gap(engine, tiny_model(), prompt, repair=Repair.full()) < TOLERANCE


def test_bfloat16_composes_within_its_rounding() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    engine = make_engine(model=model)
    engine.warm(DOCS)
    got, report = prepared(engine, chat(), repair=Repair.full())
    logits, _ = reference(tiny_model(dtype=torch.bfloat16), got.prompt.token_ids)
    assert report.hits == 4
    scale = logits[-1].abs().max()
    assert (got.logits[0].float() - logits[-1].float()).abs().max() < 0.05 * scale


@pytest.mark.real_model
def test_the_real_model_too(smollm2: object) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer  # type: ignore[attr-defined]
    with KVBoost(model, tokenizer, store="memory", filler_tokens=64) as engine:
        engine.warm(DOCS)
        prompt = chat([DOCS[1], DOCS[3], DOCS[0]])
        got, report = prepared(engine, prompt, repair=Repair.full())
        logits, _ = reference(model, got.prompt.token_ids)  # without a plan our attention is transformers' own
        plain = engine.generate(prompt, reuse="off", max_new_tokens=8)
        expected = hf_greedy(model, segmented(engine, prompt, reuse="off").token_ids, 8)
        assert report.hits == 3
        assert (got.logits[0] - logits[-1]).abs().max() < 1e-3
        assert plain.token_ids == expected


def test_attention_set_back_behind_our_back_is_noticed() -> None:
    """A model whose attention function ignores the plan would silently see nothing but garbage."""
    engine = make_engine()
    engine.warm(DOCS)
    before = engine.generate(chat(), max_new_tokens=8).token_ids
    engine.adapter.model.set_attn_implementation("sdpa")
    engine.forget()
    assert engine.generate(chat(), max_new_tokens=8).token_ids == before
