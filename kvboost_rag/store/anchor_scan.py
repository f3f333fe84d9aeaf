"""One search of one prompt: which windows are anchors, and which of them begin a known text in full.

The work is done for all windows at once, and lazily from left to right: as soon as a text is proved, everything under
it is skipped. So the cost is flat in the number of known texts, and a prompt made to defeat the index (one anchor
repeated thousands of times, thousands of texts that begin alike) costs time linear in its length.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvboost_rag.store.anchor_hash import (
    ANCHOR_CHARS,
    I64,
    MIDDLE_CHARS,
    MIDDLE_MASK,
    Rolling,
    Salts,
    anchor_part,
    check_part,
    code_points,
    middle_part,
    text_digest,
)
from kvboost_rag.store.anchor_table import Slab, View, bisect, expand

log = logging.getLogger(__name__)

_BLOCK = 1 << 16  # (window, length) pairs looked at together
_MOST_PAIRS, _MOST_PAIRS_PER_CHAR = 1 << 21, 256  # of one search; beyond, texts stay unfound: slower, never wrong
_CUT_RECORDS = 32  # looked at per place
_CUT_TEXTS = 8  # reported per place


@dataclass(frozen=True, slots=True)
class Found:
    """A known text in full: characters ``[start, end)``, and the raw digests of its keys in the order of adding."""

    start: int
    end: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Candidates of one block of rows, by start, then longest first."""

    start: I64
    length: I64
    low: I64  # records [low, high) of the local slab have this length; the check is met from low on
    high: I64


class Scan:
    """The search of ``text`` in ``view``. Call :meth:`next` with rising cursors, then :meth:`cuts`."""

    def __init__(self, text: str, salt: Salts, view: View) -> None:
        self._text, self._salt, self._view = text, salt, view
        codes = code_points(text)
        self._rolling = Rolling(codes)
        self._budget = _MOST_PAIRS + _MOST_PAIRS_PER_CHAR * len(codes)
        self._starts, self._anchors = self._windows(len(codes))
        self._lay_rows(*self._rows(len(codes)), len(codes))
        self._pairs: list[_Pairs] = []
        self._row = self._pair = 0

    # -- windows that are anchors ----------------------------------------------------------------------------------

    def _windows(self, size: int) -> tuple[I64, NDArray[np.uint64]]:
        """Start of every window that begins some known text, and the upper part of its anchor."""
        if size < ANCHOR_CHARS:
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        anchors = anchor_part(self._rolling.windows(ANCHOR_CHARS), self._salt)
        starts = np.flatnonzero(self._view.bitmap.test(anchors))
        anchors = anchors[starts]
        hit = np.zeros(len(starts), dtype=bool)
        for slab in self._view.slabs:
            hit |= slab.any(anchors, anchors | MIDDLE_MASK)
        return starts[hit], anchors[hit]

    def _rows(self, size: int) -> tuple[I64, NDArray[np.uint64]]:
        """(start, whole anchor): each window once for texts of 128 characters and more, and once for shorter ones."""
        fits = self._starts + MIDDLE_CHARS <= size
        long = self._starts[fits]
        middle = middle_part(self._rolling.of(long, MIDDLE_CHARS), self._salt)
        start = np.concatenate([long, self._starts])
        anchor = np.concatenate([self._anchors[fits] | middle, self._anchors])
        order = np.argsort(start, kind="stable")  # stable: the longer texts stay first
        return start[order], anchor[order]

    def _lay_rows(self, start: I64, anchor: NDArray[np.uint64], size: int) -> None:
        """Copy what may match into one small slab, find its runs of one length, and the runs of each row."""
        local = self._local = self._view.gather(np.unique(anchor))
        fresh = np.ones(len(local) + 1, dtype=bool)
        fresh[1:-1] = (local.anchor[1:] != local.anchor[:-1]) | (local.length[1:] != local.length[:-1])
        self._run = np.flatnonzero(fresh)  # run r holds the records [run[r], run[r + 1])
        runs = local.take(self._run[:-1])
        self._run_length = runs.length.astype(np.int64)
        low, high = runs.ranges(anchor, anchor)
        high = bisect(self._run_length, size - start + 1, low, high)  # longer ones would not fit
        kept = low < high
        self._row_start, self._row_low, self._row_high = start[kept], low[kept], high[kept]
        self._row_pairs = np.concatenate([[0], np.cumsum(self._row_high - self._row_low)])

    # -- known texts in full ---------------------------------------------------------------------------------------

    def next(self, cursor: int) -> Found | None:
        """The leftmost known text that starts at ``cursor`` or later, and of several there the longest."""
        while True:
            while self._pairs:
                pairs = self._pairs[0]
                self._pair = max(self._pair, int(np.searchsorted(pairs.start, cursor)))
                if self._pair >= len(pairs.start):
                    self._pairs.clear()
                    break
                found = self._prove(pairs, self._pair)
                if found:
                    return found
                self._pair += 1
                if self._spend(int(pairs.length[self._pair - 1]) >> 6):
                    return None
            self._row = max(self._row, int(np.searchsorted(self._row_start, cursor)))
            if self._row >= len(self._row_start):
                return None
            self._next_block()

    def _next_block(self) -> None:
        """Compare the next rows with every length that they could have."""
        first = self._row
        done = self._row_pairs[first]
        stop = max(first + 1, int(np.searchsorted(self._row_pairs, done + _BLOCK, "right")) - 1)
        self._row = stop
        if self._spend(int(self._row_pairs[stop] - done)):
            return
        owner, member = expand(self._row_low[first:stop], self._row_high[first:stop])
        owner += first
        run = self._row_high[owner] - 1 - (member - self._row_low[owner])  # longest first
        start, length = self._row_start[owner], self._run_length[run]
        check = check_part(self._rolling.of(start, length), self._salt)
        high = self._run[run + 1]
        low = bisect(self._local.check, check, self._run[run], high)
        met = np.flatnonzero(low < high)
        met = met[self._local.check[low[met]] == check[met]]
        self._pairs, self._pair = [_Pairs(start[met], length[met], low[met], high[met])], 0

    def _spend(self, work: int) -> bool:
        """Whether the work allowed for one search is used up; then nothing more is found."""
        self._budget -= work
        if self._budget >= 0:
            return False
        log.debug("gave up looking for known texts at character %d", self._row_start[self._row - 1])
        self._row = len(self._row_start)
        self._pairs.clear()
        return True

    def _prove(self, pairs: _Pairs, i: int) -> Found | None:
        start, length = int(pairs.start[i]), int(pairs.length[i])
        low, high = int(pairs.low[i]), int(pairs.high[i])
        digest = text_digest(self._text[start : start + length], self._salt.digest)
        keys = []
        for record in range(low, high):
            if self._local.check[record] != self._local.check[low]:
                break
            body = self._view.body(int(self._local.payload[record]))
            if body[:16] == digest:
                keys.append(body[16:])
        return Found(start, start + length, tuple(keys)) if keys else None

    # -- texts whose end is missing --------------------------------------------------------------------------------

    def cuts(self, covered: list[tuple[int, int]], most: int) -> list[tuple[int, list[tuple[bytes, int]]]]:
        """The first ``most`` windows outside the sorted ``covered`` spans where a known text begins:
        (start, [(key digest, characters of the whole text)]), longest text first."""
        if not len(self._starts):
            return []
        begins = np.array([start for start, _ in covered], dtype=np.int64)
        ends = np.array([0] + [end for _, end in covered], dtype=np.int64)
        free = np.flatnonzero(self._starts >= ends[np.searchsorted(begins, self._starts, "right")])[:most]
        middle = self._middles(self._starts[free])
        cache: dict[int, list[tuple[bytes, int]]] = {}
        result = []
        for i, whole in zip(free, self._anchors[free] | middle, strict=True):
            low, high = (int(end[0]) for end in self._local.ranges(*[np.array([whole])] * 2))
            proved = bool(whole & MIDDLE_MASK) and low < high  # 128 characters agree, not only 32
            key = int(whole if proved else self._anchors[i])
            if key not in cache:
                cache[key] = self._texts(self._longest(low, high) if proved else self._short(self._anchors[i]))
            if cache[key]:
                result.append((int(self._starts[i]), cache[key]))
        return result

    def _middles(self, starts: I64) -> NDArray[np.uint64]:
        """The lower part of each window's anchor; 0 where fewer than 128 characters are left."""
        result = np.zeros(len(starts), dtype=np.uint64)
        fits = starts + MIDDLE_CHARS <= len(self._text)
        result[fits] = middle_part(self._rolling.of(starts[fits], MIDDLE_CHARS), self._salt)
        return result

    def _longest(self, low: int, high: int) -> Slab:
        """The longest texts of a local range, which is sorted by length."""
        return self._local.take(np.arange(max(low, high - _CUT_RECORDS), high)[::-1])

    def _short(self, anchor: np.uint64) -> Slab:
        """Texts that agree in their first 32 characters only: so short that what is here may be half of one."""
        first = np.array([anchor])
        return self._view.longest(first, first | MIDDLE_MASK, 2 * MIDDLE_CHARS - 1, _CUT_RECORDS)

    def _texts(self, candidates: Slab) -> list[tuple[bytes, int]]:
        seen: set[bytes] = set()
        result = []
        for length, reference in zip(candidates.length, candidates.payload, strict=True):
            body = self._view.body(int(reference))
            seen.add(body[:16])
            if len(seen) > _CUT_TEXTS:
                break
            result.append((body[16:], int(length)))
        return result
