"""Rendered text to segments: find known chunks, tokenise each span on its own.

Matching happens in text, never in token space (chunk ids rarely occur contiguously in a whole-prompt tokenisation).
Spans come from the anchor index (verified against the full text's hash there) and from ``chunks=[...]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvboost_rag.chunk import Prompt, Segment, place
from kvboost_rag.engine.prefix import Held
from kvboost_rag.engine.render import Rendered
from kvboost_rag.engine.tokens import SpanTokenizer
from kvboost_rag.errors import EmptyPromptError
from kvboost_rag.store.anchor_match import CutCandidate
from kvboost_rag.store.anchors import AnchorIndex

TokensOfKey = Callable[[str], tuple[int, ...] | None]
MIN_CUT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int  # characters
    end: int
    ids: tuple[int, ...]
    keys: tuple[str, ...]
    cut: bool
    explicit: bool


class Segmenter:
    """Splits prompts for chunk reuse. ``tokens_of_key`` reads a block's token ids (to verify cut-off chunks)."""

    def __init__(self, tokens: SpanTokenizer, anchors: AnchorIndex, tokens_of_key: TokensOfKey, salt: str = "") -> None:
        self.tokens = tokens
        self.anchors = anchors
        self.tokens_of_key = tokens_of_key
        self.salt = salt

    def whole(self, rendered: Rendered) -> Prompt:
        """One glue segment, tokenised as a whole (``reuse="prefix"`` and ``"off"``)."""
        ids = self.tokens.leading(rendered.text) + self._glue(rendered, 0, len(rendered.text))
        if not ids:
            raise EmptyPromptError("the prompt renders to no tokens")
        return Prompt(rendered.text, (Segment("glue", rendered.text, ids, 0),), contents=rendered.contents)

    def split(self, rendered: Rendered, chunks: Sequence[str] = (), held: Held | None = None) -> Prompt:
        """Glue and chunk segments. ``chunks`` are texts the caller knows to be chunks. ``held`` is an earlier turn
        whose text starts this prompt: its segmentation is kept, only what follows is matched."""
        named = [c.strip() for c in chunks if c.strip()]
        refused: list[str] = []
        cursor = len(held.text) if held else 0
        segments: list[Segment] = list(held.segments) if held else []
        leading = () if held else self.tokens.leading(rendered.text)
        if leading:
            segments.append(Segment("glue", "", leading, 0))
        for p in self._pieces(rendered, named, cursor, refused):
            segments.append(self._glue_segment(rendered, cursor, p.start))
            segments.append(Segment("chunk", rendered.text[p.start : p.end], p.ids, 0, p.keys, p.cut, p.explicit))
            cursor = p.end
        segments.append(self._glue_segment(rendered, cursor, len(rendered.text)))
        placed = place(segments)
        if not placed:
            raise EmptyPromptError("the prompt renders to no tokens")
        missing = tuple(c for c in named if c not in rendered.text)
        return Prompt(rendered.text, placed, missing, tuple(refused), contents=rendered.contents)

    def _pieces(self, rendered: Rendered, named: list[str], begin: int, refused: list[str]) -> list[_Piece]:
        matches = self.anchors.find(rendered.text, self.salt, extra=named)
        names = set(named)
        pieces: list[_Piece] = []
        for span in matches.spans:
            text = rendered.text[span.start : span.end]
            if span.start < begin or not self._inside(rendered, span.start, span.end):
                continue
            ids = self.tokens.chunk(text)
            if ids is None:
                refused.append(text)
            elif ids:
                pieces.append(_Piece(span.start, span.end, ids, span.keys, False, text in names))
        taken = [(p.start, p.end) for p in pieces]
        for cut in (c for c in matches.cuts if c.start >= begin):
            piece = self._cut_piece(rendered, cut, taken)
            if piece is not None:
                pieces.append(piece)
                taken.append((piece.start, piece.end))
        return sorted(pieces, key=lambda p: p.start)

    def _cut_piece(self, rendered: Rendered, cut: CutCandidate, taken: list[tuple[int, int]]) -> _Piece | None:
        limit = min([s for s, e in taken if s > cut.start], default=len(rendered.text))
        if any(s <= cut.start < e for s, e in taken):
            return None
        content_end = next((e for s, e in rendered.contents if s <= cut.start < e), None)
        if rendered.is_chat and content_end is None:
            return None
        available = rendered.text[cut.start : min(limit, content_end or limit)]
        best: _Piece | None = None
        for key in cut.keys:
            ids = self.tokens_of_key(key)
            if ids is None:
                continue
            kept = self._common_tokens(ids, available)
            if kept >= max(1, int(len(ids) * MIN_CUT_SHARE)) and (best is None or kept > len(best.ids)):
                length = len(self.tokens.prefix_text(ids[:kept]))
                best = _Piece(cut.start, cut.start + length, ids[:kept], (key,), kept < len(ids), False)
        return best

    def _common_tokens(self, ids: tuple[int, ...], text: str) -> int:
        """How many leading tokens spell a prefix of ``text`` exactly (binary search: prefixes are monotone)."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            spelled = self.tokens.prefix_text(ids[:middle])
            if "\ufffd" in spelled[-1:]:  # cut inside a character: judge without it
                spelled = spelled.rstrip("\ufffd")
            if text.startswith(spelled):
                low = middle
            else:
                high = middle - 1
        while low and not text.startswith(self.tokens.prefix_text(ids[:low])):
            low -= 1
        return low

    @staticmethod
    def _inside(rendered: Rendered, start: int, end: int) -> bool:
        """In a chat, chunks live inside message contents only (never across the template's own words)."""
        return not rendered.is_chat or any(s <= start and end <= e for s, e in rendered.contents)

    def _glue_segment(self, rendered: Rendered, start: int, end: int) -> Segment:
        return Segment("glue", rendered.text[start:end], self._glue(rendered, start, end), 0)

    def _glue(self, rendered: Rendered, start: int, end: int) -> tuple[int, ...]:
        """Encode ``text[start:end)``; contents are encoded apart only where they spell control tokens."""
        text = rendered.text[start:end]
        if not text:
            return ()
        contents = [(max(s, start), min(e, end)) for s, e in rendered.contents if s < end and e > start]
        if not any(self.tokens.has_added_token(rendered.text[s:e]) for s, e in contents):
            return self.tokens.literal(text, first=start == 0)
        ids: tuple[int, ...] = ()
        cursor = start
        for s, e in contents:
            ids += self.tokens.literal(rendered.text[cursor:s], first=cursor == 0)
            ids += self.tokens.plain(rendered.text[s:e], first=s == 0)
            cursor = e
        return ids + self.tokens.literal(rendered.text[cursor:end], first=cursor == 0)
