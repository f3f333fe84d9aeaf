"""Making a store on disk smaller, by size, age or tag, and keeping chosen blocks from that."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost_rag.errors import BlockFormatError, StoreError, UsageError
from kvboost_rag.kv.codec import read_header
from kvboost_rag.store.disk_files import BlockFiles, IndexUnavailable
from kvboost_rag.store.policy import PINNED_SHARE

if TYPE_CHECKING:
    from kvboost_rag.store.disk_index import BlockIndex

_BATCH = 256  # blocks per transaction, so that others get their turn


class Care:
    """Maintenance of one store's blocks. Every method may raise IndexUnavailable or OSError."""

    def __init__(self, files: BlockFiles, index: BlockIndex) -> None:
        self._files = files
        self._index = index

    def prune(self, max_bytes: int | None, older_than_s: float | None, ttl_s: float | None) -> int:
        """Drop what outlived ``ttl_s``, then what was not used for ``older_than_s``, then, in the order of the policy,
        what is beyond ``max_bytes`` (pinned blocks last); the number of blocks dropped."""
        dropped, now = 0, time.time()
        if ttl_s is not None:
            dropped += self._drop(lambda cache: cache.stored_before(now - ttl_s, _BATCH))
        if older_than_s is not None:
            dropped += self._drop(lambda cache: cache.unused(now - older_than_s, _BATCH))
        if max_bytes is not None:
            dropped += self._drop(lambda cache: cache.victims(_BATCH), max_bytes)
            dropped += self._drop(lambda cache: cache.victims(_BATCH, pinned=True), max_bytes)
        return dropped

    def fit(self, limit_bytes: int) -> int:
        """Drop what is beyond the limit and the tenants' quota; the number of blocks dropped."""
        return self._index.run(self._index.quota.cull_all) + self.prune(limit_bytes, None, None)

    def _drop(self, choose: Callable[[Any], list[str]], down_to: int | None = None) -> int:
        """Drop what ``choose`` names, batch by batch, until it names nothing or ``down_to`` bytes are left."""

        def work(cache: Any) -> int:
            count = 0
            for key in choose(cache):
                if down_to is not None and cache.volume() <= down_to:
                    break
                cache.delete(key)
                count += 1
            return count

        total = 0
        while dropped := self._index.run(work):
            total += dropped
        return total

    def delete_tagged(self, tag: str) -> int:
        """Drop every block that carries ``tag``; the number of blocks dropped. What was set aside goes too: it may
        hold such blocks, and can no longer be asked."""
        try:
            self._index.complete()
            keys = self._index.run(lambda cache: _carriers(cache, tag), write=False)
        except IndexUnavailable:
            keys = self._carriers_on_disk(tag)
        dropped = 0
        for first in range(0, len(keys), _BATCH):
            dropped += self._delete(keys[first : first + _BATCH])
        self._files.empty_quarantine()
        return dropped

    def clear(self) -> int:
        """Drop every block, pin and what was set aside, as far as the system lets us; the number of blocks dropped.
        Raises nothing."""
        dropped = 0
        for path in self._files.walk():
            with suppress(OSError):
                path.unlink()
                dropped += self._files.key(path) is not None
        with suppress(IndexUnavailable, OSError):
            self._index.clear()
        for key in self._files.pinned():
            with suppress(OSError):
                self._files.pin(key, False)
        self._files.empty_quarantine()
        return dropped

    def _delete(self, keys: list[str]) -> int:
        """Drop these blocks, with or without an index that answers."""
        paths = [path for key in keys if (path := self._files.path(key)) is not None and path.exists()]
        with suppress(IndexUnavailable):
            self._index.run(lambda cache: [cache.delete(key) for key in keys])
            self.unpin(keys)
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _carriers_on_disk(self, tag: str) -> list[str]:
        keys = []
        for path in self._files.walk():
            key = self._files.key(path)
            with suppress(BlockFormatError, OSError):
                if key is not None and tag in read_header(self._files.read(path)[0])[0].tags:
                    keys.append(key)
        return keys

    def pin(self, keys: Iterable[str], limit_bytes: int) -> int:
        """Keep blocks from eviction, as far as all pinned ones together stay within their share of ``limit_bytes``,
        and each tenant's within that share of the quota; the number of those that are held and pinned now."""
        quota = self._index.quota.limit

        def too_many(cache: Any, key: str) -> bool:
            tenant = cache.tenants.of_key(key)
            own = cache.tenants.pinned(tenant) if quota is not None and tenant is not None else 0
            return bool(cache.pinned()[1] > limit_bytes * PINNED_SHARE or own > (quota or 0) * PINNED_SHARE)

        def work(cache: Any) -> int:
            count = 0
            for key in keys:
                size, before = cache.size_of(key), cache.pinned()
                if size is None:
                    continue
                cache.pin([key])
                if too_many(cache, key) and cache.pinned() != before:
                    cache.unpin([key])
                    continue
                self._files.pin(key, True)
                count += 1
            return count

        return self._index.run(work)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let blocks be evicted again."""

        def work(cache: Any) -> None:
            for key in keys:
                if self._files.path(key) is not None:
                    cache.unpin([key])
                    self._files.pin(key, False)

        self._index.run(work)

    def pinned(self) -> int:
        """How many blocks are pinned."""
        return int(self._index.run(lambda cache: cache.pinned()[0], write=False))

    def tenants(self) -> int:
        """How many tenants hold blocks."""
        return int(self._index.run(lambda cache: cache.tenants.count(), write=False))

    def held_by(self, salt: str) -> int:
        """Bytes of the blocks of the tenant with this salt."""
        return int(self._index.run(lambda cache: cache.tenants.held(cache.tenants.of_salt(salt)), write=False))


@contextmanager
def index_needed(folder: Path) -> Iterator[None]:
    """Maintenance cannot go on without the index, as reads and writes can. Raises StoreError."""
    try:
        yield
    except (IndexUnavailable, OSError) as error:
        hint = "try again when no other process is busy with it"
        raise StoreError(f"the index of {folder} does not answer: {error}", hint=hint) from error


def check_prune(max_bytes: int | None, older_than_s: float | None) -> None:
    """Raises UsageError for limits that make no sense."""
    for name, value in (("max_bytes", max_bytes), ("older_than_s", older_than_s)):
        if value is not None and not value >= 0:
            raise UsageError(f"{name}={value}", hint="give at least 0")


def _carriers(cache: Any, tag: str) -> list[str]:
    found = []
    for key, text in cache.tags(json.dumps(tag)):
        with suppress(ValueError, RecursionError):
            if tag in json.loads(text):
                found.append(key)
    return found
