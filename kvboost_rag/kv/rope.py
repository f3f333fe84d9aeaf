"""Rotate keys to a position, and back.

The table comes from the model's own rotary module, its scaling included, so linear, llama3 and YaRN scaling need no
code here; what is refused elsewhere (``model/support.py``) are tables that depend on sequence length. The rotation is
the half-split form of Llama-style models: pairs are ``(x[i], x[i + rotary_dim/2])``; dimensions at and beyond
``rotary_dim`` pass through (partial rotary, Phi-3).

Arithmetic is fp32, cast once. A model whose table carries an attention scaling ``a`` (YaRN) multiplies both cos and
sin by it, so rotating back by the table's transpose gives ``a**2 * K``: :meth:`RopeTable.unrotate` divides it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

CosSin = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class RopeTable:
    """cos and sin by position, grown on demand. ``compute(position_ids[1, n]) -> (cos, sin)`` in fp32,
    each ``[1, n, rotary_dim]``, scaling included."""

    compute: CosSin
    scaling: float = 1.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limit: int = 1 << 30  # never ask the model for a table beyond this (longrope would switch)
    _cos: torch.Tensor | None = None  # [capacity, rotary_dim / 2]
    _sin: torch.Tensor | None = None
    _elsewhere: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def _ensure(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cos is None or self._sin is None or self._cos.shape[0] < positions:
            capacity = max(positions, min(self.limit, max(1024, 1 << (positions - 1).bit_length())))
            cos, sin = self.compute(torch.arange(capacity, device=self.device)[None])
            half = cos.shape[-1] // 2
            self._cos, self._sin = cos[0, :, :half].float(), sin[0, :, :half].float()
            self._elsewhere.clear()
        return self._cos, self._sin

    def _on(self, device: torch.device, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables where ``device`` can use them: keys of spilled pages are turned in host memory."""
        tables = self._ensure(positions)
        if device == tables[0].device:
            return tables
        found = self._elsewhere.get(device)
        if found is None:
            found = self._elsewhere[device] = (tables[0].to(device), tables[1].to(device))
        return found

    def rotate_into(self, out: torch.Tensor, keys: torch.Tensor, start: int) -> None:
        """``out[...] = rotate(keys)`` for positions ``[start, start + n)``.

        Shapes ``[..., n, head_dim]`` both; ``out`` may be a strided view. Equals what the model itself would have
        produced at those positions, up to rounding.
        """
        n = keys.shape[-2]
        cos, sin = self._on(keys.device, start + n)
        _rotate(out, keys, cos[start : start + n], sin[start : start + n])

    def unrotate(self, keys: torch.Tensor, start: int) -> torch.Tensor:
        """Keys as before rotation; inverse of :meth:`rotate_into`. Shape ``[..., n, head_dim]``."""
        n = keys.shape[-2]
        cos, sin = self._ensure(start + n)
        scale = self.scaling * self.scaling
        out = torch.empty_like(keys, memory_format=torch.contiguous_format)
        _rotate(out, keys, cos[start : start + n] / scale, -sin[start : start + n] / scale)
        return out

    def at(self, positions: torch.Tensor, *, back: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[n, rotary_dim / 2]`` that rotate keys to ``positions [n]``, or ``back`` from there."""
        cos, sin = self._ensure(int(positions.max()) + 1 if positions.numel() else 1)
        cos, sin = cos[positions], sin[positions]
        scale = self.scaling * self.scaling
        return (cos / scale, sin / -scale) if back else (cos, sin)

    def rotate_at(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Like :meth:`rotate_into` for scattered ``positions [n]``; returns a new fp32 tensor."""
        return turn(keys, self.at(positions))

    def unrotate_at(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`rotate_at`."""
        return turn(keys, self.at(positions, back=True))


def turn(keys: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``keys [..., n, head_dim]`` turned by a table of :meth:`RopeTable.at`; a new fp32 tensor."""
    out = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    _rotate(out, keys.float(), *table)
    return out


def turn_into(out: torch.Tensor, keys: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
    """:func:`turn` into ``out``, which does not overlap ``keys``, to the same bits as :meth:`RopeTable.rotate_into`."""
    _rotate(out, keys, *table)


def _rotate(out: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    x1, x2 = keys[..., :half], keys[..., half : 2 * half]
    y1, y2 = out[..., :half], out[..., half : 2 * half]
    if keys.dtype == torch.float32 and out.dtype == torch.float32:
        # fp32 in place: no temporaries the size of the keys.
        torch.mul(x1, cos, out=y1)
        y1.addcmul_(x2, sin, value=-1)
        torch.mul(x2, cos, out=y2)
        y2.addcmul_(x1, sin)
    else:
        a, b = x1.float(), x2.float()
        y1.copy_(a * cos - b * sin)
        y2.copy_(b * cos + a * sin)
    if keys.shape[-1] > 2 * half:
        out[..., 2 * half :].copy_(keys[..., 2 * half :])
