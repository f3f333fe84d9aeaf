"""Stores behind one another: fast and small first. Look-ups go down, what is used moves up, writes go to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.compress import compress
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store.arriving import ArrivingBlock
from kvboost_rag.store.base import Allocate, BlockStore, Miss, Problem, StoreStats
from kvboost_rag.store.counters import Counters
from kvboost_rag.store.policy import check_write
from kvboost_rag.store.remote_queue import WriteQueue

_CLOSE_S = 60.0  # most seconds that closing waits for writes in the background

T = TypeVar("T", bound=Block | ArrivingBlock)
Asked = Callable[[BlockStore, Sequence[str]], Sequence[Block | ArrivingBlock | Miss]]


@dataclass(slots=True)
class Deletions:
    """What was on its way when something was deleted does not move up."""

    count: int = 0


class TieredStore(BlockStore):
    """``tiers``, fastest first. The last one keeps the manifest and the known texts, says what is held, and how blocks
    are compressed: every tier gets the block as the last one will give it back, so it does not matter which has it.

    Args:
        tiers: the stores; closed with this one.
        write: ``"through"``: ``put`` returns when every tier has the block; ``"back"``: when the first one has it. The
            others get it in the background (256 MiB may wait, what is more is written through), and a process that is
            killed loses what waits.

    Raises:
        UsageError: no tiers, or no such way to write.
    """

    def __init__(self, tiers: Sequence[BlockStore], *, write: str = "through") -> None:
        if not tiers:
            raise UsageError("a tiered store without tiers", hint="give at least one store")
        self.tiers = list(tiers)
        back = check_write(write) == "back" and len(tiers) > 1
        self._queue = WriteQueue(self._write_down) if back else None
        self.anchors = self.tiers[-1].anchors
        self.compression = self.tiers[-1].compression
        self.prunable = any(tier.prunable for tier in self.tiers)
        self.arrives = any(tier.arrives for tier in self.tiers)
        self._counters = Counters()
        self._deleted = Deletions()

    def get(self, key: str) -> Block | Miss:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[Block | Miss]:
        found = self._look_up(keys, lambda tier, open_keys: tier.get_many(open_keys))
        return [result for result in found if not isinstance(result, ArrivingBlock)]

    def open_many(self, keys: Sequence[str]) -> list[Block | ArrivingBlock | Miss]:
        return self._look_up(keys, lambda tier, open_keys: tier.open_many(open_keys))

    def _look_up(self, keys: Sequence[str], ask: Asked) -> list[Block | ArrivingBlock | Miss]:
        started = time.perf_counter()
        found: dict[str, Block | ArrivingBlock | Miss] = {}
        open_keys = list(dict.fromkeys(keys))
        for depth, tier in enumerate(self.tiers):
            if depth == 1:
                found |= self._waiting(open_keys)
                open_keys = [key for key in open_keys if isinstance(found[key], Miss)]
            for key, result in zip(open_keys, ask(tier, open_keys), strict=True):
                if isinstance(result, Block):
                    self._spread(result, depth)
                elif isinstance(result, ArrivingBlock):
                    result.then(partial(self._arrived, depth, self.deletions))
                found[key] = _better(found.get(key), result)
            open_keys = [key for key in open_keys if isinstance(found[key], Miss)]
            if not open_keys:
                break
        seconds = (time.perf_counter() - started) / max(1, len(keys))
        return [r if isinstance(r := found[key], ArrivingBlock) else self._counters.result(r, seconds) for key in keys]

    def _arrived(self, depth: int, deletions: int, result: Block | Miss, seconds: float) -> None:
        self._counters.result(result, seconds)
        if isinstance(result, Block) and deletions == self.deletions:
            self._spread(result, depth)

    def layers(self, key: str) -> LayeredBlock | Miss:
        started = time.perf_counter()
        found: LayeredBlock | Miss = Miss("absent")
        for depth, tier in enumerate(self.tiers):
            waiting = self._waiting([key]).get(key) if depth == 1 else None
            result = tier.layers(key) if waiting is None else LayeredBlock.of(waiting)
            if isinstance(result, LayeredBlock):
                return self._counters.result(result, time.perf_counter() - started)
            found = result if result.reason != "absent" else found
        return self._counters.result(found)

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
        started = time.perf_counter()
        try:
            block = compress(block, self.compression)
        except MemoryError as error:
            return self._counters.unfit(error)
        kept = [self.tiers[0].put(block)]
        if self._queue is not None and self._queue.add(block):
            kept.append(True)
        else:
            kept.append(self._write_down(block))
        if any(kept):
            return self._counters.wrote(time.perf_counter() - started)
        self._counters.count("skipped_writes")
        return False

    def _write_down(self, block: Block) -> bool:
        return any([tier.put(block) for tier in self.tiers[1:]])

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until every tier has what was put. False if that took longer."""
        return self._queue is None or self._queue.flush(timeout_s)

    def _waiting(self, keys: Sequence[str]) -> dict[str, Block]:
        """Blocks on their way to the slower tiers, which the first one may have dropped, or never taken."""
        if self._queue is None:
            return {}
        return {key: block for key in keys if (block := self._queue.get(key)) is not None}

    def _waits(self, key: str) -> bool:
        return self._queue is not None and key in self._queue

    def contains(self, key: str) -> bool:
        return self._waits(key) or any(tier.contains(key) for tier in self.tiers)

    def tier_of(self, key: str) -> int:
        before = 0
        for tier in self.tiers[:-1]:
            if tier.contains(key):
                return before + tier.tier_of(key)
            before += len(tier.levels())
        return before + self.tiers[-1].tier_of(key)

    @property
    def deletions(self) -> int:
        return self._deleted.count

    def levels(self) -> list[BlockStore]:
        return [level for tier in self.tiers for level in tier.levels()]

    def delete(self, key: str) -> bool:
        self._deleted.count += 1
        waited = self._queue is not None and self._queue.drop(key)
        return any([tier.delete(key) for tier in self.tiers]) or waited

    def prune(self, max_bytes: int | None = None, older_than_s: float | None = None) -> int:
        """Prune the tiers that can be: one in memory goes with its process, a server prunes by its own rules."""
        prunable = [tier for tier in self.tiers if tier.prunable]
        if not prunable:
            return super().prune(max_bytes, older_than_s)
        return sum([tier.prune(max_bytes, older_than_s) for tier in prunable])

    def keep_in(self, allocate: Allocate | None) -> None:
        for tier in self.tiers:
            tier.keep_in(allocate)

    def delete_tagged(self, tag: str) -> int:
        self._deleted.count += 1
        waiting = self._queue.tagged(tag) if self._queue is not None else []
        dropped = sum([self.delete(key) for key in waiting])
        return dropped + max([tier.delete_tagged(tag) for tier in self.tiers])

    def pin(self, keys: Iterable[str]) -> int:
        self.flush()
        keys = list(keys)
        return max([tier.pin(keys) for tier in self.tiers])

    def unpin(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        for tier in self.tiers:
            tier.unpin(keys)

    def tenant_usage(self, salt: str) -> int:
        """Of the last tier."""
        return self.tiers[-1].tenant_usage(salt)

    def keys(self) -> Iterator[str]:
        return iter({key for tier in self.tiers for key in tier.keys()})  # noqa: SIM118 - a store is not a dict

    def stats(self) -> StoreStats:
        """Hits and misses as the caller saw them; sizes of the last tier; every tier's own under ``tiers``."""
        return self._summed([tier.stats() for tier in self.tiers])

    def quick_stats(self) -> StoreStats:
        return self._summed([tier.quick_stats() for tier in self.tiers])

    def _summed(self, tiers: list[StoreStats]) -> StoreStats:
        stats = self._counters.stats("tiered")
        stats.tiers = [level for tier in tiers for level in tier.tiers or [tier]]
        last = tiers[-1]
        stats.blocks, stats.bytes, stats.limit_bytes = last.blocks, last.bytes, last.limit_bytes
        stats.known_chunks, stats.evictions = last.known_chunks, last.evictions
        stats.pinned, stats.policy, stats.ttl_s = last.pinned, last.policy, last.ttl_s
        stats.compression, stats.complete = last.compression, last.complete
        stats.tenants, stats.tenant_bytes = last.tenants, last.tenant_bytes
        return stats

    def check(self, fix: bool = False) -> list[Problem]:
        self.flush()
        return [problem for tier in self.tiers for problem in tier.check(fix)]

    def clear(self) -> int:
        self._deleted.count += 1
        if self._queue is not None:
            self._queue.clear()
        return max([tier.clear() for tier in self.tiers])

    def get_meta(self, name: str) -> bytes | None:
        """The last tier's value; while it has none (a server that does not answer), a nearer tier's."""
        values = (tier.get_meta(name) for tier in reversed(self.tiers))
        return next((value for value in values if value is not None), None)

    def put_meta(self, name: str, value: bytes) -> bytes:
        """The last tier decides, the others remember it."""
        present = self.get_meta(name)
        decided = self.tiers[-1].put_meta(name, value if present is None else present)
        for tier in self.tiers[:-1]:
            tier.put_meta(name, decided)
        return decided

    def set_meta(self, name: str, value: bytes) -> bool:
        return [tier.set_meta(name, value) for tier in self.tiers][-1]

    def close(self) -> None:
        if self._queue is not None and (left := self._queue.close(_CLOSE_S)):
            self._counters.warn("close", f"closed with {left} blocks unwritten: the slower tiers take too long")
        for tier in reversed(self.tiers):  # the last one may still have things to send, from those before
            tier.close()


def _better(known: T | Miss | None, result: T | Miss) -> T | Miss:
    """Of two tiers' answers: the block, else the miss that says more than that nothing is there."""
    if not isinstance(known, Miss) or not isinstance(result, Miss):
        return result
    return result if known.reason == "absent" else known
