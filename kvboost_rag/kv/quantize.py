"""Keys and values in 8 or 4 bits: a smaller block, no longer an exact one.

Keys have channels that stand out for every token, values have tokens that do, so keys get their scales per channel and
values per token (relatives: KIVI 2402.02750; KVQuant 2401.18079 for keys before rotation, which ours are). A group is
what shares one scale::

            keys, along tokens              values, along channels
    int8    all tokens of the chunk         the whole head
    int4    32 tokens                       32 channels

Within a group ``x ≈ zero + scale · code``; zero and scale are float16, rounded so that no value falls out of range.
One layer is one run of bytes: zeros and scales of K, of V, then codes of K, of V, so that the first layers are the
first bytes.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from kvboost_rag.errors import BlockFormatError, UnknownOptionError

COMPRESSIONS = ("none", "int8", "int4")
_BITS = {"int8": 8, "int4": 4}
_GROUP = {"int8": 0, "int4": 32}  # values along the grouped axis that share a scale; 0: all of them
_LINE = 64  # bytes; every part of a layer starts at a multiple of this
_PIECE = 1 << 18  # values that are brought back at once
_PACKED_AT_ONCE = 1 << 20


def check_compression(name: str) -> str:
    """``name``, if it is a compression.

    Raises:
        UnknownOptionError
    """
    if name not in COMPRESSIONS:
        raise UnknownOptionError(f"no compression {name!r}", hint=f"one of {', '.join(COMPRESSIONS)}")
    return name


@dataclass(frozen=True, slots=True)
class Part:
    """Where K or V of one layer lies. Codes have shape ``[heads, tokens, head_dim]``."""

    params_at: int  # bytes from the layer's start; zeros, then scales, float16
    codes_at: int
    axis: int  # of [heads, tokens, head_dim]: the one that groups run along
    groups: int  # along that axis
    group: int  # values in a group; the last one may be shorter


@dataclass(frozen=True, slots=True)
class Layout:
    """The bytes of one layer of a compressed block; follows from the compression and the shape alone."""

    bits: int
    heads: int
    tokens: int
    head_dim: int
    key: Part
    value: Part
    layer_bytes: int


def layout_of(compression: str, heads: int, tokens: int, head_dim: int) -> Layout:
    """How a layer of ``heads × tokens × head_dim`` is laid out under ``"int8"`` or ``"int4"``."""
    bits, shape = _BITS[compression], (heads, tokens, head_dim)
    sizes, shares = [], []
    for axis in (1, 2):
        group = min(_GROUP[compression] or shape[axis], shape[axis])
        groups = -(-shape[axis] // group)
        sizes.append(4 * groups * math.prod(shape) // shape[axis])
        shares.append((axis, groups, group))
    codes = heads * -(-tokens * head_dim * bits // 8)
    starts = [0]
    for size in (*sizes, codes, codes):
        starts.append(starts[-1] + -(-size // _LINE) * _LINE)
    key, value = (Part(starts[i], starts[2 + i], *shares[i]) for i in (0, 1))
    return Layout(bits, heads, tokens, head_dim, key, value, starts[-1])


@dataclass(frozen=True, slots=True)
class Packed:
    """K and V of a block, compressed: ``data`` is uint8 ``[num_layers, layer_bytes]``; ``dtype`` is what comes back."""

    compression: str
    data: torch.Tensor
    dtype: torch.dtype
    heads: int
    tokens: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of K and V: ``(num_layers, 2, heads, tokens, head_dim)``."""
        return (int(self.data.shape[0]), 2, self.heads, self.tokens, self.head_dim)

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def unpack(self) -> torch.Tensor:
        """K and V as ``[num_layers, 2, heads, tokens, head_dim]`` in :attr:`dtype`, on the CPU.

        Raises:
            BlockFormatError: scales that are not finite.
        """
        layout = layout_of(self.compression, self.heads, self.tokens, self.head_dim)
        out = torch.empty(self.shape, dtype=self.dtype)
        layers = out.shape[0]
        workers = min(layers, torch.get_num_threads())
        if workers < 2 or out.numel() < 1 << 20:
            _unpack_layers(self.data, layout, out, 0, layers)
        else:
            cuts = [layers * i // workers for i in range(workers + 1)]
            jobs = [_pool().submit(_unpack_layers, self.data, layout, out, a, b) for a, b in pairwise(cuts)]
            for job in jobs:
                job.result()
        return out

    @property
    def layers_at_once(self) -> int:
        """How many layers are brought back at the cost of one: less than that is mostly overhead."""
        return max(1, _PIECE // (self.heads * self.tokens * self.head_dim))

    def unpack_layers(self, first: int, stop: int, out: torch.Tensor) -> None:
        """Bring back layers ``[first, stop)``, into ``out[first:stop]``; ``out`` is shaped like :meth:`unpack`'s.
        Others may be brought back at the same time.

        Raises:
            BlockFormatError: scales that are not finite.
        """
        _unpack_layers(self.data, layout_of(self.compression, self.heads, self.tokens, self.head_dim), out, first, stop)


def pack(kv: torch.Tensor, compression: str) -> Packed | None:
    """``kv`` ``[num_layers, 2, heads, tokens, head_dim]`` compressed, or None where its values do not fit: not finite,
    or beyond float16."""
    layers, _, heads, tokens, head_dim = kv.shape
    layout = layout_of(compression, heads, tokens, head_dim)
    data = torch.zeros(layers, layout.layer_bytes, dtype=torch.uint8)
    step = max(1, _PACKED_AT_ONCE // (heads * tokens * head_dim))
    for first in range(0, layers, step):
        at = slice(first, min(first + step, layers))
        for index, part in enumerate((layout.key, layout.value)):
            values = kv[at, index].detach().to("cpu", torch.float32, copy=True)
            if not _pack_part(values, part, layout.bits, data[at]):
                return None
    return Packed(compression, data, kv.dtype, heads, tokens, head_dim)


def _pack_part(values: torch.Tensor, part: Part, bits: int, data: torch.Tensor) -> bool:
    """Write ``values`` (float32 ``[layers, heads, tokens, head_dim]``, overwritten) into the layers' bytes; False if
    they do not fit."""
    axis, most = part.axis + 1, (1 << bits) - 1
    zeros, scales = [], []
    for piece in _cut(values, part):
        low, high = piece.amin(axis + 1, keepdim=True), piece.amax(axis + 1, keepdim=True)
        zero = _half_at_most(low)
        scale = _half_at_least((high - zero.float()) / most)
        if not (torch.isfinite(zero).all() and torch.isfinite(scale).all()):
            return False
        piece.sub_(zero.float()).div_(scale.float()).round_().clamp_(0, most)
        zeros.append(zero.squeeze(axis + 1))
        scales.append(scale.squeeze(axis + 1))
    params = torch.stack([torch.cat(zeros, axis), torch.cat(scales, axis)], 1)
    for start, raw in (
        (part.params_at, params.view(torch.uint8).flatten(1)),
        (part.codes_at, _squeeze(values.to(torch.uint8), bits)),
    ):
        data[:, start : start + raw.shape[1]] = raw
    return True


def _cut(values: torch.Tensor, part: Part) -> list[torch.Tensor]:
    """Views of ``[layers, heads, tokens, head_dim]`` with the grouped axis as two, (group, member): the whole groups,
    and the shorter one that may be left."""
    axis, size = part.axis + 1, values.shape[part.axis + 1]
    whole = size // part.group
    pieces = []
    if whole:
        pieces.append(values.narrow(axis, 0, whole * part.group).unflatten(axis, (whole, part.group)))
    if whole < part.groups:
        left = size - whole * part.group
        pieces.append(values.narrow(axis, size - left, left).unflatten(axis, (1, left)))
    return pieces


def _half_at_most(x: torch.Tensor) -> torch.Tensor:
    """float16, rounded down."""
    half = x.half()
    return torch.where(half.float() > x, (x - x.abs() * 2**-10 - 2**-24).half(), half)


def _half_at_least(x: torch.Tensor) -> torch.Tensor:
    """float16, rounded up, and never 0."""
    half = x.half()
    return torch.where((half.float() < x) | (half == 0), (x + x.abs() * 2**-10 + 2**-24).half(), half)


def _squeeze(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes ``[layers, heads, tokens, head_dim]`` as ``[layers, bytes]``. Two 4-bit codes share a byte: a head's first
    half of codes lies in the lower bits, its second half in the upper, so that both come back in one run."""
    if bits == 8:
        return codes.flatten(1)
    flat = codes.flatten(2)
    half = -(-flat.shape[2] // 2)
    both = flat[..., :half].clone()
    both[..., : flat.shape[2] - half] |= flat[..., half:] << 4
    return both.flatten(1)


# -- back ----------------------------------------------------------------------------------------------------------


def _unpack_layers(data: torch.Tensor, layout: Layout, out: torch.Tensor, first: int, stop: int) -> None:
    """Layers ``[first, stop)`` of ``data`` into ``out``, in pieces that stay in the processor's cache."""
    per_head = layout.tokens * layout.head_dim
    heads = max(1, min(layout.heads, _PIECE // per_head))
    layers = max(1, min(stop - first, _PIECE // (per_head * layout.heads)))
    floats = torch.empty(layers * heads * per_head)
    bytes_ = torch.empty(layers * heads * (per_head + 1), dtype=torch.uint8)
    for index, part in enumerate((layout.key, layout.value)):
        zeros, scales = _params(data[first:stop], layout, part)
        for layer in range(first, stop, layers):
            at = slice(layer, min(layer + layers, stop))
            for head in range(0, layout.heads, heads):
                target = out[at, index, head : head + heads]
                codes = _codes(data[at], layout, part, slice(head, head + target.shape[1]), bytes_)
                here = slice(at.start - first, at.stop - first), slice(head, head + heads)
                work = target if target.dtype is torch.float32 else floats[: target.numel()].view(target.shape)
                work.copy_(codes)
                _scale(work, zeros[here], scales[here], part)
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


def _codes(data: torch.Tensor, layout: Layout, part: Part, heads: slice, scratch: torch.Tensor) -> torch.Tensor:
    """Codes of some heads, uint8 ``[layers, heads, tokens, head_dim]``."""
    per_head = layout.tokens * layout.head_dim
    size = -(-per_head * layout.bits // 8)
    shape = (data.shape[0], heads.stop - heads.start)
    run = data[:, part.codes_at + heads.start * size : part.codes_at + heads.stop * size].unflatten(1, (shape[1], size))
    if layout.bits == 4:
        both = scratch[: math.prod(shape) * 2 * size].view(*shape, 2, size)
        torch.bitwise_and(run, 15, out=both[:, :, 0])
        torch.bitwise_right_shift(run, 4, out=both[:, :, 1])
        run = both.view(*shape, 2 * size)[:, :, :per_head]
    codes: torch.Tensor = run.unflatten(2, (layout.tokens, layout.head_dim))
    return codes


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


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=8, thread_name_prefix="kvboost-unpack")
