"""The same laws on a real device. Not run by the tests' usual machine: `make gpu-check`."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.errors import UsageError
from kvboost_rag.model.awq import linear
from kvboost_rag.model.awq.linear import matmul, matmul_torch
from kvboost_rag.model.load import load_model
from tests.awq.rtn import quantize, save_awq
from tests.engine.helpers import DOCS, chat
from tests.streaming.helpers import CONTEXT, IDS, budget_for
from tests.tiny import save_tiny

pytestmark = pytest.mark.gpu


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Largest difference, relative to the largest value."""
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 65, 300])
def test_kernels_equal_the_torch_path(rows: int, group: int, dtype: torch.dtype) -> None:
    if importlib.util.find_spec("triton") is not None:
        assert linear._kernel(torch.device("cuda", 0)) is not None, "it is not the torch path that is compared"
    packed = [t.cuda() for t in quantize(torch.randn(1000, 1024), group)]
    x = torch.randn(rows, 1024, device="cuda", dtype=dtype)
    exact = matmul_torch(x.float(), *packed)
    assert close(matmul(x, *packed), exact, 2e-3 if dtype == torch.float16 else 1.5e-2)
    assert torch.equal(matmul(x, *packed), matmul(x, *packed))


@pytest.mark.parametrize("kind", ["plain", "awq"])
def test_streamed_equals_resident(kind: str, tmp_path: Path) -> None:
    if kind == "awq":
        save_awq(tmp_path, "qwen2", num_hidden_layers=8)
    else:
        save_tiny(tmp_path, "qwen2", num_hidden_layers=8)
    ids = IDS.cuda()
    resident = load_model(tmp_path, device="cuda", dtype="float32").model
    model = load_model(tmp_path, device="cuda", dtype="float32", vram=budget_for(tmp_path, 2)).model
    with torch.inference_mode():
        for _ in range(20):
            assert torch.equal(model(ids).logits, resident(ids).logits)
    torch.cuda.synchronize()
    stats = model.kvboost_streamer.stats
    assert stats.pinned != "pageable"
    assert (stats.layers_run, stats.late_fetches) == (20 * stats.streamed_layers, 0)
    assert stats.bytes_copied > 0
    assert stats.copy_s > 0


def test_reuse_and_repair_over_streamed_weights(tmp_path: Path) -> None:
    save_awq(tmp_path, "qwen3", num_hidden_layers=8)
    options = {"device": "cuda", "dtype": "float32", "store": "memory", "filler_tokens": 48}
    # What chunks are computed after takes one token of the tiny budget.
    budget = replace(budget_for(tmp_path, 2), context=CONTEXT - 1, held_tokens=1)
    streamed = KVBoost.from_pretrained(tmp_path, vram=budget, **options)
    resident = KVBoost.from_pretrained(tmp_path, **options)
    for engine in (streamed, resident):
        engine.warm(DOCS)
    for repair in ("fast", "balanced", "faithful", Repair.deviation(0.2), Repair.full()):
        ours, theirs = (e.score(chat(), [40, 50, 60], repair=repair, logits=True) for e in (streamed, resident))
        assert ours.logits is not None
        assert theirs.logits is not None
        assert close(ours.logits, theirs.logits, 1e-4)
        assert ours.report.hits == theirs.report.hits == len(DOCS)
        assert ours.report.reused_tokens == theirs.report.reused_tokens
    assert streamed.stats()["streaming"]["bytes_copied"] > 0  # type: ignore[index]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("attn", ["auto", "flash-attn", "varlen"])
def test_flash_kernels_give_what_sdpa_gives(attn: str, dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", head_dim=64)
    options = {"device": "cuda", "dtype": dtype, "store": "memory", "filler_tokens": 48}
    try:
        flash = KVBoost.from_pretrained(tmp_path, attn=attn, **options)
    except UsageError as e:
        pytest.skip(str(e))
    print(flash.stats()["attention"])
    sdpa = KVBoost.from_pretrained(tmp_path, attn="sdpa", **options)
    for prompt in (chat(), chat(question="\n\nAnd which lake?")):  # the second continues a held prefix
        ours, theirs = (e.score(prompt, list(range(40, 60)), reuse="prefix", logits=True) for e in (flash, sdpa))
        assert ours.logits is not None
        assert theirs.logits is not None
        assert close(ours.logits, theirs.logits, 5e-2)
        for engine in (flash, sdpa):
            engine.generate(prompt, reuse="prefix", max_new_tokens=2)
