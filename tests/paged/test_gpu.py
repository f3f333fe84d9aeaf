"""Paged KV on a real device. Not run by the tests' usual machine: `make gpu-check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.model.load import load_model
from kvboost_rag.model.paged import partial
from kvboost_rag.model.paged.partial import attend_part
from kvboost_rag.plan import KVBudget
from tests.awq.rtn import save_awq
from tests.engine.helpers import DOCS, chat
from tests.paged.helpers import PAGE, least_budget, stats
from tests.streaming.helpers import budget_for
from tests.tiny import save_tiny

pytestmark = pytest.mark.gpu

REPAIRS: dict[str, Any] = {
    "fast": "fast", "balanced": "balanced", "faithful": "faithful", "deviation": Repair.deviation(0.2),
    "shifted": Repair.boundary(4).with_shift(), "full": Repair.full(),
}  # fmt: skip


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Largest difference, relative to the largest value."""
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_fused_kernel_is_used_and_right(dtype: torch.dtype) -> None:
    assert partial._fused_is_right(torch.device("cuda"), dtype)
    query = torch.randn(4, 3, 5, 64, device="cuda", dtype=dtype)
    pool = torch.randn(2, 4, 999, 64, device="cuda", dtype=dtype)
    key, value = pool[:, :, 100:900]  # a run of slots in the middle
    out, lse = attend_part(query, key, value, 0.125)
    exact, exact_lse = partial._eager(query.float(), key.float(), value.float(), 0.125, None)
    assert close(out, exact, 1e-4 if dtype == torch.float32 else 1e-2)
    assert close(lse, exact_lse, 1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "keys"), [(128, 1000), (128, 64), (17, 999), (1, 65)])
def test_the_fused_masked_kernel_is_used_and_right(rows: int, keys: int, dtype: torch.dtype) -> None:
    """The repair mask over pages: rows at chosen positions, some that see nothing of this part."""
    assert partial._fused_is_right(torch.device("cuda"), dtype, "masked")
    query = torch.randn(4, 3, rows, 128, device="cuda", dtype=dtype)
    key, value = torch.randn(2, 4, keys, 128, device="cuda", dtype=dtype)
    positions = torch.linspace(-keys // 4, keys * 2, rows, device="cuda").long()
    hidden = torch.arange(keys, device="cuda")[None] > positions[:, None]
    out, lse = attend_part(query, key, value, 0.1, hidden)
    exact, exact_lse = partial._eager(query.float(), key.float(), value.float(), 0.1, hidden)
    seen = ~hidden.all(-1)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert (out[:, :, ~seen] == 0).all()
    if seen.any():
        assert close(out[:, :, seen], exact[:, :, seen], tolerance)
        assert close(lse[:, :, seen], exact_lse[:, :, seen], tolerance)


@pytest.mark.parametrize("family", ["llama", "mqa", "phi3"])
def test_generation_equals_an_unlimited_cache(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "store": "memory", "filler_tokens": 48}
    unlimited = KVBoost.from_pretrained(tmp_path, **options)
    paged = KVBoost.from_pretrained(tmp_path, kv_vram=least_budget(unlimited), **options)
    for engine in (paged, unlimited):
        engine.engine.eos_ids = frozenset()
        engine.warm(DOCS)
    for name, repair in REPAIRS.items():
        for engine in (paged, unlimited):
            engine.forget()
        ours, theirs = (e.generate(chat(), repair=repair, max_new_tokens=40) for e in (paged, unlimited))
        assert ours.token_ids == theirs.token_ids, name
        assert ours.report.spilled_pages > 0
        assert ours.report.host_attended_tokens > 0
        ours, theirs = (e.score(chat(), list(range(40, 90)), repair=repair, logits=True) for e in (paged, unlimited))
        assert close(ours.logits, theirs.logits, 1e-4), name
    assert stats(paged)["pinned"] != "pageable"
    assert stats(paged)["bytes_in"] > 0


def test_everything_at_once(tmp_path: Path) -> None:
    save_awq(tmp_path, "qwen3", num_hidden_layers=8)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "store": "memory", "filler_tokens": 48}
    resident = KVBoost.from_pretrained(tmp_path, **options)
    kv = KVBudget(least_budget(resident).nbytes * 2, PAGE)
    budget = replace(budget_for(tmp_path, 2), context=1, held_tokens=1)
    budget = replace(budget, vram=budget.vram + kv.nbytes)
    streamed = KVBoost.from_pretrained(tmp_path, vram=budget, kv_vram=kv, **options)
    for engine in (streamed, resident):
        engine.warm(DOCS)
    for repair in REPAIRS.values():
        ours, theirs = (e.score(chat(), [40, 50, 60], repair=repair, logits=True) for e in (streamed, resident))
        assert close(ours.logits, theirs.logits, 1e-4)
        assert ours.report.host_tokens > 0
    assert streamed.stats()["streaming"]["bytes_copied"] > 0  # type: ignore[index]


def test_a_long_decode_spills_again_and_again(tmp_path: Path) -> None:
    """Thousands of one-row forwards without a synchronisation of ours in between that could hide a race."""
    save_tiny(tmp_path)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
    loaded = load_model(tmp_path, **options)
    unlimited = KVBoost(loaded.model, loaded.tokenizer, store=None, reuse="off")
    paged = KVBoost(loaded.model, loaded.tokenizer, store=None, reuse="off", kv_vram=least_budget(unlimited))
    for engine in (paged, unlimited):
        engine.engine.eos_ids = frozenset()
    ours, theirs = (e.generate("The river", max_new_tokens=2000) for e in (paged, unlimited))
    # A tie may fall the other way late, and all that follows differs; garbage would show at once.
    assert ours.token_ids[:300] == theirs.token_ids[:300]
    assert ours.report.spilled_pages > 200
