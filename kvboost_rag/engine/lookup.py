"""Look up the blocks of a prompt's chunks, and say why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost_rag.chunk import Segment
from kvboost_rag.engine.encode import ChunkEncoder
from kvboost_rag.keys import block_key, context_digest
from kvboost_rag.kv.block import Block
from kvboost_rag.store.arriving import ArrivingBlock
from kvboost_rag.store.base import BlockStore, Miss


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk segment with its block, which may still be on its way, or with the reason for a miss. ``exact``: computed
    after this very head, and not compressed."""

    segment: Segment
    block: Block | ArrivingBlock | None
    exact: bool
    reason: str


class BlockFinder:
    """Finds blocks for chunk segments: for the first chunk straight after the head an own-head block is preferred;
    everywhere else the canonical-context block serves. With ``overlap``, blocks of slow tiers are handed out while
    their layers are still on their way."""

    def __init__(self, encoder: ChunkEncoder, store: BlockStore, *, overlap: bool = True) -> None:
        self.encoder = encoder
        self.store = store
        self.overlap = overlap and store.arrives

    def find(self, segments: Sequence[Segment], token_ids: tuple[int, ...], start: int = 0) -> list[Found]:
        """One :class:`Found` per chunk segment that begins at or after token ``start``, in order."""
        chunks = [s for s in segments if s.kind == "chunk" and s.start >= start]
        wanted = [(s, self._own_head_key(s, segments, token_ids), self.key(s)) for s in chunks]
        first_try = [own or key for _, own, key in wanted]
        results = self.store.open_many(first_try) if self.overlap else self.store.get_many(first_try)
        return [
            self._judge(segment, own, key, result) for (segment, own, key), result in zip(wanted, results, strict=True)
        ]

    def without(self, found: Found, miss: Miss) -> Found:
        """What serves in place of a block that was lost on its way: the canonical one where it was of the own head,
        another tier's, or nothing, with the reason."""
        assert found.block is not None, "only a block can be lost"
        key, lost = self.key(found.segment), found.block.key
        if lost != key:
            return self._judge(found.segment, lost, key, miss)
        if miss.reason != "unavailable" and self.store.contains(key):
            again = self.store.get(key)
            return self._judge(found.segment, None, key, miss if isinstance(again, Miss) else again)
        return self._judge(found.segment, None, key, miss)

    def key(self, segment: Segment) -> str:
        """The key of the canonical-context block of a chunk segment."""
        return segment.keys[0] if segment.cut else self.encoder.key(segment.token_ids)

    def _own_head_key(self, segment: Segment, segments: Sequence[Segment], ids: tuple[int, ...]) -> str | None:
        """The key of a block computed after exactly the tokens in front of this chunk, if that is the first chunk."""
        if segment.cut or any(s.kind == "chunk" and s.start < segment.start for s in segments):
            return None
        head = context_digest(ids[: segment.start])
        key = block_key(self.encoder.adapter.fingerprint.digest, head, segment.token_ids, self.encoder.salt)
        return key if self.store.contains(key) else None

    def _judge(self, segment: Segment, own: str | None, key: str, result: Block | ArrivingBlock | Miss) -> Found:
        if own is not None:
            if not isinstance(result, Miss):
                exact = result.header.compression == "none"  # what was rounded is repaired like any other block
                return Found(segment, result, exact, "block of this very head" + _rounding(result))
            result = self.store.get(key)
        if isinstance(result, Miss):
            detail = f": {result.detail}" if result.detail else ""
            return Found(segment, None, False, result.reason + detail)
        problem = self._mismatch(segment, result)
        if problem:
            if isinstance(result, ArrivingBlock):
                result.abandon()
            return Found(segment, None, False, problem)
        what = "cut-off chunk: block's prefix" if segment.cut else "canonical block"
        return Found(segment, result, False, what + _rounding(result))

    def _mismatch(self, segment: Segment, block: Block | ArrivingBlock) -> str:
        """Why this block must not serve this segment ("" if it may). The index is never proof."""
        n = len(segment.token_ids)
        if block.token_ids[:n] != segment.token_ids or (n < block.num_tokens and not segment.cut):
            return "mismatch: token ids"
        header = block.header
        if header.fingerprint != self.encoder.adapter.fingerprint.digest:
            return "mismatch: another model"
        if header.salt != self.encoder.salt or header.context != self.encoder.context_digest():
            return "mismatch: another context or tenant"
        spec = self.encoder.adapter.spec
        shape = (spec.num_layers, 2, spec.num_kv_heads, block.num_tokens, spec.head_dim)
        return "" if tuple(block.kv.shape) == shape else "mismatch: shape"


def _rounding(block: Block | ArrivingBlock) -> str:
    compression = block.header.compression
    return "" if compression == "none" else f", {compression}"
