"""A store whose blocks come layer by layer, when the test lets them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvboost_rag.kv.block import Block
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store import MemoryStore, Miss
from kvboost_rag.store.arriving import ArrivingBlock

PATIENCE_S = 60.0  # until a test that would hang fails


class SlowStore(MemoryStore):
    """Memory that hands out blocks as a slow tier would. ``before(key, layer)`` runs in the loader, before a layer is
    there: it may wait, or raise what a store's source raises."""

    arrives = True

    def __init__(self, before: Callable[[str, int], None] = lambda key, layer: None) -> None:
        super().__init__()
        self.before = before
        self.read: list[tuple[int, str]] = []  # (layer, key), as they came
        self.left: list[str] = []  # keys of blocks that were abandoned
        self.whole: list[str] = []

    def open_many(self, keys: Sequence[str]) -> list[Block | ArrivingBlock | Miss]:
        found = {key: self._slow(self.get(key)) for key in dict.fromkeys(keys)}
        return [found[key] for key in keys]

    def _slow(self, block: Block | Miss) -> ArrivingBlock | Miss:
        if isinstance(block, Miss):
            return block
        key, kv = block.key, block.kv.clone().fill_(float("nan"))  # what is used too early shows

        def read(index: int) -> None:
            self.before(key, index)
            kv[index] = block.kv[index]
            self.read.append((index, key))

        source = LayeredBlock(block.header, block.token_ids, kv, read)
        arriving = ArrivingBlock(source, leave=lambda: self.left.append(key))
        return arriving.then(lambda result, seconds: self.whole.append(key) if isinstance(result, Block) else None)


class Gate:
    """Layers wait here until they are let through."""

    def __init__(self, open_below: int = 0) -> None:
        self._state = threading.Condition()
        self._open = open_below

    def let(self, below: int) -> None:
        """Layers below ``below`` may pass."""
        with self._state:
            self._open = max(self._open, below)
            self._state.notify_all()

    def __call__(self, key: str, layer: int) -> None:
        with self._state:
            assert self._state.wait_for(lambda: layer < self._open, PATIENCE_S), f"layer {layer} was never let through"
