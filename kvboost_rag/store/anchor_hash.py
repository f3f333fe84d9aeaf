"""Hashes of text windows, many at a time.

A polynomial over the code points, modulo 2^64, gives the hash of any stretch of a text from two prefix sums, so that
all windows of a prompt, or all chunks of a batch, cost a handful of numpy calls::

    sums[i]        = Σ_{j < i} code[j] · B^j
    hash(p, len)   = (sums[p + len] − sums[p]) · B^(−p)          B is odd, hence invertible

These hashes only *find*; they are easy to collide on purpose. What is found is proved by :func:`text_digest`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
U16 = NDArray[np.uint16]
I64 = NDArray[np.int64]

ANCHOR_CHARS = 32  # shorter texts are not indexed
MIDDLE_CHARS = 128  # second level: tells texts with one common beginning (boilerplate) apart
MIDDLE_BITS = 24  # of the 64 anchor bits; the other 40 hash the first 32 characters
MIDDLE_MASK = np.uint64((1 << MIDDLE_BITS) - 1)

_BASE = 0xD1342543DE82EF95
_INVERSE = pow(_BASE, -1, 1 << 64)
_KEEP = 1 << 18  # powers kept between calls; a batch of texts is hashed in pieces of about this many characters


@dataclass(frozen=True, slots=True)
class Salts:
    """What a tenant's salt turns into: one 64-bit value per hash."""

    digest: int
    anchor: int
    middle: int
    check: int


@lru_cache(maxsize=1024)
def salts(salt: str) -> Salts:
    """The four hash salts of a tenant salt."""
    raw = hashlib.sha256(b"kvboost_rag anchors 1\0" + salt.encode("utf-8", "surrogatepass")).digest()
    return Salts(*(int.from_bytes(raw[i : i + 8], "little") for i in range(0, 32, 8)))


def text_digest(text: str, seed: int) -> bytes:
    """128-bit hash (16 bytes) of a whole text: the proof of a match."""
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"), seed)


def code_points(text: str) -> U32:
    """The text's code points; lone surrogates are kept as they are."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class Rolling:
    """O(1) hashes of any stretch of ``codes``, vectorised. Costs 8 bytes per code point while it lives."""

    def __init__(self, codes: U32) -> None:
        powers, self._inverse = _powers(len(codes) + 1)
        self._sums = np.zeros(len(codes) + 1, dtype=np.uint64)
        np.cumsum(codes * powers[: len(codes)], out=self._sums[1:])

    def windows(self, width: int) -> U64:
        """Hash of every window of ``width`` code points, by start."""
        count = len(self._sums) - width
        return np.asarray((self._sums[width:] - self._sums[:count]) * self._inverse[:count])

    def of(self, start: I64, length: I64 | int) -> U64:
        """Hash of each stretch ``[start, start + length)``."""
        return np.asarray((self._sums[start + length] - self._sums[start]) * self._inverse[start])


def anchor_part(hashes: U64, salt: Salts) -> U64:
    """The upper 40 bits of an anchor (lower 24 are zero), from hashes of 32 characters."""
    return _mix(hashes, salt.anchor) & ~MIDDLE_MASK


def middle_part(hashes: U64, salt: Salts) -> U64:
    """The lower 24 bits of an anchor, never 0, from hashes of 128 characters. Shorter texts have 0 there."""
    return np.asarray(np.maximum(_mix(hashes, salt.middle) >> np.uint64(64 - MIDDLE_BITS), np.uint64(1)))


def check_part(hashes: U64, salt: Salts) -> U16:
    """16 bits of a whole text's hash: saves nearly every needless proof."""
    return (_mix(hashes, salt.check) >> np.uint64(48)).astype(np.uint16)


def text_columns(texts: list[str], salt: Salts) -> tuple[U64, U32, U16]:
    """Anchor, length and check of each text. Every text has at least :data:`ANCHOR_CHARS` characters."""
    if not texts:
        return np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.uint16)
    pieces: list[tuple[U64, U32, U16]] = []
    first = size = 0
    for i, text in enumerate(texts):
        if size and size + len(text) > _KEEP:
            pieces.append(_piece_columns(texts[first:i], salt))
            first, size = i, 0
        size += len(text)
    pieces.append(_piece_columns(texts[first:], salt))
    anchor, length, check = zip(*pieces, strict=True)
    return np.concatenate(anchor), np.concatenate(length), np.concatenate(check)


def _piece_columns(texts: list[str], salt: Salts) -> tuple[U64, U32, U16]:
    rolling = Rolling(code_points("".join(texts)))
    length = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    start = np.cumsum(length) - length
    anchor = anchor_part(rolling.of(start, ANCHOR_CHARS), salt)
    long = length >= MIDDLE_CHARS
    anchor[long] |= middle_part(rolling.of(start[long], MIDDLE_CHARS), salt)
    return anchor, length.astype(np.uint32), check_part(rolling.of(start, length), salt)


def _mix(hashes: U64, salt: int) -> U64:
    """Salted finaliser: every input bit reaches the upper bits, which are the ones that are used."""
    h = hashes ^ np.uint64(salt)
    h ^= h >> np.uint64(32)
    h *= np.uint64(0x9FB21C651E98DF25)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0xD6E8FEB86659FD93)
    h ^= h >> np.uint64(32)
    return h


_kept: tuple[U64, U64] = (np.ones(1, dtype=np.uint64), np.ones(1, dtype=np.uint64))


def _powers(count: int) -> tuple[U64, U64]:
    """``B^i`` and ``B^-i`` for i below at least ``count``. Replaced as one tuple, so threads need no lock."""
    global _kept
    kept = _kept
    if len(kept[0]) >= count:
        return kept
    size = 1 << max(14, (count - 1).bit_length())
    fresh = _power_table(_BASE, size), _power_table(_INVERSE, size)
    if size <= 2 * _KEEP:
        _kept = fresh
    return fresh


def _power_table(base: int, size: int) -> U64:
    table = np.full(size, base, dtype=np.uint64)
    table[0] = 1
    return np.cumprod(table, dtype=np.uint64)
