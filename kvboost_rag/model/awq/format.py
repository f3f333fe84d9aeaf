"""The ``quantization_config`` of an AWQ checkpoint: what is read here, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvboost_rag.errors import CheckpointError
from kvboost_rag.plan.weights import AWQ_GROUPS as GROUP_SIZES
from kvboost_rag.plan.weights import not_converted


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """A checkpoint of 4-bit AWQ in the ``gemm`` layout. ``not_converted`` names modules that stay dense."""

    group_size: int = 128
    not_converted: tuple[str, ...] = ()

    @classmethod
    def parse(cls, source: object, quantization: Mapping[str, Any]) -> AwqFormat:
        """Read the config's ``quantization_config``; ``source`` is for messages.

        Raises:
            CheckpointError: another layout (gemv, marlin, …), bit width or group size; the message names it.
        """
        version = _plain(quantization.get("version", "gemm")).lower()
        if version != "gemm":
            raise _refused(source, f"in the AWQ layout {version!r}", 'take the checkpoint with "version": "gemm"')
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        if bits != 4:
            raise _refused(source, f"AWQ with {bits} bits", "4 bits are read")
        group = quantization.get("group_size", quantization.get("q_group_size", 128))
        if group not in GROUP_SIZES:
            raise _refused(source, f"AWQ with group size {group}", f"read: {', '.join(map(str, GROUP_SIZES))}")
        return cls(int(group), not_converted(quantization))

    def as_dict(self) -> dict[str, Any]:
        """The normal form: what the fingerprint is computed over."""
        return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": self.group_size}


def quantization_of(config: Any) -> dict[str, Any]:
    """The ``quantization_config`` of a transformers config as a plain dict; empty where there is none."""
    value = getattr(config, "quantization_config", None)
    if not value:
        return {}
    plain = dict(value) if isinstance(value, Mapping) else value.to_dict()
    return {**plain, "quant_method": _plain(plain.get("quant_method", "?"))}


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))  # an enum once transformers has parsed it


def _refused(source: object, what: str, hint: str) -> CheckpointError:
    return CheckpointError(f"{source} is quantised {what}, which is not read here", hint=hint)
