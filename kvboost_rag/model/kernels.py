"""Which kernel computes causal attention: flash-attn, torch's own flash kernel for packed sequences, or SDPA.

Only forwards that a causal mask describes can use one: a prefill, or rows at the end of a cache (a continued
conversation). Masked rows (repair) always go through SDPA: no flash kernel takes their mask. A kernel is not trusted
because it is installed: it must agree with plain matrix products on this device first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from kvboost_rag.errors import UnknownOptionError, UsageError
from kvboost_rag.model.packed import varlen_attention

logger = logging.getLogger(__name__)

Attn = Literal["auto", "flash-attn", "varlen", "sdpa"]
# query [1, H, q, D], key and value [1, Hkv, kv, D], scaling -> [1, q, H, D]; row i sees keys up to kv - q + i
Causal = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Kernel:
    """``name`` and why it was taken. ``takes_suffix``: it serves rows at the end of a longer cache too."""

    name: str
    reason: str
    causal: Causal
    takes_suffix: bool = False


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """torch's SDPA, which picks among its own kernels. As many keys as rows: its causal mask begins at the top left."""
    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2)


SDPA = Kernel("sdpa", "default", sdpa)


def _flash_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn_func(q, k, v, softmax_scale=scaling, causal=True)  # type: ignore[no-any-return]


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, D]; strides are read as they are
    longest = (q.shape[0], k.shape[0])
    row_ends, key_ends = (_ends(n, q.device) for n in longest)
    out: Any = varlen_attention(q, k, v, row_ends, key_ends, longest, scaling, causal=True)
    return out[None]  # type: ignore[no-any-return]


@lru_cache(maxsize=8)  # all layers of a forward ask for the same: a copy to the device would stop the host each time
def _ends(n: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, n], dtype=torch.int32, device=device)


_KERNELS: dict[str, Causal] = {"flash-attn": _flash_attn, "varlen": _varlen}


def choose_kernel(attn: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> Kernel:
    """The kernel for ``attn``: ``"auto"`` takes the first that works here, a name takes that one.

    ``heads``: (query heads, key heads). Raises UnknownOptionError; UsageError: the one asked for does not work here.
    """
    if attn not in get_args(Attn):
        raise UnknownOptionError(f"unknown attention {attn!r}", hint=f"known: {', '.join(get_args(Attn))}")
    if attn == "sdpa":
        return Kernel("sdpa", "asked for", sdpa)
    why_not = _unfit(device, dtype, head_dim)
    tried: list[str] = []
    for name, causal in _KERNELS.items():
        if attn not in ("auto", name):
            continue
        problem = why_not or _problem(causal, device, dtype, heads, head_dim)
        if not problem:
            reason = "asked for" if attn == name else "; ".join([*tried, "agrees with plain products here"])
            return Kernel(name, reason, causal, takes_suffix=True)
        tried.append(problem if why_not else f"{name}: {problem}")
    if attn != "auto":
        raise UsageError(f"attn={attn!r} does not work here: {tried[0]}", hint='attn="auto" takes what does')
    return Kernel("sdpa", why_not or "; ".join(tried), sdpa)


def _unfit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why no flash kernel serves here ("" if one may)."""
    if device.type != "cuda":
        return "no CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    if dtype not in HALF:
        return f"{str(dtype).removeprefix('torch.')}: flash kernels take float16 and bfloat16"
    return f"heads of {head_dim} are wider than {LARGEST_HEAD}" if head_dim > LARGEST_HEAD else ""


def _problem(causal: Causal, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> str:
    """What is wrong with a kernel on this device ("" if nothing): a prefill is tried, and rows at a cache's end."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, heads[1], 70, head_dim, generator=generator).to(device, dtype) for _ in range(2))
    for rows in (70, 9):
        query = torch.randn(1, heads[0], rows, head_dim, generator=generator).to(device, dtype)
        try:
            found = causal(query, key, value, head_dim**-0.5)
        except ImportError:
            return "not installed"
        except Exception as e:  # a kernel may fail in any way: another one serves
            return f"{type(e).__name__}: {str(e).splitlines()[0][:120] if str(e) else 'no message'}"
        if not torch.allclose(found.float(), _plain(query, key, value), atol=2e-2):
            return "its result is wrong"
    return ""


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same in plain fp32 products."""
    groups, rows, kv = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.float() @ k.transpose(2, 3) * query.shape[3] ** -0.5
    hidden = torch.ones(rows, kv, dtype=torch.bool, device=query.device).triu_(kv - rows + 1)
    out: torch.Tensor = scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2)
