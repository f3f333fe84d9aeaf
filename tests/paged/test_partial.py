"""Parts of an attention, merged, are the attention."""

from __future__ import annotations

import pytest
import torch

from kvboost_rag.model.paged import partial
from kvboost_rag.model.paged.partial import Merge, attend_part

HEADS, GROUPS, ROWS, DIM = 2, 3, 7, 16


def tensors(keys: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    q = torch.randn(HEADS, GROUPS, ROWS, DIM) * scale
    return q.to(dtype), torch.randn(HEADS, keys, DIM).to(dtype), torch.randn(HEADS, keys, DIM).to(dtype)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    scores = q.double() @ k.double().transpose(1, 2).unsqueeze(1) * 0.3
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v.double().unsqueeze(1)).float()


def merged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int], hidden: torch.Tensor | None = None
) -> Merge:
    merge = Merge(HEADS, GROUPS, ROWS, DIM, q.device)
    for a, b in zip([0, *cuts], [*cuts, k.shape[1]], strict=True):
        merge.add(attend_part(q, k[:, a:b], v[:, a:b], 0.3, None if hidden is None else hidden[:, a:b]))
    return merge


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("cuts", [[], [1], [20], [1, 2, 3], [13, 26, 39]])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["flat", "peaked"])
def test_parts_make_the_whole(fused: bool, cuts: list[int], scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "_fused_is_right", lambda *a: fused)
    q, k, v = tensors(40, scale=scale)
    assert torch.allclose(merged(q, k, v, cuts).out, plain(q, k, v), atol=1e-5)
    lse = (q @ k.transpose(1, 2).unsqueeze(1) * 0.3).logsumexp(-1)
    assert torch.allclose(merged(q, k, v, cuts).lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_rows_that_see_nothing_of_a_part(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "_fused_is_right", lambda *a: fused)
    q, k, v = tensors(30)
    hidden = torch.rand(ROWS, 30) < 0.4
    hidden[2, :10] = hidden[3, 10:] = hidden[4, 5:25] = True
    hidden[:, 0] &= torch.arange(ROWS) != 4
    hidden[3, 4] = hidden[2, 20] = False
    out = merged(q, k, v, [10, 20], hidden).out
    assert torch.allclose(out, plain(q, k, v, hidden), atol=1e-5)
    hidden[5] = True
    nothing = merged(q, k, v, [10, 20], hidden)
    assert not nothing.out.isnan().any()
    assert (nothing.out[:, :, 5] == 0).all()
    assert (nothing.lse[..., 5] == float("-inf")).all()


def test_rows_from_the_middle_on() -> None:
    q, k, v = tensors(30)
    merge = Merge(HEADS, GROUPS, ROWS, DIM, q.device)
    merge.add(attend_part(q, k[:, :20], v[:, :20], 0.3))
    merge.add(attend_part(q[:, :, 3:], k[:, 20:], v[:, 20:], 0.3), 3)
    assert torch.allclose(merge.out[:, :, 3:], plain(q, k, v)[:, :, 3:], atol=1e-5)
    assert torch.allclose(merge.out[:, :, :3], plain(q, k[:, :20], v[:, :20])[:, :, :3], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merging_adds_no_error_to_half_precision(dtype: torch.dtype) -> None:
    q, k, v = tensors(400, dtype)
    exact = plain(q, k, v)
    whole = (attend_part(q, k, v, 0.3)[0] - exact).abs().max()
    parts = (merged(q, k, v, [100, 200, 300]).out - exact).abs().max()
    assert parts <= 2 * whole + 1e-6


def test_a_kernel_that_changed_its_mind_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's functions behind this are private: what they give is checked before it is trusted."""
    q, k, v = tensors(40)
    right = partial._fused
    for broken in (
        lambda *a: (right(*a)[0], right(*a)[1] * 1.44),  # log to the base of two
        lambda *a: (right(*a)[0] * 2, right(*a)[1]),
    ):
        partial._fused_is_right.cache_clear()
        monkeypatch.setattr(partial, "_fused", broken)
        assert torch.allclose(attend_part(q, k, v, 0.3)[0], plain(q, k, v), atol=1e-5)
        assert not partial._fused_is_right(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(partial, "_fused", lambda *a: (_ for _ in ()).throw(RuntimeError("gone")))
    partial._fused_is_right.cache_clear()
    assert torch.allclose(attend_part(q, k, v, 0.3)[0], plain(q, k, v), atol=1e-5)
    partial._fused_is_right.cache_clear()


@pytest.mark.parametrize("kind", ["open", "masked", "causal"])
def test_the_device_kernel_is_called_as_it_wants(kind: str) -> None:
    """On the meta device torch checks the call and gives the shapes."""
    rows = keys = 37
    query = torch.empty(2, 3, rows, 64, device="meta", dtype=torch.float16)
    key = torch.empty(2, keys, 64, device="meta", dtype=torch.float16)
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device="meta") if kind == "masked" else None
    out, lse = partial._fused(query, key, key, 0.1, hidden, kind == "causal")
    assert (out.shape, lse.shape) == ((2, 3, rows, 64), (2, 3, rows))
    mask = partial._additive(torch.rand(5, 37) < 0.5, torch.float16)
    assert mask.stride(2) % partial.ALIGNED == 0
    assert mask.shape == (1, 1, 5, 37)


@pytest.mark.parametrize("kind", ["open", "masked", "causal"])
def test_every_kind_is_fused_here(kind: str) -> None:
    partial._fused_is_right.cache_clear()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert partial._fused_is_right(torch.device("cpu"), dtype, kind)
