"""The blocks that a request was composed of, for a tier in front that takes them when the answer is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvboost_rag.engine.lookup import Found
from kvboost_rag.kv.block import Block
from kvboost_rag.store.arriving import ArrivingBlock
from kvboost_rag.store.base import BlockStore


@dataclass(slots=True)
class Used:
    """``near`` are the keys of those that lay in front, ``far`` the others, kept until they are promoted; ``since`` are
    the store's deletions before the look-up. Empty where the store has no such tier."""

    since: int = 0
    near: list[str] = field(default_factory=list)
    far: list[Block | ArrivingBlock] = field(default_factory=list)

    def note(self, found: Iterable[Found], store: BlockStore) -> None:
        """These were laid."""
        if store.device is None:
            return
        front = store.levels()[0]
        for f in found:
            if f.block is None:
                continue
            if front.contains(f.block.key):
                self.near.append(f.block.key)
            else:
                self.far.append(f.block)

    def promote(self, store: BlockStore) -> None:
        """Have them all in front from now on, as far as they fit."""
        blocks = [whole for block in self.far if (whole := _whole(block)) is not None]
        self.far.clear()
        if blocks:
            store.promote(blocks, self.since, self.near)


def _whole(block: Block | ArrivingBlock) -> Block | None:
    return block if isinstance(block, Block) else block.whole
