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

from dataclasses import dataclass

import torch

from kvboost_rag.kv.packing import Part, layout_of
from kvboost_rag.kv.unpack import PIECE, unpack, unpack_layers

_PACKED_AT_ONCE = 1 << 20


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
        out = torch.empty(self.shape, dtype=self.dtype)
        unpack(self.data, layout_of(self.compression, self.heads, self.tokens, self.head_dim), out)
        return out

    @property
    def layers_at_once(self) -> int:
        """How many layers are brought back at the cost of one: less than that is mostly overhead."""
        return max(1, PIECE // (self.heads * self.tokens * self.head_dim))

    def unpack_layers(self, first: int, stop: int, out: torch.Tensor) -> None:
        """Bring back layers ``[first, stop)``, into ``out[first:stop]``; ``out`` is shaped like :meth:`unpack`'s.
        Others may be brought back at the same time.

        Raises:
            BlockFormatError: scales that are not finite.
        """
        unpack_layers(self.data, layout_of(self.compression, self.heads, self.tokens, self.head_dim), out, first, stop)


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
