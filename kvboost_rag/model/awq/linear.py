"""A linear layer over packed AWQ weights."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from kvboost_rag.errors import CheckpointError
from kvboost_rag.model.awq import installed
from kvboost_rag.model.awq.pack import PACK, dequantize

logger = logging.getLogger(__name__)

SCRATCH = 1 << 22  # weights dequantised at a time by the torch path (16 MiB in fp32)


class AwqLinear(nn.Module):
    """``y = x @ dequantize(...) + bias`` for ``x [..., in_features]``; works in the dtype of ``x``.

    Buffers (as in AWQ checkpoints): ``qweight [in, out/8]`` and ``qzeros [in/g, out/8]`` int32, ``scales [in/g, out]``.
    They are no parameters, so that the model's dtype stays that of its dense weights. ``bias [out]`` is a parameter.

    Raises:
        CheckpointError: ``in_features`` is not a multiple of the group size, or ``out_features`` not one of 8.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group_size: int,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float16,
        scale_dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        group = in_features if group_size == -1 else group_size
        if in_features % group or out_features % PACK:
            raise CheckpointError(
                f"{name or 'a layer'} of {in_features} × {out_features} cannot be AWQ-packed in groups of {group}",
                hint=f"inputs must divide by the group size, outputs by {PACK}: is group_size of config.json right?",
            )
        self.in_features, self.out_features, self.group_size = in_features, out_features, group
        words, groups = out_features // PACK, in_features // group
        self.register_buffer("qweight", torch.empty(in_features, words, dtype=torch.int32, device=device))
        self.register_buffer("qzeros", torch.empty(groups, words, dtype=torch.int32, device=device))
        self.register_buffer("scales", torch.empty(groups, out_features, dtype=scale_dtype, device=device))
        empty = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.bias = nn.Parameter(empty, requires_grad=False) if empty is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = matmul(rows, self.qweight, self.qzeros, self.scales)
        if self.bias is not None:
            out += self.bias
        return out.reshape(*x.shape[:-1], self.out_features)

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight as ``nn.Linear`` has it: ``[out, in]``."""
        return dequantize(self.qweight, self.qzeros, self.scales, dtype).T.contiguous()

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, group={self.group_size}, bias={self.bias is not None}"


def matmul(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``x [M, K]`` times the packed weight: ``[M, N]`` in the dtype of ``x``."""
    if _on_gpu(x) and x.dtype in (torch.float16, torch.bfloat16):
        kernel = _kernel(x.device)
        if kernel is not None:
            return kernel.matmul(x, qweight, qzeros, scales)  # type: ignore[no-any-return]
        other = installed.product(x.device) if installed.takes(x, scales) else None
        if other is not None:
            return other(x, qweight, qzeros, scales)
    return matmul_torch(x, qweight, qzeros, scales)


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def matmul_torch(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise and multiply, a block of output columns at a time: any device, little scratch memory."""
    inputs, words = qweight.shape
    out = torch.empty(x.shape[0], words * PACK, dtype=x.dtype, device=x.device)
    step = max(1, SCRATCH // (inputs * PACK))
    for a in range(0, words, step):
        b = min(a + step, words)
        weight = dequantize(qweight[:, a:b], qzeros[:, a:b], scales[:, a * PACK : b * PACK], x.dtype)
        out[:, a * PACK : b * PACK] = x @ weight
    return out


@lru_cache
def _kernel(device: torch.device) -> Any:
    """The Triton module, or None where it cannot be used on this device (said once)."""
    if importlib.util.find_spec("triton") is None:
        logger.info("triton is not installed: AWQ layers run through another package's kernel or torch, more slowly")
        return None
    try:
        from kvboost_rag.model.awq import kernel
    except Exception as e:  # a triton that does not fit this torch or driver fails in many ways
        logger.warning("the triton kernels cannot be loaded (%s): AWQ layers run more slowly", e)
        return None
    for product, rows in ((kernel.fused, 5), (kernel.dequantized, 70)):
        problem = installed.disagreement(product, device, rows)
        if problem:
            logger.warning("the triton kernels are not used on %s (%s): AWQ layers run more slowly", device, problem)
            return None
    return kernel
