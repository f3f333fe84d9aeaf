"""Stores behind one another: fast and small first. Look-ups go down, what is used moves up, writes go to all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.store.base import BlockStore, Miss, Problem, StoreStats
from kvboost_rag.store.counters import Counters


class TieredStore(BlockStore):
    """``tiers``, fastest first. The last one keeps the manifest and the known texts, and says what is held.

    Raises:
        UsageError: no tiers.
    """

    def __init__(self, tiers: Sequence[BlockStore]) -> None:
        if not tiers:
            raise UsageError("a tiered store without tiers", hint="give at least one store")
        self.tiers = list(tiers)
        self.anchors = self.tiers[-1].anchors
        self._counters = Counters()

    def get(self, key: str) -> Block | Miss:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[Block | Miss]:
        found: dict[str, Block | Miss] = {}
        open_keys = list(dict.fromkeys(keys))
        for depth, tier in enumerate(self.tiers):
            for key, result in zip(open_keys, tier.get_many(open_keys), strict=True):
                if isinstance(result, Block):
                    self._spread(result, depth)
                found[key] = _better(found.get(key), result)
            open_keys = [key for key in open_keys if isinstance(found[key], Miss)]
            if not open_keys:
                break
        return [self._counters.result(found[key]) for key in keys]

    def _spread(self, block: Block, depth: int) -> None:
        """Up goes the block, down goes the news of its use: what is hot above must not be evicted below."""
        for tier in self.tiers[:depth]:
            tier.put(block)
        for tier in self.tiers[depth + 1 :]:
            tier.touch(block.key)

    def touch(self, key: str) -> None:
        for tier in self.tiers:
            tier.touch(key)

    def put(self, block: Block) -> bool:
        kept = [tier.put(block) for tier in self.tiers]
        self._counters.count("writes" if any(kept) else "skipped_writes")
        return any(kept)

    def contains(self, key: str) -> bool:
        return any(tier.contains(key) for tier in self.tiers)

    def delete(self, key: str) -> bool:
        return any([tier.delete(key) for tier in self.tiers])

    def keys(self) -> Iterator[str]:
        return iter({key for tier in self.tiers for key in tier.keys()})  # noqa: SIM118 - a store is not a dict

    def stats(self) -> StoreStats:
        """Hits and misses as the caller saw them; sizes of the last tier; every tier's own under ``tiers``."""
        stats = self._counters.stats("tiered")
        stats.tiers = [tier.stats() for tier in self.tiers]
        last = stats.tiers[-1]
        stats.blocks, stats.bytes, stats.limit_bytes = last.blocks, last.bytes, last.limit_bytes
        stats.known_chunks, stats.evictions = last.known_chunks, last.evictions
        return stats

    def check(self, fix: bool = False) -> list[Problem]:
        return [problem for tier in self.tiers for problem in tier.check(fix)]

    def clear(self) -> int:
        return max([tier.clear() for tier in self.tiers])

    def get_meta(self, name: str) -> bytes | None:
        return self.tiers[-1].get_meta(name)

    def put_meta(self, name: str, value: bytes) -> bytes:
        return self.tiers[-1].put_meta(name, value)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def _better(known: Block | Miss | None, result: Block | Miss) -> Block | Miss:
    """Of two tiers' answers: the block, else the miss that says more than that nothing is there."""
    if known is None or isinstance(result, Block) or isinstance(known, Block):
        return result
    return result if known.reason == "absent" else known
