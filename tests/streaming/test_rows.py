"""Activations are bounded by the planned workspace: MLPs take some rows at a time, long forwards go in slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.model.rows import slice_mlps
from kvboost_rag.plan import Budget, find_weights, make_plan
from tests.engine.helpers import DOCS, TOLERANCE, chat, reference, spy
from tests.paged.helpers import least_budget
from tests.streaming.helpers import budget_for, load_streamed, logits, streamed_engine, weights_of
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer


def bounded(path: Path, mlp_rows: int) -> Budget:
    """A budget whose workspace is ``mlp_rows`` rows of an MLP, twice."""
    budget, workspace = budget_for(path, 1), 2 * mlp_rows * weights_of(path).mlp_row
    return replace(budget, workspace=workspace, vram=budget.vram + workspace)


class Widest:
    """The most rows that any MLP was given at once."""

    def __init__(self, model: Any) -> None:
        self.rows = 0
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(self._note)

    def _note(self, module: Any, args: Any) -> None:
        self.rows = max(self.rows, args[0].numel() // args[0].shape[-1])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_sliced_mlps_change_nothing(family: str, rows: int) -> None:
    model, whole = tiny_model(family), tiny_model(family)
    assert slice_mlps(model, rows) == 4
    widest = Widest(model)
    assert (logits(model) - logits(whole)).abs().max() < TOLERANCE
    ids = torch.randint(10, 300, (3, 20))
    with torch.no_grad():
        assert (model(ids).logits - whole(ids).logits).abs().max() < TOLERANCE
    assert widest.rows == min(rows, 60)


def test_the_plan_bounds_both(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_streamed(tmp_path, bounded(tmp_path, 12))
    widest = Widest(model)
    assert model.kvboost_plan.mlp_rows == 12
    assert (logits(model) - logits(tiny_model())).abs().max() < TOLERANCE
    assert widest.rows == 12
    assert load_streamed(tmp_path, budget_for(tmp_path, 1)).kvboost_plan.mlp_rows is None, "no workspace, no bound"


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("repair", ["fast", "balanced", Repair.boundary(4), Repair.deviation(0.2), Repair.full()])
def test_long_forwards_go_in_slices(repair: Any, paged: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    dense = KVBoost(tiny_model("qwen3"), tokenizer_of(tmp_path), store="memory", filler_tokens=48)
    kv = {"kv_vram": least_budget(dense)} if paged else {}
    budget = bounded(tmp_path, 30)
    if paged:
        budget = replace(budget, vram=budget.vram + least_budget(dense).nbytes)
    engine = streamed_engine(tmp_path, budget, **kv)
    limit = engine.model.kvboost_plan.forward_rows
    assert 10 < limit < 100
    for e in (engine, dense):
        e.warm(DOCS)
    with spy(engine) as rows:
        ours = engine.score(chat(), list(range(40, 190)), repair=repair, logits=True)
    theirs = dense.score(chat(), list(range(40, 190)), repair=repair, logits=True)
    assert ours.logits is not None
    assert theirs.logits is not None
    assert ours.logits.shape == theirs.logits.shape
    assert (ours.logits - theirs.logits).abs().max() < 5 * TOLERANCE
    assert ours.report.forwarded_tokens == theirs.report.forwarded_tokens
    assert rows.total == ours.report.forwarded_tokens + 149
    if repair == "fast" or (isinstance(repair, Repair) and not repair.blend):
        assert max(rows.calls) <= limit
    assert len(rows.calls) > 149 / limit


def tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def test_the_last_rows_logits_come_from_the_last_slices() -> None:
    model = tiny_model()
    engine = KVBoost(model, tiny_tokenizer(), store=None, reuse="off")
    expected, _ = reference(tiny_model(), list(range(10, 60)))
    engine.adapter.max_rows = 7
    for keep in (1, 2, 8, 49, 50, 0):
        cache = engine.adapter.new_cache(50)
        got = engine.adapter.forward(torch.arange(10, 60), torch.arange(50), cache, keep_logits=keep)
        assert got.shape[0] == (keep or 50)
        assert (got - expected[-keep:]).abs().max() < TOLERANCE


def test_a_32b_model_under_8_gib() -> None:
    """What docs/big-models.md says."""
    plan = make_plan(find_weights("qwen2.5-32b-awq"), Budget(vram=8 << 30))
    assert plan.mlp_rows == 1054
    assert plan.forward_rows == 2136


@pytest.mark.parametrize("packs", [False, True])
def test_a_warm_up_stays_inside_the_planned_rows(packs: bool, tmp_path: Path) -> None:
    """Chunks of ten tokens: several fit, not all of them; a chunk that is longer than that goes alone."""
    save_tiny(tmp_path)
    engine = streamed_engine(tmp_path, bounded(tmp_path, 30))
    limit = engine.model.kvboost_plan.forward_rows
    texts = [*(f"{i} the river and the city" for i in range(20)), DOCS[0] * 3]
    lengths = [len(engine.encoder().tokenize(text)) for text in texts]
    assert sum(lengths) > limit > 2 * max(lengths[:-1])
    assert lengths[-1] > limit
    engine.encoder()._context_kv("canonical")  # another forward, of its own bound
    with spy(engine) as rows:
        report = engine.warm(texts, packs=packs)
    assert (report.stored, report.failed) == (len(texts), 0)
    chunks = [n for n in rows.calls if n != lengths[-1]]
    assert max(chunks) <= limit
    assert len(chunks) < len(texts), "several share a forward"
