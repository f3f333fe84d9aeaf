"""The blocks that a request was composed of, for what is done with them when the answer is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvboost_rag.engine.lookup import Found
from kvboost_rag.errors import StoreError
from kvboost_rag.kv.block import Block
from kvboost_rag.store.arriving import ArrivingBlock
from kvboost_rag.store.base import BlockStore


@dataclass(slots=True)
class Used:
    """Where the store has a tier in front that takes blocks after the answer: ``near`` are the keys of those that lay
    there, ``far`` the others, kept until they are promoted, and ``since`` the store's deletions before the look-up.
    Where it has none, ``far`` are those that came while the forward ran, and that the forward left no time to count."""

    since: int = 0
    near: list[str] = field(default_factory=list)
    far: list[Block | ArrivingBlock] = field(default_factory=list)

    def note(self, found: Iterable[Found], store: BlockStore) -> None:
        """These were laid."""
        front = store.levels()[0] if store.device is not None else None
        for block in [f.block for f in found if f.block is not None]:
            if front is not None and front.contains(block.key):
                self.near.append(block.key)
            elif front is not None or (isinstance(block, ArrivingBlock) and block.whole is None):
                self.far.append(block)

    def promote(self, store: BlockStore) -> None:
        """Have them all in front from now on, as far as they fit.

        Raises:
            StoreError: a store broke while it took a block, which no store should.
        """
        blocks = [whole for block in self.far if (whole := _whole(block)) is not None]
        self.far.clear()
        if blocks:
            store.promote(blocks, self.since, self.near)
            self.near += [block.key for block in blocks]


def _whole(block: Block | ArrivingBlock) -> Block | None:
    if isinstance(block, Block):
        return block
    try:
        return block.finish() or block.whole
    except Exception as error:
        raise StoreError(f"a store failed while it took a block: {error!r}") from error
