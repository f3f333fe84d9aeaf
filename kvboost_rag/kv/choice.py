"""What a store may be asked to do to a block's bytes: round, shuffle and squeeze, both, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost_rag.errors import UnknownOptionError
from kvboost_rag.kv.packing import COMPRESSIONS

LOSSLESS = "zstd"
CHOICES = (*COMPRESSIONS, LOSSLESS, *(f"{rounding}+{LOSSLESS}" for rounding in COMPRESSIONS[1:]))


@dataclass(frozen=True, slots=True)
class Compression:
    """A choice, taken apart."""

    rounding: str  # "none", "int8" or "int4": what K and V go through; part of what a block is
    framed: bool  # their bytes are squeezed without loss on the way to the medium; no part of what a block is

    def __str__(self) -> str:
        if not self.framed:
            return self.rounding
        return LOSSLESS if self.rounding == "none" else f"{self.rounding}+{LOSSLESS}"


def parse_compression(name: str) -> Compression:
    """``"none"``, ``"int8"``, ``"int4"``, ``"zstd"``, ``"int8+zstd"`` or ``"int4+zstd"``, taken apart.

    Raises:
        UnknownOptionError: no such choice.
    """
    if name not in CHOICES:
        raise UnknownOptionError(f"no compression {name!r}", hint=f"one of {', '.join(CHOICES)}")
    rounding = name.removesuffix(LOSSLESS).removesuffix("+") or "none"
    return Compression(rounding, name.endswith(LOSSLESS))
