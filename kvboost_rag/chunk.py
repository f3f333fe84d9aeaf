"""The shared nouns of a prompt: segments of text and the tokens they became.

A prompt is a list of segments in order. Token positions are half-open intervals::

    | head (glue) | chunk 0 | glue | chunk 1 | ... | question (glue) |
    0             a         b      c         d                       num_tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

SegmentKind = Literal["glue", "chunk"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the rendered prompt and its token ids.

    ``keys`` are hints from the anchor index (blocks that this very text was stored as). ``cut`` marks a chunk whose
    tail is missing from the prompt: it may reuse the first ``len(token_ids)`` tokens of the block under ``keys[0]``.
    """

    kind: SegmentKind
    text: str
    token_ids: tuple[int, ...]
    start: int  # first token position
    keys: tuple[str, ...] = ()
    cut: bool = False
    explicit: bool = False  # named by the caller in chunks=[...]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered, segmented, tokenised prompt."""

    text: str
    segments: tuple[Segment, ...]
    unmatched: tuple[str, ...] = ()  # chunks the caller named that are not in the text
    refused: tuple[str, ...] = ()  # known chunks that the tokenizer does not give back: plain glue
    token_ids: tuple[int, ...] = field(default=())
    contents: tuple[tuple[int, int], ...] = ()  # characters that came from messages: no control tokens in there

    def __post_init__(self) -> None:
        if not self.token_ids:
            ids = tuple(i for segment in self.segments for i in segment.token_ids)
            object.__setattr__(self, "token_ids", ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def chunks(self) -> list[Segment]:
        """The chunk segments, in order."""
        return [s for s in self.segments if s.kind == "chunk"]


def place(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Give every segment its start position; drops empty ones and merges neighbouring glue."""
    out: list[Segment] = []
    position = 0
    for s in segments:
        if not s.token_ids:
            continue
        if s.kind == "glue" and out and out[-1].kind == "glue":
            last = out.pop()
            s = Segment("glue", last.text + s.text, last.token_ids + s.token_ids, last.start)
        else:
            s = Segment(s.kind, s.text, s.token_ids, position, s.keys, s.cut, s.explicit)
        out.append(s)
        position = s.end
    return tuple(out)
