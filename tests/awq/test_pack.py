"""The packing, against words written out by hand: a mistake made in both directions alike would show here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.errors import CheckpointError
from kvboost_rag.model.awq.linear import AwqLinear, matmul
from kvboost_rag.model.awq.pack import dequantize, pack, unpack
from tests.awq.rtn import quantize


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def test_golden_words() -> None:
    # Columns 0..7 hold 0..7. From the lowest nibble up, a word holds columns 0, 2, 4, 6, 1, 3, 5, 7.
    assert unpack(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert pack(torch.arange(8)[None]).tolist() == [[0x75316420]]
    # Columns 8..15: the highest nibble is 15, the word is negative.
    assert pack(torch.arange(8, 16)[None]).tolist() == [[signed(0xFDB9ECA8)]]
    assert unpack(torch.tensor([[signed(0xFDB9ECA8)]], dtype=torch.int32)).tolist() == [list(range(8, 16))]


def test_golden_weight() -> None:
    """Two inputs, one group, zeros 1: column j of row 0 is (j - 1) / 2, of row 1 (j + 8 - 1) / 2."""
    words = torch.tensor([[0x75316420], [signed(0xFDB9ECA8)]], dtype=torch.int32)
    zeros = torch.tensor([[0x11111111]], dtype=torch.int32)
    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    expected = (torch.arange(16).reshape(2, 8) - 1) / 2
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(dequantize(words, zeros, scales, dtype), expected.to(dtype))
    assert dequantize(words, zeros, scales).dtype == torch.float16


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_unpack_undoes_pack(rows: int, words: int, random: object) -> None:
    values = torch.tensor([[random.randrange(16) for _ in range(8 * words)] for _ in range(rows)])  # type: ignore[attr-defined]
    packed = pack(values)
    assert packed.shape == (rows, words)
    assert packed.dtype == torch.int32
    assert torch.equal(unpack(packed).long(), values)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matmul_is_the_dense_product(group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_rag.model.awq.linear.SCRATCH", 3 * 8 * 256)  # several blocks, the last one short
    qweight, qzeros, scales = quantize(torch.randn(64, 256), group)
    x = torch.randn(5, 256, dtype=dtype)
    weight = dequantize(qweight, qzeros, scales, dtype)
    assert torch.allclose(matmul(x, qweight, qzeros, scales), x @ weight, atol=1e-4 if dtype == torch.float32 else 0.2)


def test_layer_with_bias_and_leading_dimensions() -> None:
    layer = AwqLinear(64, 16, 32, bias=True, dtype=torch.float32)
    layer.qweight, layer.qzeros, layer.scales = quantize(torch.randn(16, 64), 32)
    assert layer.bias is not None
    layer.bias.data = torch.randn(16)
    x = torch.randn(2, 3, 64)
    expected = torch.nn.functional.linear(x, layer.dense(torch.float32), layer.bias)
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 16), (64, 12)])
def test_dimensions_that_cannot_be_packed(inputs: int, outputs: int) -> None:
    with pytest.raises(CheckpointError, match="cannot be AWQ-packed"):
        AwqLinear(inputs, outputs, 32, name="mlp.up_proj")
