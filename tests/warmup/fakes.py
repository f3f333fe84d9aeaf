"""An encoder without a model, over a real store."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from kvboost_rag.errors import TokenizerError
from kvboost_rag.keys import block_key, context_digest
from kvboost_rag.kv.block import Block, BlockHeader
from kvboost_rag.store.memory import MemoryStore

FINGERPRINT = "fp1:fake"


class RefusingStore(MemoryStore):
    """A store that has no room for some blocks."""

    def __init__(self, room: int = 0) -> None:
        super().__init__()
        self.room = room

    def put(self, block: Block) -> bool:
        if self.contains(block.key):
            return True
        self.room -= 1
        return self.room >= 0 and super().put(block)


class FakeEncoder:
    """One token per word. ``batches`` records ``(context, lengths)`` of each forward that succeeded."""

    bytes_per_token = 8
    max_chunk_tokens = 100
    packs = False
    max_batch_tokens: int | None = None

    def __init__(self, store: MemoryStore | None = None, head: str | None = None) -> None:
        self.store = store if store is not None else MemoryStore()
        self.head = None if head is None else context_digest(self._ids(head))
        self.registered: dict[str, str] = {}
        self.batches: list[tuple[str, list[int]]] = []
        self.slots_limit = 10**9  # more padded tokens than this raise "out of memory"
        self.poison: set[str] = set()  # texts whose forward raises
        self.interrupt_at: int | None = None  # the number of the forward at which Ctrl-C is pressed

    @staticmethod
    def _ids(text: str) -> tuple[int, ...]:
        return tuple(zlib.crc32(word.encode()) >> 1 for word in text.split())

    def tokenize(self, text: str) -> tuple[int, ...]:
        assert text == text.strip()
        if "untokenizable" in text:
            raise TokenizerError("text does not round-trip")
        return self._ids(text)

    def key(self, token_ids: Sequence[int], context: str = "canonical") -> str:
        return block_key(FINGERPRINT, context, token_ids)

    def contexts(self) -> list[str]:
        return ["canonical"] if self.head is None else ["canonical", self.head]

    def encode(
        self,
        chunks: Sequence[tuple[int, ...]],
        *,
        texts: Sequence[str],
        context: str = "canonical",
        tags: Sequence[str] = (),
    ) -> list[Block]:
        if self.interrupt_at == len(self.batches):
            raise KeyboardInterrupt
        if len(chunks) * max(map(len, chunks)) > self.slots_limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.poison & set(texts):
            raise ValueError("NaN in the output")
        assert [self._ids(text) for text in texts] == list(chunks)
        self.batches.append((context, [len(ids) for ids in chunks]))
        header = BlockHeader(fingerprint=FINGERPRINT, context=context, context_kind="canonical", tags=tuple(tags))
        return [Block(torch.zeros(1, 2, 1, len(ids), 1), ids, header) for ids in chunks]

    def register(self, items: Sequence[tuple[str, str]]) -> None:
        self.registered.update(items)


def text_of(number: int, words: int = 5) -> str:
    """A text of ``words`` tokens, different for every number."""
    return " ".join(f"w{number}x{i}" for i in range(words))
