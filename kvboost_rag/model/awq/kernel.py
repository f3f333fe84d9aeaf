"""AWQ matrix products in Triton (CUDA, ROCm). Imported only where triton is there.

Few rows: unpack and multiply in one kernel, fp32 accumulators, the inputs split over several programs whose partial
sums are added in a fixed order (no atomics: the same input gives the same output). Many rows: dequantise blocks of
columns to scratch memory and let the vendor's matrix product do the rest.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (what triton compiles is a language of its own)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvboost_rag.model.awq.pack import PACK, SHIFTS

FUSED_ROWS = 64  # up to here the fused kernel; above, dequantised weights are read often enough to pay
SCRATCH = 1 << 25  # weights dequantised at a time (64 MiB in half precision)
# SHIFTS as one word, four bits each (in units of four bits), so that the kernel needs no table in memory.
SHIFT_WORD = sum((shift // 4) << (4 * column) for column, shift in enumerate(SHIFTS))


@triton.jit
def _tile(
    qw, qz, sc, k, n, inputs, columns, words, group,
    SHIFT_WORD: tl.constexpr,
):  # fmt: skip
    """Dequantised weights ``[len(k), len(n)]`` in fp32."""
    inside = (k[:, None] < inputs) & (n[None, :] < columns)
    shift = 4 * ((SHIFT_WORD >> (4 * (n % 8))) & 0xF)
    row = k // group
    word = tl.load(qw + k[:, None] * words + (n // 8)[None, :], mask=inside, other=0)
    zero = tl.load(qz + row[:, None] * words + (n // 8)[None, :], mask=inside, other=0)
    scale = tl.load(sc + row[:, None] * columns + n[None, :], mask=inside, other=0.0)
    value = ((word >> shift[None, :]) & 0xF) - ((zero >> shift[None, :]) & 0xF)
    return value.to(tl.float32) * scale.to(tl.float32)


@triton.jit
def _fused(
    x, qw, qz, sc, out, rows, inputs, columns, words, group, span,
    SHIFT_WORD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``out[part, m, n]``: the partial product over inputs ``part * span ..``."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    first = part * span
    for offset in range(0, span, BK):
        k = first + offset + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * inputs + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < inputs), other=0.0)
        w = _tile(qw, qz, sc, k, n, inputs, columns, words, group, SHIFT_WORD)
        total += tl.dot(a, w.to(a.dtype))
    where = out + (part * rows + m[:, None]) * columns + n[None, :]
    tl.store(where, total, mask=(m[:, None] < rows) & (n[None, :] < columns))


@triton.jit
def _dequantize(
    qw, qz, sc, out, inputs, columns, words, group, first, width,
    SHIFT_WORD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Columns ``first .. first + width`` of the weight to ``out [inputs, width]``."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    w = _tile(qw, qz, sc, k, first + n, inputs, columns, words, group, SHIFT_WORD)
    mask = (k[:, None] < inputs) & (n[None, :] < width)
    tl.store(out + k[:, None] * width + n[None, :], w.to(out.dtype.element_ty), mask=mask)


def matmul(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``x [M, K]`` times the packed weight: ``[M, N]`` in the dtype of ``x``."""
    x = x.contiguous()
    return (fused if x.shape[0] <= FUSED_ROWS else dequantized)(x, qweight, qzeros, scales)


def fused(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Unpack and multiply in one kernel."""
    (rows, inputs), (groups, columns) = x.shape, scales.shape
    bm, bn, bk = 16, 64, 64
    tiles = triton.cdiv(columns, bn) * triton.cdiv(rows, bm)
    # Enough programs to fill a large card, in multiples of BK so that parts do not overlap.
    parts = max(1, min(16, 512 // tiles, inputs // (4 * bk)))
    span = triton.cdiv(triton.cdiv(inputs, parts), bk) * bk
    parts = triton.cdiv(inputs, span)
    out = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(columns, bn), parts, triton.cdiv(rows, bm))
    _fused[grid](
        x, qweight, qzeros, scales, out, rows, inputs, columns, columns // PACK, inputs // groups, span,
        SHIFT_WORD=SHIFT_WORD, BM=bm, BN=bn, BK=bk,
    )  # fmt: skip
    return (out[0] if parts == 1 else out.sum(0)).to(x.dtype)


def dequantized(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise to scratch, then multiply."""
    inputs, (groups, columns) = x.shape[1], scales.shape
    out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
    step = max(PACK, SCRATCH // inputs // PACK * PACK)
    bn, bk = 64, 32
    for first in range(0, columns, step):
        width = min(step, columns - first)
        scratch = torch.empty(inputs, width, dtype=x.dtype, device=x.device)
        _dequantize[(triton.cdiv(inputs, bk), triton.cdiv(width, bn))](
            qweight, qzeros, scales, scratch, inputs, columns, columns // PACK, inputs // groups, first, width,
            SHIFT_WORD=SHIFT_WORD, BN=bn, BK=bk,
        )  # fmt: skip
        out[:, first : first + width] = x @ scratch
    return out
