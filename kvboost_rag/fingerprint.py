"""What identifies a computation of keys and values.

Everything that changes K or V participates: weights, dtype, quantisation, rope configuration, adapter, tokenizer,
architecture numbers. The attention implementation is recorded in block headers but does not participate: a warm-up on
a GPU must serve a CPU (kernels differ by rounding only).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from kvboost_rag.keys import digest_fields

FORMAT = "fp1"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of a model as far as its KV is concerned; each field is a canonical string."""

    architecture: str  # model type and the numbers that shape K and V
    weights: str  # digest of a strided sample of every loaded parameter
    dtype: str  # e.g. "float32"
    quantization: str  # canonical json of the quantisation config, or ""
    rope: str  # canonical json of rope parameters
    adapter: str  # digest of active adapters, or ""
    tokenizer: str  # digest of the tokenizer's full state

    @property
    def digest(self) -> str:
        """Tagged digest over all fields; the string that keys and headers carry."""
        parts = [FORMAT.encode()]
        for f in fields(self):
            parts += [f.name.encode(), str(getattr(self, f.name)).encode()]
        return f"{FORMAT}:{digest_fields(parts)}"


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces; values that json does not know are written with ``str``."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
