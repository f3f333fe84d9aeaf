"""The AWQ ``gemm`` packing: eight 4-bit values of neighbouring *output* columns in one int32.

Nibble ``i`` (bits ``4i..4i+3``) of word ``c`` holds column ``8c + ORDER[i]``. With ``K`` inputs, ``N`` outputs and
groups of ``g`` inputs: ``qweight [K, N/8]``, ``qzeros [K/g, N/8]`` (both int32), ``scales [K/g, N]`` and

    W[k, n] = (q[k, n] - z[k // g, n]) * s[k // g, n]          y = x @ W

Zeros are stored as they are (no "+1" as in GPTQ files).
"""

from __future__ import annotations

import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PACK = 8  # values in a word
# Shift of column j within its word: 4 × (the nibble that holds it).
SHIFTS = tuple(4 * ORDER.index(column) for column in range(PACK))


def pack(values: torch.Tensor) -> torch.Tensor:
    """Integers 0 to 15 ``[R, N]`` (N divisible by 8) → int32 words ``[R, N/8]``."""
    grouped = values.to(torch.int64).reshape(values.shape[0], -1, PACK)
    shifts = torch.tensor(SHIFTS, dtype=torch.int64, device=values.device)
    words = (grouped << shifts).sum(-1)  # up to 2**32: the sign bit is wrapped below
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 words ``[R, C]`` → int32 values 0 to 15 ``[R, 8C]``."""
    shifts = torch.tensor(SHIFTS, dtype=torch.int32, device=words.device)
    # The shift of a negative word is arithmetic; the mask removes what it drags in.
    return ((words.unsqueeze(-1) >> shifts) & 0xF).reshape(words.shape[0], -1)


def dequantize(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``[K, N]`` in ``dtype`` (default: that of ``scales``). The group size follows from the shapes.

    Multiplies in fp32 and rounds once, which is the correctly rounded product in any dtype.
    """
    groups, columns = scales.shape
    values = unpack(qweight).reshape(groups, -1, columns)
    values -= unpack(qzeros).unsqueeze(1)
    weight = values.to(torch.float32).mul_(scales.to(torch.float32).unsqueeze(1))
    return weight.reshape(-1, columns).to(dtype or scales.dtype)
