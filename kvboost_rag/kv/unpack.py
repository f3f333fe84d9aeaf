"""From the bytes of a compressed block back to keys and values, at the speed of memory.

Three passes (codes to floats, scale, round to what comes back) over pieces that stay in the processor's cache, the last
one straight into the result. What costs more than these is memory that was never used before, which the system gives
out page by page: whoever can should take a block layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.kv.packing import Layout, Part
from kvboost_rag.kv.workers import pool, workers_for

PIECE = 1 << 19  # values brought back at once: smaller pieces spend their time between the passes


def unpack(data: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """The layers in ``data`` (uint8 ``[num_layers, layer_bytes]``) into ``out``, ``[num_layers, 2, heads, tokens,
    head_dim]`` on the CPU, by as many threads as torch has.

    Raises:
        BlockFormatError: scales that are not finite.
    """
    layers = out.shape[0]
    workers = workers_for(layers, out.numel())
    if workers < 2:
        unpack_layers(data, layout, out, 0, layers)
        return
    cuts = [layers * i // workers for i in range(workers + 1)]
    for job in [pool().submit(unpack_layers, data, layout, out, a, b) for a, b in pairwise(cuts)]:
        job.result()


def unpack_layers(data: torch.Tensor, layout: Layout, out: torch.Tensor, first: int, stop: int) -> None:
    """Layers ``[first, stop)`` of ``data`` into ``out``, in pieces that stay in the processor's cache."""
    per_head = layout.tokens * layout.head_dim
    heads = max(1, min(layout.heads, PIECE // per_head))
    layers = max(1, min(stop - first, PIECE // (per_head * layout.heads)))
    floats = torch.empty(layers * heads * per_head)
    bytes_ = torch.empty(layers * heads * (per_head + 1), dtype=torch.uint8)
    data = data[first:stop]
    params = _params(data, layout)
    for index, part in enumerate((layout.key, layout.value)):
        whole = (_runs(data, layout, part), *_zeros_and_scales(params, layout, part), out[first:stop, index])
        for run, zeros, scales, target in _pieces(whole, layers, heads):
            work = target if target.dtype is torch.float32 else floats[: target.numel()].view(target.shape)
            work.copy_(_codes(run, layout, bytes_).view(target.shape))
            _scale(work, zeros, scales, part)
            if work is not target:
                target.copy_(work)


def _pieces(whole: Sequence[torch.Tensor], layers: int, heads: int) -> Iterator[Sequence[torch.Tensor]]:
    """``whole``, all ``[layers, heads, …]``, cut alike; not where it fits: cutting costs more than a small layer."""
    if whole[0].shape[0] > layers:
        for some in zip(*(x.split(layers) for x in whole), strict=True):
            yield from _pieces(some, layers, heads)
    elif whole[0].shape[1] > heads:
        yield from zip(*(x.split(heads, 1) for x in whole), strict=True)
    else:
        yield whole


def _params(data: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Zeros and scales of K and V as they lie, float32 ``[layers, …]``."""
    params = data[:, : layout.key.codes_at].contiguous().view(torch.float16).float()
    if not math.isfinite(params.sum().item()):  # float16 cannot add up to infinity here
        raise BlockFormatError("scales that are not finite")
    return params


def _zeros_and_scales(params: torch.Tensor, layout: Layout, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of K or V: ``[layers, heads, tokens, head_dim]`` with the groups in place of the grouped axis."""
    shape = [layout.heads, layout.tokens, layout.head_dim]
    shape[part.axis] = part.groups
    size, start = math.prod(shape), part.params_at // 2
    zeros = params[:, start : start + size].view(-1, *shape)
    return zeros, params[:, start + size : start + 2 * size].view(-1, *shape)


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
    if part.groups == 1:
        _affine(values, zeros, scales, part)
        return
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
