"""The rivals' rows do what they say: each method's own law, on tiny models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import fidelity
import fidelity_data as data
from fidelity_policies import RIVALS, Outcome, Row, rows
from rival_ape import Ape, ApePlan, Group
from rival_blocks import DUMMIES, RivalBlocks
from rival_prompt import Laid, Spans, spans_of
from rival_shift import AgentKVShift

from kvboost_rag import KVBoost, Repair
from tests.tiny import tiny_model

ROUNDING = 1e-5  # nats
TOLERANCE = 2e-4  # of fp32 logits
ANSWER = [11, 7, 23, 5]


@pytest.fixture
def items() -> list[data.Item]:
    return data.synthetic("needle", 2, seed=1, chunks=3, chunk_tokens=60)


@pytest.fixture
def bench(tiny: Any, tokenizer: Any) -> fidelity.Bench:
    return fidelity.Bench(lambda dtype: (tiny, tokenizer), max_new_tokens=4)


def measure(bench: fidelity.Bench, items: list[data.Item], *wanted: Row) -> dict[str, Outcome]:
    return fidelity.run(bench, data.DataSet("needle", tuple(items), "gold"), wanted, quiet=True)[0]


class Case:
    """One item over an engine that computes blocks alone."""

    def __init__(self, model: Any, tokenizer: Any, item: data.Item, other: data.Item) -> None:
        self.model, self.item = model, item
        self.engine = KVBoost(model, tokenizer, store="memory", alone=True, prefix_bytes=0)
        self.prompt = data.messages(item)
        report = self.engine.score(self.prompt, "x", chunks=list(item.passages), repair=Repair.full()).report
        self.spans = spans_of(self.engine, self.prompt, item.passages, report)
        self.blocks = RivalBlocks(self.engine, item, other.passages, self.spans, "chat")

    def laid(self, kind: str, method: Any) -> Laid:
        blocks = self.blocks.alone if kind == "alone" else self.blocks.of(kind)
        return Laid(self.engine, self.spans, blocks, method, room=8)

    def reused(self, kind: str) -> torch.Tensor:
        """The engine's own logits along the answer over these blocks, nothing recomputed."""
        self.blocks.fill(self.engine.store, kind)
        options: dict[str, Any] = {"chunks": list(self.item.passages), "repair": "fast", "logits": True}
        score = self.engine.score(self.prompt, ANSWER, **options)
        assert score.report.hits == len(self.item.passages)
        assert score.logits is not None
        return score.logits

    def full(self) -> torch.Tensor:
        """transformers' own full prefill, logits along the answer."""
        ids = torch.tensor([[*self.spans.token_ids, *ANSWER[:-1]]])
        with torch.no_grad():
            return self.model(ids).logits[0, -len(ANSWER) :]


@pytest.fixture(params=["llama", "yarn", "qwen3"])
def case(request: pytest.FixtureRequest, tokenizer: Any, items: list[data.Item]) -> Iterator[Case]:
    made = Case(tiny_model(request.param, vocab_size=len(tokenizer)), tokenizer, items[0], items[1])
    yield made
    made.engine.close()


# --- the pipeline ------------------------------------------------------------------------------------------------


def test_every_row_of_a_rival_runs_and_costs_less_than_full_prefill(bench: Any, items: list[data.Item]) -> None:
    found = measure(bench, items, *RIVALS)
    for row in RIVALS:
        assert found[row.name].kl_greedy > 0
        assert found[row.name].forwarded < found["full"].forwarded


def test_a_method_that_recomputes_everything_is_full_prefill(bench: Any, items: list[data.Item]) -> None:
    everything = Row("everything", "alone", method=AgentKVShift(1.0))
    found = measure(bench, items, everything)["everything"]
    assert found.kl_greedy < ROUNDING
    assert found.kl_gold < ROUNDING
    assert (found.agreement, found.same_text, found.repaired_share) == (1.0, 1.0, 1.0)


def test_rivals_leave_nothing_to_the_rows_after_them(bench: Any, items: list[data.Item]) -> None:
    names = "alone,kamera-4,kvshift-15,ape,balanced"
    forth = measure(bench, items, *rows(names))
    back = measure(bench, items, *reversed(rows(names)))
    for row in rows(names):
        assert forth[row.name].kl_gold == pytest.approx(back[row.name].kl_gold, abs=ROUNDING)


def test_greedy_decoding_goes_through_the_same_attention_as_scoring(case: Case) -> None:
    laid = case.laid("own-head", Ape(0.8, 0.7))
    said = laid.greedy(6)
    assert laid.along(said).argmax(-1).tolist() == said


def test_a_prompt_that_is_cut_otherwise_is_refused(case: Case) -> None:
    report = case.engine.score(case.prompt, "x", chunks=[]).report
    with pytest.raises(RuntimeError, match="other spans"):
        spans_of(case.engine, case.prompt, case.item.passages, report)


# --- APE ---------------------------------------------------------------------------------------------------------


def test_ape_without_temperature_and_scale_is_plain_attention(case: Case) -> None:
    laid = case.laid("own-head", Ape(1.0, 1.0))
    assert (laid.along(ANSWER) - case.reused("own-head")).abs().max() < TOLERANCE
    tempered = case.laid("own-head", Ape(0.9, 0.9)).along(ANSWER)
    assert (tempered - case.reused("own-head")).abs().max() > 10 * TOLERANCE


def test_shared_positions_are_those_of_one_forward_with_such_positions_and_mask(case: Case) -> None:
    """Blocks after the head, no chunk sees another, all start at the same place: one call of transformers says so."""
    got = case.laid("own-head", Ape(1.0, 1.0, shared=True)).along(ANSWER)
    ids = [*case.spans.token_ids, *ANSWER[:-1]]
    starts = [s for s, _ in case.spans.chunks]
    head, question = starts[0], case.spans.question
    bounds = [*starts, question]
    group, position = torch.zeros(len(ids), dtype=torch.long), torch.arange(len(ids))
    for i, (a, b) in enumerate(pairwise(bounds), 1):
        group[a:b], position[a:b] = i, head + torch.arange(b - a)
    longest = max(b - a for a, b in pairwise(bounds))
    group[question:], position[question:] = -1, head + longest + torch.arange(len(ids) - question)
    order = torch.arange(len(ids))
    seen = order[None] <= order[:, None]
    seen &= (group[None] == 0) | (group[None] == group[:, None]) | (group[:, None] == -1)
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
    with torch.no_grad():
        want = case.model(torch.tensor([ids]), position_ids=position[None], attention_mask=mask).logits[0]
    assert (got - want[-len(ANSWER) :]).abs().max() < TOLERANCE


def test_ape_merges_by_log_sum_exp() -> None:
    """Against attention over each part, written out for one head and one row."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, 8, generator=draw) for n in (1, 12, 12))
    groups = (Group(0, 3, 0), Group(3, 9, 0), Group(9, 1 << 40, 0))
    plan = ApePlan(Ape(0.7, 0.6), groups, torch.tensor([11]), None)
    got = plan.attend(0, q, k, v, 0.5)[0, 0, 0]
    scores = 0.5 * (k[0, 0] @ q[0, 0, 0])
    context, other = scores[3:9] / 0.7, torch.cat([scores[:3], scores[9:]])
    lse_c, lse_o = context.exp().sum().log() * 0.7 * 0.6, other.exp().sum().log()
    w = lse_c.exp() / (lse_c.exp() + lse_o.exp())
    out_c = context.softmax(-1) @ v[0, 0, 3:9]
    out_o = other.softmax(-1) @ torch.cat([v[0, 0, :3], v[0, 0, 9:]])
    assert (got - (w * out_c + (1 - w) * out_o)).abs().max() < 1e-5


def test_ape_by_name() -> None:
    a, b, c = rows("ape:0.8:1.0,ape-shared:0.9:0.7,ape:1.0:0.9:4@canonical")
    assert (a.method, a.variant) == (Ape(0.8, 1.0), "own-head")
    assert (c.method, c.variant) == (Ape(1.0, 0.9, first=4), "canonical")
    assert b.method == Ape(0.9, 0.7, shared=True)
    with pytest.raises(SystemExit, match="ape:TEMPERATURE:SCALE"):
        rows("ape:warm")


# --- blocks ------------------------------------------------------------------------------------------------------


def test_own_head_blocks_make_the_first_chunk_exact(case: Case) -> None:
    start, end = case.spans.chunks[0]
    with torch.no_grad():
        out = case.model(torch.tensor([case.spans.token_ids[:end]]), use_cache=True)
    held = getattr(out, "cache", None) or out.past_key_values
    laid = case.laid("own-head", Ape(1.0, 1.0))
    for layer, want in enumerate(held.layers):
        assert (laid.cache.kv[layer, 0, :, start:end] - want.keys[0, :, start:end]).abs().max() < TOLERANCE
        assert (laid.cache.kv[layer, 1, :, start:end] - want.values[0, :, start:end]).abs().max() < TOLERANCE


@pytest.mark.parametrize("style", ["chat", "numbered"])
def test_the_own_head_is_what_stands_in_front_of_the_first_passage(
    tiny: Any, tokenizer: Any, items: list[data.Item], style: str
) -> None:
    engine = KVBoost(tiny, tokenizer, store="memory", alone=True)
    text = engine.render(data.messages(items[0], style=style))
    for count in (0, 2):
        before, passage = items[0].passages[:count], items[0].passages[count]
        marked = [dict(m) for m in data.head_messages(before, style=style)]
        marked[-1]["content"] += passage
        assert text.startswith(engine.render(marked).split(passage)[0] + passage)


def test_dummies_stand_in_front_of_each_chunk_and_are_dropped(case: Case) -> None:
    start, end = case.spans.chunks[1]
    chunk = list(case.spans.token_ids[start:end])
    bos = case.engine.tokenizer.bos_token_id
    with torch.no_grad():
        out = case.model(torch.tensor([[bos] * DUMMIES + chunk]), use_cache=True)
    held = getattr(out, "cache", None) or out.past_key_values
    block = case.blocks.of("dummies")[1]
    assert list(block.token_ids) == chunk
    for layer, want in enumerate(held.layers):
        keys = case.engine.adapter.rope.unrotate(want.keys[0, :, DUMMIES:], DUMMIES)
        assert (block.kv[layer, 0] - keys).abs().max() < TOLERANCE
        assert (block.kv[layer, 1] - want.values[0, :, DUMMIES:]).abs().max() < TOLERANCE


def test_a_whole_patch_of_the_requests_own_context_is_exact(case: Case) -> None:
    assert (case.reused("kamera-full-own") - case.full()).abs().max() < TOLERANCE
    assert (case.reused("kamera-2-own") - case.full()).abs().max() > 10 * TOLERANCE


def test_a_patch_has_the_rank_that_it_says_and_rank_none_is_alone(case: Case) -> None:
    for alone, none, low in zip(case.blocks.alone, case.blocks.of("kamera-0"), case.blocks.of("kamera-2"), strict=True):
        assert torch.equal(alone.kv, none.kv)
        patch = (low.kv - alone.kv)[1:].transpose(2, 3).flatten(3)  # layer 0 knows no context
        assert torch.linalg.matrix_rank(patch, rtol=1e-3).max() == 2


def test_a_patch_comes_from_other_passages_than_the_requests(case: Case, items: list[data.Item]) -> None:
    before = case.blocks.of("kamera-full")
    strangers = RivalBlocks(case.engine, case.item, items[1].passages[::-1], case.spans, "chat").of("kamera-full")
    assert not torch.allclose(before[0].kv, strangers[0].kv, atol=TOLERANCE)
    with pytest.raises(SystemExit, match="two items"):
        RivalBlocks(case.engine, case.item, (), case.spans, "chat").of("kamera-4")


# --- AgentKVShift ------------------------------------------------------------------------------------------------


def test_the_shift_is_each_chunks_own_mean_of_keys_and_of_values(case: Case) -> None:
    stale = case.laid("alone", Ape(1.0, 1.0)).cache
    method = AgentKVShift(0.2)
    laid = case.laid("alone", method)
    rope, probes = case.engine.adapter.rope, set(method.choose(case.laid("alone", Ape(1.0, 1.0))))
    for start, end in case.spans.chunks:
        own = torch.tensor([p for p in range(start, end) if p in probes])
        rest = torch.tensor([p for p in range(start, end) if p not in probes])
        for layer in range(4):
            old, new = stale.kv[layer], laid.cache.kv[layer]
            change = [(new[1] - old[1])[:, at] for at in (own, rest)]
            keys = [rope.unrotate_at(new[0][:, at], at) - rope.unrotate_at(old[0][:, at], at) for at in (own, rest)]
            for taught, moved in (change, keys):
                assert (moved - taught.mean(1, keepdim=True)).abs().max() < TOLERANCE


def test_probes_are_a_share_of_every_chunk_and_deviate_most_at_layer_1(case: Case) -> None:
    laid = case.laid("alone", Ape(1.0, 1.0))
    before = laid.cache.kv.clone()
    chosen = AgentKVShift(0.25).choose(laid)
    assert torch.equal(before, laid.cache.kv), "looking changes nothing"
    with torch.no_grad():
        out = case.model(torch.tensor([case.spans.token_ids]), use_cache=True)
    held = getattr(out, "cache", None) or out.past_key_values
    off = (held.layers[1].keys[0] - before[1, 0, :, : laid.n]).square().sum((0, 2))
    for start, end in case.spans.chunks:
        own = [p for p in chosen if start <= p < end]
        assert len(own) == -(-(end - start) // 4)
        rest = [p for p in range(start, end) if p not in own]
        assert off[own].min() >= off[rest].max() - TOLERANCE


def test_spans_know_where_the_question_starts() -> None:
    assert Spans((1, 2, 3, 4), ((1, 2), (2, 3))).question == 3
