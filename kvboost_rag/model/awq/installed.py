"""autoawq's own kernel, where its extension is installed and still loads: for GPUs without Triton (Windows).

It is built for a few versions of torch and CUDA, and adds partial sums in half precision. So it comes after our own
kernels, and only after it agreed with plain products on this device.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from kvboost_rag.model.awq.pack import PACK, dequantize

logger = logging.getLogger(__name__)

SPLIT_K = 8
MOST_ROWS = 1024  # beyond, dequantising pays
# x [M, K], qweight, qzeros, scales -> [M, N]
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def takes(x: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether the kernel is made for these shapes: ``x [M, K]``, ``scales [K/g, N]``."""
    group = x.shape[1] // scales.shape[0]
    fits = scales.shape[1] % 64 == 0 and group % 32 == 0 and x.shape[0] <= MOST_ROWS
    return fits and x.dtype == scales.dtype == torch.float16


@lru_cache
def autoawq(device: torch.device) -> Product | None:
    """The product, or None where it is not installed, does not load, or is wrong (said once)."""
    try:
        extension: Any = importlib.import_module("awq_ext")
    except ImportError as e:  # missing, or built for another torch
        logger.info("autoawq's kernels are not used: %s", e)
        return None

    def product(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = extension.gemm_forward_cuda(x.contiguous(), qweight, scales, qzeros, SPLIT_K)
        return out

    problem = disagreement(product, device)
    if problem:
        logger.warning("autoawq's kernels are installed but not used: %s", problem)
        return None
    return product


def disagreement(product: Product, device: torch.device, rows: int = 5) -> str:
    """What is wrong with a product of half-precision rows on this device ("" if nothing), against plain fp32."""
    generator = torch.Generator().manual_seed(0)
    low, high = -(2**31), 2**31 - 1
    qweight, qzeros = (
        torch.randint(low, high, (n, 128 // PACK), dtype=torch.int32, generator=generator).to(device) for n in (256, 2)
    )
    scales = (torch.rand(2, 128, generator=generator) * 0.02).to(device, torch.float16)
    x = torch.randn(rows, 256, generator=generator).to(device, torch.float16)
    exact = x.float() @ dequantize(qweight, qzeros, scales, torch.float32)
    try:
        found = product(x, qweight, qzeros, scales).float()
    except Exception as e:  # a kernel may fail in any way
        return f"{type(e).__name__}: {str(e)[:200]}"
    wrong = found.shape != exact.shape or not (found - exact).abs().max() <= 2e-2 * exact.abs().max()
    return "its result is wrong" if wrong else ""
