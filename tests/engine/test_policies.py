"""What each repair policy chooses, and that what it chooses is what it says."""

from __future__ import annotations

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.engine.prefill import Prepared
from kvboost_rag.engine.repair import CHECK_LAYER, SCORE_FROM, question_scores
from tests.engine.helpers import DOCS, TOLERANCE, chat, make_engine, prepared, reference
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def engine() -> KVBoost:
    e = make_engine()
    e.warm(DOCS)
    return e


def changed(engine: KVBoost, repair: Repair | str, layer: int = -1) -> tuple[Prepared, set[int]]:
    """Chunk positions whose K at ``layer`` is not the block's own any more."""
    untouched, _ = prepared(engine, chat(), repair="fast")
    got, _ = prepared(engine, chat(), repair=repair)
    gap = (got.cache.kv[layer, 0] - untouched.cache.kv[layer, 0]).abs().amax((0, 2))
    inside = {p for c in got.prompt.chunks for p in range(c.start, c.end)}
    return got, {p for p in inside if gap[p] > 1e-6}


def test_the_first_and_last_tokens_of_every_chunk(engine: KVBoost) -> None:
    """0.9.0 recomputed the end of the chunk *before* the seam, where nothing is stale."""
    got, positions = changed(engine, Repair.boundary(3, 2))
    expected = {p for c in got.prompt.chunks for p in [*range(c.start, c.start + 3), c.end - 2, c.end - 1]}
    assert positions == expected


def test_a_chunk_shorter_than_its_boundary(engine: KVBoost) -> None:
    _, positions = changed(engine, Repair.boundary(10_000))
    got, everything = changed(engine, Repair.full())
    assert positions == everything == {p for c in got.prompt.chunks for p in range(c.start, c.end)}


def test_scores_are_the_attention_that_transformers_computes(family: str) -> None:
    """Over an exact cache with nothing hidden: the question's attention, summed over its rows and the late layers."""
    own = make_engine(family)
    got, _ = prepared(own, chat(), reuse="off")
    ids = torch.tensor(got.prompt.token_ids)
    n = ids.numel()
    question = torch.arange(n - 20, n)
    hidden = torch.zeros(n, dtype=torch.bool)
    scores = question_scores(own.adapter, got.cache, ids, question, hidden)
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids[None], output_attentions=True).attentions
    late = weights[int(len(weights) * SCORE_FROM) :]
    expected = torch.stack([w[0, :, question].sum((0, 1)) for w in late]).sum(0)
    assert (scores - expected).abs().max() < TOLERANCE


def test_query_takes_its_share_of_what_is_scored_highest(engine: KVBoost) -> None:
    got, positions = changed(engine, Repair.attention(0.1))
    context = [p for c in got.prompt.chunks for p in range(c.start, c.end)]
    assert len(positions) == round(0.1 * len(context))
    _, more = changed(engine, Repair.attention(0.2))
    assert positions < more, "a larger share adds, it does not choose anew"


def test_deviation_takes_what_deviates_and_keeps_the_fresh_layers(engine: KVBoost) -> None:
    stale, _ = prepared(engine, chat(), repair="fast")
    got, positions = changed(engine, Repair.deviation(0.1))
    _, layers = reference(tiny_model(), got.prompt.token_ids)
    context = [p for c in got.prompt.chunks for p in range(c.start, c.end)]
    n = got.prompt.num_tokens
    deviation = (layers[CHECK_LAYER][0] - stale.cache.kv[CHECK_LAYER, 0, :, :n]).square().sum((0, 2))
    ranked = sorted(context, key=lambda p: -float(deviation[p]))
    assert positions == set(ranked[: len(positions)])
    assert len(positions) == round(0.1 * len(context))
    for layer in range(CHECK_LAYER + 1):
        for kind in (0, 1):
            assert (got.cache.kv[layer, kind, :, :n] - layers[layer][kind]).abs().max() < TOLERANCE


def test_policies_unite(engine: KVBoost) -> None:
    _, boundary = changed(engine, Repair.boundary(4))
    _, both = changed(engine, Repair.boundary(4) | Repair.attention(0.05))
    got, _ = changed(engine, "fast")
    context = sum(len(c) for c in got.prompt.chunks)
    assert boundary < both
    assert len(both) == len(boundary) + round(0.05 * context)


def test_the_shift_is_the_mean_residual_of_the_repaired_keys(engine: KVBoost) -> None:
    repair = Repair.boundary(4)
    stale, _ = prepared(engine, chat(), repair="fast")
    got, _ = prepared(engine, chat(), repair=repair.with_shift())
    rope = engine.adapter.rope
    chosen = [p for c in got.prompt.chunks for p in range(c.start, c.start + 4)]
    rest = [p for c in got.prompt.chunks for p in range(c.start + 4, c.end)]
    for layer in range(4):
        before, after = stale.cache.kv[layer, 0], got.cache.kv[layer, 0]

        def unrotated(keys: torch.Tensor, at: list[int]) -> torch.Tensor:
            return rope.unrotate_at(keys[:, at], torch.tensor(at))

        residual = (unrotated(after, chosen) - unrotated(before, chosen)).mean(1, keepdim=True)
        moved = unrotated(after, rest) - unrotated(before, rest)
        assert (moved - residual).abs().max() < TOLERANCE
        assert torch.equal(stale.cache.kv[layer, 1][:, rest], got.cache.kv[layer, 1][:, rest]), "V stays"


def test_repair_brings_the_answer_nearer(engine: KVBoost) -> None:
    logits, _ = reference(tiny_model(), prepared(engine, chat())[0].prompt.token_ids)

    def gap(repair: Repair | str) -> float:
        got, _ = prepared(engine, chat(), repair=repair)
        return float((got.logits[0] - logits[-1]).norm())

    assert gap(Repair.full()) < TOLERANCE < gap(Repair.boundary(40)) < gap("fast")
