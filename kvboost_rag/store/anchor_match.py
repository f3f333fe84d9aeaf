"""What a search of a prompt gives, and the rule of choosing spans: leftmost, then longest, never overlapping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvboost_rag.keys import KEY_PREFIX
from kvboost_rag.store.anchor_scan import Scan

_MOST_CUTS = 64  # places reported per prompt


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters ``[start, end)`` of a prompt that are a known or named text.

    ``keys`` are all keys that this text was added with, oldest first; empty if only the caller named it. The index
    itself reports no ``cut`` spans: whoever proves a :class:`CutCandidate` makes one.
    """

    start: int
    end: int
    keys: tuple[str, ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class CutCandidate:
    """At ``start`` a known text seems to begin that is not here in full: its first 32 characters agree (128 where the
    prompt has as many and such a text is known). Not proved: compare the block's token ids.

    ``keys`` belong to at most 8 texts, longest text first; ``lengths`` are those texts' characters, one per key.
    """

    start: int
    keys: tuple[str, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matches:
    """What :meth:`AnchorIndex.find` found: sorted spans that never overlap, and cut candidates outside them."""

    spans: tuple[TextSpan, ...] = ()
    cuts: tuple[CutCandidate, ...] = ()


def match(scan: Scan, text: str, extra: Sequence[str]) -> Matches:
    """The spans that ``scan`` finds in ``text``, merged with the occurrences of ``extra``, and the cut candidates."""
    spans = tuple(_select(scan, _Named(text, extra)))
    cuts = scan.cuts([(span.start, span.end) for span in spans], _MOST_CUTS)
    return Matches(spans, tuple(_candidate(start, texts) for start, texts in cuts))


class _Named:
    """The texts that the caller named: the next occurrence of each, found lazily."""

    def __init__(self, text: str, named: Sequence[str]) -> None:
        self._text = text
        wanted = dict.fromkeys(stripped for item in named if (stripped := item.strip()))
        self._next = {item: text.find(item) for item in wanted}

    def next(self, cursor: int) -> tuple[int, int] | None:
        """The leftmost ``(start, end)`` at ``cursor`` or later, the longest of several there."""
        for item, start in list(self._next.items()):
            if 0 <= start < cursor:
                start = self._next[item] = self._text.find(item, cursor)
            if start < 0:
                del self._next[item]
        best = min(((start, -len(item)) for item, start in self._next.items()), default=None)
        return (best[0], best[0] - best[1]) if best else None


def _select(scan: Scan, named: _Named) -> Iterator[TextSpan]:
    cursor = 0
    known = scan.next(cursor)
    while True:
        if known and known.start < cursor:
            known = scan.next(cursor)
        other = named.next(cursor)
        if known and (not other or (known.start, -known.end) <= (other[0], -other[1])):
            span = TextSpan(known.start, known.end, _keys(known.digests))
        elif other:
            span = TextSpan(*other)
        else:
            return
        yield span
        cursor = span.end


def _keys(digests: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(KEY_PREFIX + digest.hex() for digest in digests)


def _candidate(start: int, texts: list[tuple[bytes, int]]) -> CutCandidate:
    return CutCandidate(start, _keys(digest for digest, _ in texts), tuple(length for _, length in texts))
