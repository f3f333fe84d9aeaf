"""Stands in for the package ``xxhash`` where ``gpu_check.py`` runs on a machine that has torch and transformers alone:
digests of the same lengths, by another function. Nothing that is kept may be written with it; what the check stores
stays in memory.
"""

from __future__ import annotations

import hashlib
from typing import Any


class xxh3_128:
    """As ``hashlib``'s objects."""

    def __init__(self, data: Any = b"", seed: int = 0) -> None:
        self._hash = hashlib.blake2b(data, digest_size=16, salt=seed.to_bytes(16, "little"))
        self.update, self.digest, self.hexdigest = self._hash.update, self._hash.digest, self._hash.hexdigest


def xxh3_128_digest(data: Any, seed: int = 0) -> bytes:
    """16 bytes."""
    return xxh3_128(data, seed).digest()


def xxh3_128_hexdigest(data: Any, seed: int = 0) -> str:
    """32 characters."""
    return xxh3_128(data, seed).hexdigest()


def xxh3_64_digest(data: Any, seed: int = 0) -> bytes:
    """8 bytes."""
    return xxh3_128(data, seed).digest()[:8]
