"""The anchor index's table: sorted slabs of known texts behind one bitmap.

A record is 64 bytes, little-endian. New records become a small sorted slab; slabs of similar size are merged, so that
there are never many (a log-structured tree). The bitmap turns away nearly every window of a prompt that is no anchor,
whatever the number of known texts. Slabs are never changed once built, so a :class:`View` is searched without a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvboost_rag.store.anchor_hash import I64, U16, U32, U64

RECORD = np.dtype(
    [
        ("anchor", "<u8"),  # 40 bits of the first 32 characters, 24 bits of the first 128 (0 for shorter texts)
        ("length", "<u4"),  # characters
        ("check", "<u2"),  # of the whole text
        ("sum", "<u2"),  # of this record's other bytes
        ("body", "V48"),  # 128-bit hash of the text, then the 32 raw bytes of the key's digest
    ]
)
Records = NDArray[np.void]  # of dtype RECORD
Payload = NDArray[Any]  # "V48" bodies, or "<u4" row numbers in the file
Resolve = Callable[["Slab", int], bytes]

_SMALL = 4096  # slabs below this are merged at once
_MIN_BITS = 16
_MAPPED = 1 << 17  # bytes of a column


def record_sums(records: Records) -> U16:
    """The checksum that each record should carry."""
    words = np.ascontiguousarray(records).view("<u8").reshape(-1, 8).copy()
    words[:, 1] &= (1 << 48) - 1
    words *= _WEIGHTS
    sums: U64 = words.sum(axis=1, dtype=np.uint64)
    return (sums >> np.uint64(48)).astype(np.uint16)


_WEIGHTS = np.array(
    [
        0x9E6C63D0676A9A99, 0xB5F2A1C7D3E94F2B, 0xC2B2AE3D27D4EB4F, 0x85EBCA77C2B2AE63,
        0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3,
    ],
    dtype=np.uint64,
)  # fmt: skip


def expand(low: I64, high: I64) -> tuple[I64, I64]:
    """All members of the ranges ``[low, high)``, one after the other: (number of the range, member)."""
    counts = high - low
    owner = np.repeat(np.arange(len(low)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner] + low[owner]


def bisect(column: NDArray[Any], values: NDArray[Any], low: I64, high: I64) -> I64:
    """``bisect_left`` of each value within its own range ``[low, high)`` of a column that is sorted there."""
    low, high = low.copy(), high.copy()
    active = np.flatnonzero(low < high)
    while active.size:
        middle = (low[active] + high[active]) >> 1
        less = column[middle] < values[active]
        low[active[less]] = middle[less] + 1
        high[active[~less]] = middle[~less]
        active = active[low[active] < high[active]]
    return low


@dataclass(frozen=True, slots=True)
class Slab:
    """Records as columns, sorted by anchor, then length, then check; equal ones stay in the order of adding."""

    anchor: U64
    length: U32
    check: U16
    payload: Payload

    def __len__(self) -> int:
        return len(self.anchor)

    def take(self, index: I64) -> Slab:
        """The chosen records, in the order of ``index``."""
        return Slab(*(_picked(column, index) for column in self.columns()))

    def columns(self) -> tuple[U64, U32, U16, Payload]:
        """Anchor, length, check, payload."""
        return self.anchor, self.length, self.check, self.payload

    def refer(self, index: I64, number: int) -> Slab:
        """The chosen records with, as payload, where they are: slab ``number`` << 32 | index."""
        return Slab(self.anchor[index], self.length[index], self.check[index], index | (number << 32))

    def sorted(self) -> Slab:
        """The same records in order."""
        order = np.argsort(self.anchor)
        anchor = self.anchor[order]
        same = anchor[1:] == anchor[:-1]
        if same.any():  # only records that share an anchor need the other columns
            member = np.zeros(len(order), dtype=bool)
            member[1:] |= same
            member[:-1] |= same
            part = np.sort(order[member])
            order[member] = part[np.lexsort((self.check[part], self.length[part], self.anchor[part]))]
        return self.take(order)

    def any(self, first: U64, last: U64) -> NDArray[np.bool_]:
        """Whether some anchor lies in each closed interval ``[first, last]``."""
        low = np.searchsorted(self.anchor, first)
        inside = low < len(self)
        inside[inside] = self.anchor[low[inside]] <= last[inside]
        return inside

    def ranges(self, first: U64, last: U64) -> tuple[I64, I64]:
        """Where the anchors of each closed interval ``[first, last]`` lie: ``[low, high)``."""
        return np.searchsorted(self.anchor, first, "left"), np.searchsorted(self.anchor, last, "right")


def join(slabs: list[Slab]) -> Slab:
    """One slab of all records, unsorted."""
    return Slab(*(_joined(list(columns)) for columns in zip(*(s.columns() for s in slabs), strict=True)))


def _joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(columns, out=_space(sum(map(len, columns)), columns[0].dtype))


def _picked(column: NDArray[Any], index: I64) -> NDArray[Any]:
    return np.take(column, index, out=_space(len(index), column.dtype), mode="clip")


def _space(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array to fill. Big ones are mapped: the heap would keep the holes that replaced slabs leave in it."""
    if count * dtype.itemsize < _MAPPED:
        return np.empty(count, dtype)
    return np.frombuffer(mmap(-1, count * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS), dtype)


class Bitmap:
    """Which upper anchor bits occur at all. At least 8 bits per record: one window in eight passes by chance."""

    def __init__(self, capacity: int) -> None:
        self.bits = max(_MIN_BITS, (8 * capacity - 1).bit_length())
        self.capacity = (1 << self.bits) // 8
        self._bytes = np.zeros(1 << (self.bits - 3), dtype=np.uint8)

    def add(self, anchor: U64) -> None:
        index = anchor >> (64 - self.bits)
        np.bitwise_or.at(self._bytes, index >> 3, np.left_shift(1, index & 7).astype(np.uint8))

    def test(self, anchor: U64) -> NDArray[np.bool_]:
        index = anchor >> (64 - self.bits)
        return np.asarray(self._bytes[index >> 3] >> (index & 7).astype(np.uint8) & 1, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class View:
    """What was known at one moment. ``resolve`` reads a record's body."""

    slabs: tuple[Slab, ...]
    bitmap: Bitmap
    resolve: Resolve

    def body(self, reference: int) -> bytes:
        """Text hash (16 bytes) and key digest (32 bytes) of a record named by :meth:`gather`."""
        return self.resolve(self.slabs[reference >> 32], reference & 0xFFFFFFFF)

    def gather(self, anchors: U64) -> Slab:
        """Every record with one of these anchors (sorted, unique), sorted; the payload is what :meth:`body` takes."""
        parts = []
        for number, slab in enumerate(self.slabs):
            low, high = slab.ranges(anchors, anchors)
            parts.append(slab.refer(expand(low, high)[1], number))
        filled = [part for part in parts if len(part)]
        if len(filled) == 1:
            return filled[0]
        return join(filled).sorted() if filled else _nothing()

    def longest(self, first: U64, last: U64, limit: int, most: int) -> Slab:
        """Of the records between two anchors that are at most ``limit`` characters long the ``most`` longest, longest
        first; the payload is what :meth:`body` takes."""
        parts = [_nothing()]
        for number, slab in enumerate(self.slabs):
            low, high = slab.ranges(first, last)
            index = low[0] + np.flatnonzero(slab.length[low[0] : high[0]] <= limit)
            if len(index) > most:
                index = index[np.argpartition(slab.length[index], -most)[-most:]]
            parts.append(slab.refer(index, number))
        chosen = join(parts)
        return chosen.take(np.argsort(chosen.length, kind="stable")[::-1][:most])

    def known(self, records: Records) -> NDArray[np.bool_]:
        """Which of these records (text and key both) are in the table."""
        result = np.zeros(len(records), dtype=bool)
        local = self.gather(np.unique(records["anchor"]))
        if not len(local):
            return result
        low, high = local.ranges(records["anchor"], records["anchor"])
        columns: tuple[tuple[NDArray[Any], NDArray[Any]], ...]
        columns = ((local.length, records["length"]), (local.check, records["check"]))
        for column, values in columns:
            wide = values.astype(np.int64)
            low, high = bisect(column, wide, low, high), bisect(column, wide + 1, low, high)
        for i in np.flatnonzero(low < high):
            body = records["body"][i].tobytes()
            result[i] = any(self.body(int(local.payload[k])) == body for k in range(low[i], high[i]))
        return result


class Table:
    """A growing set of records. Not thread-safe: the index holds its lock around every call."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._slabs: list[Slab] = []
        self._bitmap = Bitmap(0)
        self.size = 0

    def view(self) -> View:
        """What is known now; stays valid while the table grows."""
        return View(tuple(self._slabs), self._bitmap, self._resolve)

    def add(self, slab: Slab) -> None:
        """Take in records (any order) that the table does not hold yet."""
        if not len(slab):
            return
        slab = slab.sorted()
        self.size += len(slab)
        if self.size <= self._bitmap.capacity:
            self._bitmap.add(slab.anchor)
        else:
            self._widen(slab)
        while self._slabs and len(self._slabs[-1]) < max(2 * len(slab), _SMALL):
            slab = join([self._slabs.pop(), slab]).sorted()
        self._slabs.append(slab)

    def _widen(self, slab: Slab) -> None:
        bitmap = Bitmap(self.size)
        for part in (*self._slabs, slab):
            bitmap.add(part.anchor)
        self._bitmap = bitmap


def _nothing() -> Slab:
    return Slab(np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.uint16), np.empty(0, np.int64))
