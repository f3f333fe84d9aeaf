"""Block keys: canonical bytes to a tagged digest.

A key identifies a *computation*: which weights, after which context, over which token ids, for which tenant. Every
field is length-prefixed, so that no two different field lists share an encoding. The digest is SHA-256 (keys are
identity, and identity must not be forgeable), tagged ``kv1:`` so that a later change of the scheme is detectable
instead of silently splitting the store. The format is a contract: ``tests/test_keys.py`` holds golden values.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

KEY_PREFIX = "kv1:"


def _field(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def digest_fields(fields: Iterable[bytes]) -> str:
    """SHA-256 hex digest of length-prefixed ``fields``."""
    h = hashlib.sha256()
    for field in fields:
        h.update(_field(field))
    return h.hexdigest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Canonical bytes of token ids: little-endian uint32 each."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def context_digest(token_ids: Sequence[int]) -> str:
    """Digest of the tokens that a block was computed after (canonical head + filler, or an own head)."""
    return digest_fields([b"context", token_bytes(token_ids)])


def block_key(fingerprint: str, context: str, token_ids: Sequence[int], salt: str = "") -> str:
    """The key of one block: ``kv1:`` + digest of (fingerprint, context digest, token ids, tenant salt)."""
    fields = [fingerprint.encode(), context.encode(), token_bytes(token_ids), salt.encode()]
    return KEY_PREFIX + digest_fields(fields)
