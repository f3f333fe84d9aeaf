"""Chunks on their way to the encoder: this shard's, each text once, tokenised, with the blocks that it still lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvboost_rag.errors import KVBoostError
from kvboost_rag.warmup.encoder import CANONICAL, Encoder
from kvboost_rag.warmup.source import InputProblem, Shard, SourceChunk, as_chunk, check_shard, shard_of, text_digest


@dataclass(slots=True)
class Item:
    """One chunk to be warmed. ``missing`` lists the contexts whose block the store lacks; it shrinks as they arrive."""

    chunk: SourceChunk
    text: str  # stripped
    ids: tuple[int, ...]
    key: str  # of the canonical block
    missing: list[str]
    failed: bool = False


class Intake:
    """Turns chunks into items; what cannot become one is counted in ``failed`` and told in ``problems``."""

    def __init__(self, encoder: Encoder, shard: Shard | None = None) -> None:
        check_shard(shard)
        self.problems: list[InputProblem] = []
        self.failed = 0
        self._encoder = encoder
        self._shard = shard
        self._contexts = encoder.contexts()
        self._limit = encoder.max_chunk_tokens
        self._seen: set[bytes] = set()

    def items(self, chunks: Iterable[SourceChunk | str]) -> Iterator[Item]:
        """The items of ``chunks``, in order, one per distinct stripped text of this shard."""
        for entry in chunks:
            chunk = as_chunk(entry)
            try:
                digest = text_digest(chunk.text)
            except UnicodeEncodeError:
                self._refuse(chunk, "text holds an unpaired surrogate")
                continue
            if digest in self._seen or (self._shard and shard_of(digest, self._shard[1]) != self._shard[0]):
                continue
            self._seen.add(digest)
            item = self._item(chunk)
            if isinstance(item, Item):
                yield item
            else:
                self._refuse(chunk, item)

    def _item(self, chunk: SourceChunk) -> Item | str:
        """The item, or why there is none."""
        text = chunk.text.strip()
        if not text:
            return "empty text"
        try:
            ids = self._encoder.tokenize(text)
        except KVBoostError as exc:  # a text that this tokenizer cannot round-trip
            return str(exc)
        if not ids:
            return "text of no tokens"
        if len(ids) > self._limit:
            return f"chunk of {len(ids)} tokens; the model's window leaves room for {self._limit}"
        missing = [c for c in self._contexts if not self._encoder.store.contains(self._encoder.key(ids, c))]
        return Item(chunk, text, ids, self._encoder.key(ids, CANONICAL), missing)

    def _refuse(self, chunk: SourceChunk, reason: str) -> None:
        self.failed += 1
        self.problems.append(InputProblem(chunk.source, chunk.line, reason))
