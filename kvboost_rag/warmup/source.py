"""Nouns of ingest: a chunk with its origin, a problem with an input, and the hash that dedupes and shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from kvboost_rag.errors import UsageError

Shard = tuple[int, int]  # (i, n): the i-th of n shards, 1 <= i <= n


@dataclass(frozen=True, slots=True)
class SourceChunk:
    """One chunk exactly as a retriever returns it, and where it came from. Equality is by all fields."""

    text: str
    source: str = ""  # file name, "-" for stdin, "" for texts handed over in memory
    line: int | None = None  # 1-based line of a text or .jsonl file; None where lines mean nothing (pdf, html)
    id: str = ""  # the id of a ready chunk in a .jsonl file
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InputProblem:
    """One input that could not be used; the rest went on."""

    source: str
    line: int | None
    reason: str

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict."""
        return asdict(self)

    def __str__(self) -> str:
        place = self.source or "text"
        return f"{place}:{self.line}: {self.reason}" if self.line is not None else f"{place}: {self.reason}"


def as_chunk(item: SourceChunk | str) -> SourceChunk:
    """A plain string as a chunk of no known origin.

    Raises:
        UsageError: ``item`` is neither a string nor a :class:`SourceChunk`.
    """
    if isinstance(item, SourceChunk):
        return item
    if isinstance(item, str):
        return SourceChunk(item)
    raise UsageError(
        f"a chunk must be a str or a SourceChunk, got {type(item).__name__}",
        hint="pass documents' texts, for example [d.page_content for d in documents]",
    )


def text_digest(text: str) -> bytes:
    """16 bytes that stand for the stripped text, the same in every process and on every machine.

    Raises:
        UnicodeEncodeError: the text holds an unpaired surrogate, which no tokenizer can encode.
    """
    return hashlib.blake2b(text.strip().encode("utf-8"), digest_size=16).digest()


def shard_of(digest: bytes, count: int) -> int:
    """The shard, ``1..count``, that the text behind ``digest`` belongs to."""
    return int.from_bytes(digest[:8], "little") % count + 1


def check_shard(shard: Shard | None) -> None:
    """Raises :class:`UsageError` unless ``shard`` is None or ``(i, n)`` with ``1 <= i <= n``."""
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise UsageError(f"no such shard: {shard[0]}/{shard[1]}", hint="shards count from 1/n to n/n")


def unique(chunks: Iterable[SourceChunk]) -> Iterator[SourceChunk]:
    """``chunks`` without repeated, empty and unencodable texts, order kept. Holds 16 bytes per text, not the texts."""
    seen: set[bytes] = set()
    for chunk in chunks:
        try:
            digest = text_digest(chunk.text)
        except UnicodeEncodeError:
            continue
        if digest not in seen and chunk.text.strip():
            seen.add(digest)
            yield chunk
