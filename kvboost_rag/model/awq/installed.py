"""Other packages' kernels, where they are installed and still load: for GPUs without Triton (Windows).

``autoawq-kernels`` and gptqmodel's older wheels bring an extension that is built for a few versions of torch and CUDA
and adds partial sums in half precision; newer gptqmodel compiles its own when first asked (with ninja and nvcc, some
minutes) and can add them in fp32. So they come after our own kernels, and each only after it agreed with plain
products on this device.
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
def product(device: torch.device) -> Product | None:
    """The first product that is installed, loads and is right on this device, or None (what is wrong is said once)."""
    for name, load in _PRODUCTS.items():
        try:
            found = load()
        except ImportError as e:  # missing, or built for another torch
            logger.info("%s is not used: %s", name, e)
            continue
        except Exception as e:  # importing may do and compile a lot
            logger.warning("%s is installed but not used: %s: %s", name, type(e).__name__, str(e)[:200])
            continue
        problem = disagreement(found, device)
        if not problem:
            logger.info("AWQ layers run through the kernels of %s on %s", name, device)
            return found
        logger.warning("%s is installed but not used: %s", name, problem)
    return None


def _gptqmodel() -> Product:
    awq: Any = importlib.import_module("gptqmodel.utils.awq")
    if not hasattr(awq, "awq_gemm_forward"):
        raise ImportError("this gptqmodel has no such function")
    if not awq.awq_runtime_available():
        raise ImportError(str(awq.awq_runtime_error()))

    def gemm(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = awq.awq_gemm_forward(x.contiguous(), qweight, scales, qzeros, SPLIT_K, True)
        return out

    return gemm


def _extension(name: str) -> Product:
    extension: Any = importlib.import_module(name)

    def gemm(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = extension.gemm_forward_cuda(x.contiguous(), qweight, scales, qzeros, SPLIT_K)
        return out

    return gemm


# In this order: gptqmodel's own adds in fp32, the others in half precision.
_PRODUCTS: dict[str, Callable[[], Product]] = {
    "gptqmodel": _gptqmodel,
    "autoawq-kernels": lambda: _extension("awq_ext"),
    "gptqmodel's older extension": lambda: _extension("gptqmodel_awq_kernels"),
}


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
