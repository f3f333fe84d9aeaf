"""Which kernel computes causal attention, why, and that one which is wrong is never used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost_rag.errors import UnknownOptionError, UsageError
from kvboost_rag.model import kernels
from kvboost_rag.model.kernels import choose_kernel
from tests.engine.helpers import DOCS, POLICIES, TOLERANCE, chat, make_engine, prepared, reference
from tests.tiny import tiny_model

CPU = torch.device("cpu")
SHAPE = ((4, 2), 16)


def bottom_right(query: Any, key: Any, value: Any, scaling: float) -> torch.Tensor:
    """What flash kernels do with fewer rows than keys."""
    return kernels._plain(query * (scaling * query.shape[3] ** 0.5), key, value).to(query.dtype)


def top_left(query: Any, key: Any, value: Any, scaling: float) -> torch.Tensor:
    """What they must not do."""
    rows = query.shape[2]
    return bottom_right(query, key[:, :, :rows], value[:, :, :rows], scaling)


def failing(*args: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


def missing(*args: Any) -> torch.Tensor:
    raise ImportError("No module named flash_attn")


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that flash kernels serve this device, and that these are they."""

    def pretend(**found: Any) -> None:
        monkeypatch.setattr(kernels, "_unfit", lambda *a: "")
        monkeypatch.setattr(kernels, "_KERNELS", {"flash-attn": missing, "varlen": missing, **found})

    return pretend


def test_a_cpu_says_sdpa_and_why() -> None:
    engine = make_engine()
    assert engine.stats()["attention"] == {"kernel": "sdpa", "reason": "no CUDA device"}
    assert make_engine(attn="sdpa").stats()["attention"] == {"kernel": "sdpa", "reason": "asked for"}


def test_wrong_names_and_what_does_not_work_here() -> None:
    with pytest.raises(UnknownOptionError, match="auto, flash-attn, varlen, sdpa"):
        make_engine(attn="flash_attention_2")
    for name in ("flash-attn", "varlen"):
        with pytest.raises(UsageError, match="no CUDA device"):
            make_engine(attn=name)


@pytest.mark.parametrize(
    ("found", "name", "reason"),
    [
        ({"flash-attn": bottom_right, "varlen": bottom_right}, "flash-attn", "agrees"),
        ({"varlen": bottom_right}, "varlen", "flash-attn: not installed; agrees"),
        ({"flash-attn": failing, "varlen": bottom_right}, "varlen", "no kernel image"),
        ({"flash-attn": top_left, "varlen": bottom_right}, "varlen", "flash-attn: its result is wrong"),
        ({"flash-attn": top_left, "varlen": failing}, "sdpa", "wrong; varlen: RuntimeError"),
        ({}, "sdpa", "flash-attn: not installed; varlen: not installed"),
    ],
)
def test_auto_takes_the_first_that_is_right(fit: Any, found: dict[str, Any], name: str, reason: str) -> None:
    fit(**found)
    chosen = choose_kernel("auto", CPU, torch.float32, *SHAPE)
    assert chosen.name == name
    assert reason in chosen.reason
    if name == "sdpa":
        with pytest.raises(UsageError, match="varlen"):
            choose_kernel("varlen", CPU, torch.float32, *SHAPE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_flash_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for capability, head_dim, expected in (
        ((7, 5), 64, "older than Ampere"),
        ((8, 0), 512, "wider than 256"),
        ((8, 0), 64, ""),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        found = kernels._unfit(device, dtype, head_dim)
        if dtype == torch.float32 and capability == (8, 0):
            assert "float32" in found
        else:
            assert (expected in found) if expected else found == ""


def test_a_flash_kernel_serves_prefill_and_suffixes_and_nothing_masked(fit: Any, family: str) -> None:
    calls: list[tuple[int, int]] = []

    def counting(query: Any, key: Any, value: Any, scaling: float) -> torch.Tensor:
        calls.append((query.shape[2], key.shape[2]))
        return bottom_right(query, key, value, scaling)

    fit(**{"flash-attn": counting})
    engine = make_engine(family)
    engine.warm(DOCS)
    calls.clear()
    prompt = chat()
    plain = engine.generate(prompt, reuse="off", max_new_tokens=2).report.prompt_tokens
    assert calls == [(plain, plain)] * 4
    calls.clear()
    assert engine.generate(prompt, reuse="prefix", max_new_tokens=2).report.prefix_tokens == 0
    longer = chat(question="\n\nAnd which lake was it, and who lived there?")
    report = engine.generate(longer, reuse="prefix", max_new_tokens=2).report
    assert report.prefix_tokens > 0
    assert calls[4:] == [(report.prompt_tokens - report.prefix_tokens, report.prompt_tokens)] * 4
    logits, _ = reference(tiny_model(family), prepared(engine, longer, reuse="prefix")[0].prompt.token_ids)
    assert (prepared(engine, longer, reuse="prefix")[0].logits[0] - logits[-1]).abs().max() < TOLERANCE
    engine.forget()
    calls.clear()
    prepared(engine, prompt, repair="fast")
    assert calls == [], "rows with gaps between them"


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_the_same_with_it(fit: Any, policy: str) -> None:
    fit(varlen=bottom_right)
    flash, sdpa = make_engine(), make_engine(attn="sdpa")
    for engine in (flash, sdpa):
        engine.warm(DOCS)
    assert flash.adapter.kernel.name == "varlen"
    a, b = (e.score(chat(), list(range(40, 60)), repair=POLICIES[policy], logits=True) for e in (flash, sdpa))
    assert a.logits is not None
    assert b.logits is not None
    assert (a.logits - b.logits).abs().max() < TOLERANCE
