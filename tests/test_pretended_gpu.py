"""The engine on a GPU that is not there (``pretend.py``): no operation mixes devices, answers are those of a CPU, and the
host waits for the device a number of times that does not grow with the model's depth."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.plan import KVBudget
from tests.awq.rtn import save_awq
from tests.engine.helpers import DOCS, chat
from tests.engine.slow_store import SlowStore
from tests.pretend import GPU, PretendTensor, Seen, move, pretend_gpu
from tests.streaming.helpers import CONTEXT, budget_for
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
ANSWER = [40, 50, 60]
OPTIONS: dict[str, Any] = {"store": "memory", "filler_tokens": 48, "prefix_bytes": 0, "on_low_fidelity": "ignore"}
POLICIES = ["fast", "balanced", "faithful", Repair.deviation(0.2), Repair.attention(0.3).with_shift(), Repair.full()]


def engine(
    family: str = "llama", *, on_gpu: bool = False, layers: int = 4, dtype: Any = None, **options: Any
) -> KVBoost:
    tokenizer = tiny_tokenizer()
    model: Any = tiny_model(family, vocab_size=len(tokenizer), num_hidden_layers=layers)
    model = model.to(dtype) if dtype else model
    made = KVBoost(move(model) if on_gpu else model, tokenizer, **{**OPTIONS, **options})
    assert made.adapter.spec.device == (GPU if on_gpu else torch.device("cpu"))
    assert made.warm(DOCS).stored == len(DOCS)
    return made


def logits(of: KVBoost, repair: Any, **options: Any) -> torch.Tensor:
    score = of.score(chat(), ANSWER, repair=repair, logits=True, **options)
    assert score.logits is not None
    assert options or score.report.hits == len(DOCS)
    return score.logits.cpu()


def waits(seen: Seen, of: KVBoost, repair: Any) -> Counter[str]:
    logits(of, repair)  # what is made once
    seen.waits.clear()
    logits(of, repair)
    return Counter(seen.waits)


# --- the pretended device itself ------------------------------------------------------------------------------------


def test_what_a_gpu_refuses_is_refused() -> None:
    with pretend_gpu():
        x = torch.randn(3, 4, device="cuda")
        assert isinstance(x, PretendTensor)
        for mixed in (
            lambda: x + torch.randn(3, 4),
            lambda: x @ torch.randn(4, 2),
            lambda: x.index_select(0, torch.tensor([1])),
            lambda: x.masked_fill(torch.zeros(3, 4, dtype=torch.bool), 0.0),
            lambda: torch.cat([x, torch.randn(1, 4)]),
            lambda: x.index_copy_(0, torch.tensor([1]), x[:1]),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()


def test_what_a_gpu_allows_is_allowed_and_waits_are_counted() -> None:
    with pretend_gpu() as seen:
        x = torch.arange(12.0).view(3, 4).to("cuda")
        assert (x + torch.tensor(1.0)).device == GPU
        assert x[torch.tensor([2, 0])].device == GPU, "indices may lie in host memory"
        x[:, :2] = 1
        x[1].copy_(torch.zeros(4))
        assert not seen.waits["copy to host"]
        assert x.cpu().tolist() == [[1, 1, 2, 3], [0, 0, 0, 0], [1, 1, 10, 11]]
        assert float(x[2, 3]) == 11
        assert (seen.waits["copy to host"], seen.waits["aten._local_scalar_dense.default"]) == (1, 1)
        assert seen.to_device == (12 + 4) * 4


# --- the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3", "yarn"])
def test_reuse_and_repair_are_those_of_a_cpu(family: str) -> None:
    plain = engine(family)
    with pretend_gpu() as seen:
        ours = engine(family, on_gpu=True)
        assert ours.adapter.encoded.packed_chunks == len(DOCS), "packed, as on any GPU"
        for repair in POLICIES:
            assert (logits(ours, repair) - logits(plain, repair)).abs().max() < 1e-4, repair
        assert (logits(ours, "fast", reuse="off") - logits(plain, "fast", reuse="off")).abs().max() < 1e-4
    assert seen.calls > 1000, "it was the pretended device that computed"


def test_half_precision() -> None:
    plain = engine(dtype=torch.bfloat16)
    with pretend_gpu():
        ours = engine(on_gpu=True, dtype=torch.bfloat16)
        for repair in (
            "fast",
            Repair.boundary(8).with_spread(),
            Repair.full(),
        ):  # which tokens are picked is rounding's
            exact = logits(plain, repair).float()
            assert (logits(ours, repair).float() - exact).abs().max() < 0.08 * exact.abs().max(), repair


@pytest.mark.parametrize("repair", ["fast", "faithful", Repair.deviation(0.2), Repair.attention(0.3).with_shift()])
def test_the_host_does_not_wait_layer_by_layer(repair: Any) -> None:
    with pretend_gpu() as seen:
        few, many = (waits(seen, engine(on_gpu=True, layers=n), repair) for n in (3, 5))
    assert few == many
    assert sum(many.values()) < 30


def test_answers_conversations_and_misses(tmp_path: Path) -> None:
    new = [*DOCS, "Ravens of the north tower count the ships that come in before noon."]
    prompts = [chat(), chat(docs=tuple(new)), chat(docs=tuple(reversed(new)), question="\n\nAnd which tower?")]
    texts = []
    with pretend_gpu():
        for on_gpu in (False, True):
            made = engine(on_gpu=on_gpu, store=tmp_path / str(on_gpu), memory_bytes=0, prefix_bytes=1 << 24)
            made.engine.eos_ids = frozenset()
            found = [made.generate(p, max_new_tokens=8).text for p in prompts]
            found.append(made.generate([*prompts[0], {"role": "assistant", "content": found[0]},
                                        {"role": "user", "content": "And then?"}], max_new_tokens=8).text)  # fmt: skip
            found.append(made.generate(prompts[0], max_new_tokens=8, temperature=0.8, top_p=0.9, seed=3).text)
            texts.append(found)
            assert made.verify([{"messages": prompts[0], "chunks": DOCS}], max_new_tokens=4, keep=False)
    assert texts[0] == texts[1]


def test_pages_that_spill() -> None:
    plain = engine()
    size = 8 * plain.adapter.spec.bytes_per_token
    with pretend_gpu():
        ours = engine(on_gpu=True, kv_vram=KVBudget(size * 14 + size // 2, page_tokens=8))
        for repair in ("balanced", Repair.attention(0.3).with_shift(), Repair.full()):
            assert (logits(ours, repair) - logits(plain, repair)).abs().max() < 1e-4, repair
        for made in (plain, ours):
            made.engine.eos_ids = frozenset()
        assert ours.generate(chat(), max_new_tokens=12).text == plain.generate(chat(), max_new_tokens=12).text
        found: Any = ours.stats()["paged"]
        assert found["spilled_pages"] > 0
        assert found["host_attended_tokens"] > 0
        del ours, made
        gc.collect()  # its memory is unlocked while there is a device


def test_blocks_that_come_in_while_the_forward_runs() -> None:
    plain = engine()
    with pretend_gpu():
        ours = engine(on_gpu=True, store=SlowStore())
        for repair in ("fast", "faithful"):
            assert (logits(ours, repair) - logits(plain, repair)).abs().max() < 1e-4, repair
        assert "wait" in ours.generate(chat(), max_new_tokens=1).report.stages


@pytest.mark.parametrize("refuses", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_blocks_in_memory_cross_while_the_forward_runs(refuses: int) -> None:
    """Into one buffer, and into pages on both sides; from page-locked memory, or ordinary where that is refused."""
    plain = engine()
    size = 8 * plain.adapter.spec.bytes_per_token
    for pages in (None, KVBudget(size * 40, page_tokens=8)):
        with pretend_gpu() as seen:
            seen.runtime.refuses = refuses
            ours = engine(on_gpu=True, kv_vram=pages)
            for repair in ("fast", "faithful", Repair.deviation(0.2)):
                assert (logits(ours, repair) - logits(plain, repair)).abs().max() < 1e-4, repair
            found: Any = ours.stats()["carrier"]
            assert found["bytes_carried"] > 0
            assert found["late_pieces"] == 0
            assert (found["page_locked_bytes"] > 0, found["pageable_bytes"] > 0) == (not refuses, bool(refuses))
            assert bool(seen.runtime.locked) == (not refuses)
            before = seen.to_device
            ours.score(chat(), ANSWER, repair="fast")
            after: Any = ours.stats()["carrier"]
            carried = after["bytes_carried"] - found["bytes_carried"]
            assert carried <= seen.to_device - before
            ours.close()
            del ours
            gc.collect()
            assert not seen.runtime.locked, "memory goes back unlocked"


@pytest.mark.parametrize(("family", "refuses"), [("llama", 0), pytest.param("qwen3", 1, marks=pytest.mark.slow)])
def test_packed_weights_streamed_into_pages_with_reuse(family: str, refuses: int, tmp_path: Path) -> None:
    """With the backend for real devices; ``refuses``: page-locking does not work here."""
    save_awq(tmp_path, family, num_hidden_layers=6)
    options = {**OPTIONS, "dtype": "float32"}
    plain = KVBoost.from_pretrained(tmp_path, device="cpu", **options)
    plain.warm(DOCS)
    size = 8 * plain.adapter.spec.bytes_per_token
    pages = KVBudget(size * 16 + size // 2, page_tokens=8)
    with pretend_gpu() as seen:
        seen.runtime.refuses = refuses
        budget = budget_for(tmp_path, 2)  # with KV of CONTEXT tokens, in place of which come the pages
        vram = budget.vram - (CONTEXT - 1) * plain.adapter.spec.bytes_per_token + pages.nbytes
        budget = replace(budget, vram=vram, context=CONTEXT - 1, held_tokens=1)
        ours = KVBoost.from_pretrained(tmp_path, device="cuda", vram=budget, kv_vram=pages, **options)
        assert len(ours.model.kvboost_plan.streamed) == 4
        assert bool(seen.runtime.locked) == (not refuses)
        ours.warm(DOCS)
        for repair in ("fast", "balanced", Repair.full()):
            assert (logits(ours, repair) - logits(plain, repair)).abs().max() < 1e-3, repair
        found: Any = ours.stats()
        assert found["streaming"]["pinned"] == ("pageable" if refuses else "whole")
        assert found["streaming"]["bytes_copied"] > 0
        assert found["paged"]["spilled_pages"] + found["paged"]["placed_pages"] > 0
        del ours
        gc.collect()
        assert not seen.runtime.locked, "memory goes back unlocked"


@pytest.mark.slow
def test_the_tests_for_a_device_pass_on_the_pretended_one() -> None:
    """But for those of kernels that are not here."""
    files = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("tests/**/test_gpu.py"))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.pretend_plugin", "-p", "no:cacheprovider", "-m", "gpu",
         "-k", "not long_decode and not kernels_equal and not page_locked_until", *files],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert "passed" in run.stdout.splitlines()[-1]
