"""Everything at once: packed weights streamed through slots, KV in pages that spill, chunk reuse, repair, held turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag import KVBoost, Repair
from kvboost_rag.errors import BlockFormatError, CapacityError
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.plan import Budget, KVBudget
from tests.awq.rtn import save_awq
from tests.engine.helpers import DOCS, TOLERANCE, chat
from tests.engine.slow_store import SlowStore
from tests.paged.helpers import PAGE, least_budget, stats
from tests.streaming.helpers import budget_for

REPAIRS: dict[str, Any] = {
    "fast": "fast",
    "balanced": "balanced",
    "faithful": "faithful",
    "mixed": Repair.boundary(2) | Repair.attention(0.1) | Repair.deviation(0.1),
    "full": Repair.full(),
}


def everything(path: Path, kv: KVBudget, backend: VirtualBackend, **options: Any) -> KVBoost:
    budget = replace(budget_for(path, 1), context=1, held_tokens=1)
    budget = replace(budget, vram=budget.vram + kv.nbytes)
    return KVBoost.from_pretrained(
        path,
        device="cpu",
        vram=budget,
        kv_vram=kv,
        backend=backend,
        **{"store": "memory", "filler_tokens": 48, **options},
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_streaming_paging_reuse_and_repair_at_once(family: str, tmp_path: Path) -> None:
    oracle = save_awq(tmp_path, family, num_hidden_layers=6)
    dense = KVBoost(oracle, tokenizer_of(tmp_path), store="memory", filler_tokens=48)
    backend = VirtualBackend(order="random")
    engine = everything(tmp_path, least_budget(dense), backend)
    for e in (engine, dense):
        e.engine.eos_ids = frozenset()
        e.warm(DOCS, packs=e is engine)
    assert engine.adapter.encoded.packed_chunks == len(DOCS)
    for name, repair in REPAIRS.items():
        ours, theirs = (e.score(chat(), [40, 50, 60], repair=repair, logits=True) for e in (engine, dense))
        assert ours.logits is not None
        assert theirs.logits is not None
        assert (ours.logits - theirs.logits).abs().max() < 5 * TOLERANCE, name  # tens of parts, six layers
        assert ours.report.reused_tokens == theirs.report.reused_tokens
    turns = [chat(), chat(question="\n\nAnd who? " + "Say more. " * 20)]
    for prompt in turns:
        ours, theirs = (e.generate(prompt, max_new_tokens=20) for e in (engine, dense))
        assert ours.token_ids == theirs.token_ids
        assert ours.report.hits == 4
        assert ours.report.host_tokens > 0
        assert ours.report.prefix_tokens == theirs.report.prefix_tokens
    streaming = engine.stats()["streaming"]
    assert isinstance(streaming, dict)
    assert streaming["bytes_copied"] > 0
    assert stats(engine)["spilled_pages"] > 0
    assert stats(engine)["bytes_in"] > 0
    assert engine.model.kvboost_plan.kv_bytes > stats(engine)["device_bytes"]
    plan = engine.model.kvboost_plan
    on_device = plan.resident_bytes + plan.slots * plan.slot_bytes + stats(engine)["device_bytes"]
    assert backend.allocated == on_device <= plan.budget.vram, "two pages hold no chunk: nothing is carried"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_and_blocks_that_come_in_while_the_forward_runs(family: str, tmp_path: Path) -> None:
    """Into pages on both sides of the bus, before streamed layers; then with one block that is lost on its way."""
    oracle = save_awq(tmp_path, family, num_hidden_layers=6)
    lost: set[str] = set()

    def before(key: str, layer: int) -> None:
        if key in lost and layer == 4:
            store.delete(key)
            raise BlockFormatError("torn")

    options: dict[str, Any] = {"filler_tokens": 48, "prefix_bytes": 0, "on_low_fidelity": "ignore"}
    dense = KVBoost(oracle, tokenizer_of(tmp_path), store="memory", **options)
    store = SlowStore(before)
    engine = everything(tmp_path, least_budget(dense), VirtualBackend(order="random"), store=store, **options)
    for name, repair in REPAIRS.items():
        for lose in (False, True):
            engine.warm(DOCS, packs=True)
            dense.warm(DOCS)
            ours_key, key = (e.encoder().key(e.encoder().tokenize(DOCS[1])) for e in (engine, dense))
            if lose:
                lost.add(ours_key)
                dense.store.delete(key)
            ours, theirs = (e.score(chat(), [40, 50, 60], repair=repair, logits=True) for e in (engine, dense))
            lost.clear()
            assert "wait" in ours.report.stages
            assert ours.report.hits == theirs.report.hits == 4 - lose
            assert ours.report.host_tokens > 0
            assert ours.logits is not None
            assert theirs.logits is not None
            assert (ours.logits - theirs.logits).abs().max() < 5 * TOLERANCE, (name, lose)


def tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def test_pages_are_part_of_the_plan(tmp_path: Path) -> None:
    save_awq(tmp_path)
    budget = Budget(vram=1 << 21, context=1, reserve=0, workspace=0)
    with pytest.raises(CapacityError, match="at least"):
        KVBoost.from_pretrained(
            tmp_path, device="cpu", vram=budget, kv_vram=1 << 21, backend=VirtualBackend(), store="memory"
        )


def test_blocks_larger_than_the_pool_are_laid_straight_into_host_pages(tmp_path: Path) -> None:
    """A chunk that the device could never hold: no page of it passes through the device."""
    save_awq(tmp_path)
    probe = KVBoost.from_pretrained(tmp_path, device="cpu", store="memory", filler_tokens=48)
    engine = KVBoost.from_pretrained(
        tmp_path, device="cpu", store="memory", filler_tokens=48, kv_vram=least_budget(probe)
    )
    engine.warm([DOCS[0] * 8])
    result = engine.generate(chat([DOCS[0] * 8]), repair="fast", max_new_tokens=1)
    assert result.report.hits == 1
    assert stats(engine)["spilled_pages"] == 0
    assert stats(engine)["placed_pages"] * PAGE >= result.report.host_tokens > len(DOCS[0])
