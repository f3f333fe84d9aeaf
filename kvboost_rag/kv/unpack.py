"""From the bytes of a compressed block back to keys and values, at the speed of memory.

Three passes (codes to floats, scale, round to what comes back) over pieces that stay in the processor's cache, the last
one straight into the result. What costs more than these is touching new memory 4 KiB at a time, so large results lie
in huge pages where the system has them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import torch

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.packing import Layout, Part
from kvboost_rag.kv.workers import pool, workers_for

_PIECE = 1 << 19  # values brought back at once: smaller pieces spend their time between the passes
_HUGE_FROM = 8 << 20  # bytes
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


def roomy(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor whose contents are anything. Large ones lie in huge pages where there are such: written for the
    first time, they are there several times sooner."""
    size = math.prod(shape) * dtype.itemsize
    if _HUGE is not None and size >= _HUGE_FROM:
        with suppress(OSError, ValueError):  # no such memory: then plain
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a system without huge pages
                memory.madvise(_HUGE)
            return torch.frombuffer(memory, dtype=dtype).view(*shape)
    return torch.empty(*shape, dtype=dtype)


def unpack(data: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """The layers in ``data`` (uint8 ``[num_layers, layer_bytes]``) into ``out``, ``[num_layers, 2, heads, tokens,
    head_dim]`` on the CPU, by as many threads as torch has.

    Raises:
        BlockFormatError: scales that are not finite.
    """
    layers = out.shape[0]
    workers = workers_for(layers, out.numel())
    if workers < 2:
        _unpack_layers(data, layout, out, 0, layers)
        return
    cuts = [layers * i // workers for i in range(workers + 1)]
    for job in [pool().submit(_unpack_layers, data, layout, out, a, b) for a, b in pairwise(cuts)]:
        job.result()


def _unpack_layers(data: torch.Tensor, layout: Layout, out: torch.Tensor, first: int, stop: int) -> None:
    """Layers ``[first, stop)`` of ``data`` into ``out``, in pieces that stay in the processor's cache."""
    per_head = layout.tokens * layout.head_dim
    heads = max(1, min(layout.heads, _PIECE // per_head))
    layers = max(1, min(stop - first, _PIECE // (per_head * layout.heads)))
    floats = torch.empty(layers * heads * per_head)
    bytes_ = torch.empty(layers * heads * (per_head + 1), dtype=torch.uint8)
    data = data[first:stop]
    for index, part in enumerate((layout.key, layout.value)):
        whole = (_runs(data, layout, part), *_params(data, layout, part), out[first:stop, index])
        for some in zip(*(x.split(layers) for x in whole), strict=True):
            for run, zeros, scales, target in zip(*(x.split(heads, 1) for x in some), strict=True):
                work = target if target.dtype is torch.float32 else floats[: target.numel()].view(target.shape)
                work.copy_(_codes(run, layout, bytes_).view(target.shape))
                _scale(work, zeros, scales, part)
                if work is not target:
                    target.copy_(work)


def _params(data: torch.Tensor, layout: Layout, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros and scales: float32, ``[layers, heads, tokens, head_dim]`` with the groups in place of the grouped axis."""
    shape = [layout.heads, layout.tokens, layout.head_dim]
    shape[part.axis] = part.groups
    raw = data[:, part.params_at : part.params_at + 4 * math.prod(shape)].contiguous()
    params = raw.view(torch.float16).float().view(-1, 2, *shape)
    if not torch.isfinite(params).all():
        raise BlockFormatError("scales that are not finite")
    return params[:, 0], params[:, 1]


def _runs(data: torch.Tensor, layout: Layout, part: Part) -> torch.Tensor:
    """Codes as they lie, uint8 ``[layers, heads, bytes of a head]``."""
    size = -(-layout.tokens * layout.head_dim * layout.bits // 8)
    runs: torch.Tensor = data[:, part.codes_at : part.codes_at + layout.heads * size].unflatten(1, (layout.heads, size))
    return runs


def _codes(run: torch.Tensor, layout: Layout, scratch: torch.Tensor) -> torch.Tensor:
    """Codes of some heads, uint8 ``[layers, heads, values of a head]``."""
    if layout.bits == 8:
        return run
    layers, heads, size = run.shape
    both = scratch[: layers * heads * 2 * size].view(layers, heads, 2, size)
    torch.bitwise_and(run, 15, out=both[:, :, 0])
    torch.bitwise_right_shift(run, 4, out=both[:, :, 1])
    return both.view(layers, heads, 2 * size)[:, :, : layout.tokens * layout.head_dim]


def _scale(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, part: Part) -> None:
    """``values = zero + scale · values``, in place; all ``[layers, heads, …]``."""
    axis = part.axis + 1
    whole = values.shape[axis] // part.group
    if whole:
        piece = values.narrow(axis, 0, whole * part.group).unflatten(axis, (whole, part.group))
        zero, scale = (p.narrow(axis, 0, whole).unsqueeze(axis + 1) for p in (zeros, scales))
        _affine(piece, zero, scale, part)
    if whole < part.groups:
        start = whole * part.group
        piece = values.narrow(axis, start, values.shape[axis] - start)
        _affine(piece, zeros.narrow(axis, whole, 1), scales.narrow(axis, whole, 1), part)


def _affine(x: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, part: Part) -> None:
    if part.axis == 1:  # scales run along the rows: one pass is vectorised; else two passes are faster
        torch.addcmul(zero, x, scale, out=x)
    else:
        x.mul_(scale).add_(zero)
