"""Fetching blocks from a server: sizes first, then values, each judged before it becomes a block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvboost_rag.errors import BlockFormatError, MissingExtraError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import LayerReader, bytes_before_layers
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store.arriving import ArrivingBlock
from kvboost_rag.store.base import Miss
from kvboost_rag.store.disk_files import block_name, reason_of
from kvboost_rag.store.policy import is_expired
from kvboost_rag.store.remote_arrive import Batch
from kvboost_rag.store.remote_check import inspect
from kvboost_rag.store.remote_link import Link, Medium, Unavailable, Value

_PAGE = 8  # blocks fetched with one request


class BlockFetcher:
    """Reads blocks through ``link``.

    Args:
        ttl_s: blocks older than this are misses; None for no limit.
        remove: told the keys of damaged and expired values.
        warn: told when the server does not answer.
    """

    def __init__(
        self,
        medium: Medium,
        link: Link,
        ttl_s: float | None,
        remove: Callable[[str], object],
        warn: Callable[[Exception], None],
    ) -> None:
        self._medium, self._link, self._ttl_s = medium, link, ttl_s
        self._remove, self._warn = remove, warn
        self.unreadable: set[str] = set()  # keys of foreign values: the next put may overwrite them

    def fetch(self, keys: Sequence[str], limit: int) -> dict[str, Block | Miss]:
        """Blocks from the server, a few at a time: those that arrive in time count, even if others do not. Nothing
        larger than ``limit`` bytes is fetched."""
        arrived: list[Value] = []
        names = [str(block_name(key)) for key in keys]

        def read() -> None:
            for first in range(len(arrived), len(names), _PAGE):  # a second attempt goes on behind the first
                arrived.extend(self._medium.read(names[first : first + _PAGE], limit))

        late: Miss | None = None
        try:
            self._link.call(read)
        except Unavailable as error:
            late = Miss("unavailable", str(error))
            if arrived:
                self._link.breaker.succeeded()  # slow, but it works
            else:
                self._warn(error)
        values = list(arrived)
        found = {key: self._judge(key, value, limit) for key, value in zip(keys, values, strict=False)}
        return found | {key: late or Miss("unavailable") for key in keys[len(values) :]}

    def open(self, keys: Sequence[str], limit: int) -> dict[str, Block | ArrivingBlock | Miss]:
        """Like :meth:`fetch`, as soon as headers and token ids are here; layers are on their way."""
        try:
            batch = Batch(self._medium, self._link, [str(block_name(key)) for key in keys], limit)
        except Unavailable as error:
            self._warn(error)
            return {key: Miss("unavailable", str(error)) for key in keys}
        return {key: self._open(batch, index, key, limit) for index, key in enumerate(keys)}

    def _open(self, batch: Batch, index: int, key: str, limit: int) -> Block | ArrivingBlock | Miss:
        value = batch.values[index]
        try:
            what = batch.known(index)
            if not isinstance(what, int):
                return self._judge(key, what, limit)
            while (needed := bytes_before_layers(value.buffer, value.have)) > value.have:
                batch.until(index, needed)
            reader = LayerReader(value.buffer)
            if not reader.by_layer:
                batch.until(index, what)
                return self._judge(key, memoryview(value.buffer), limit)
        except Unavailable as error:
            batch.leave(index)
            self._warn(error)
            return Miss("unavailable", str(error))
        except MemoryError:
            batch.leave(index)
            return Miss("unavailable", "out of memory")
        except MissingExtraError as error:  # perhaps sound: others can read it
            batch.leave(index)
            return Miss("unavailable", str(error))
        except BlockFormatError as error:
            batch.leave(index)
            return self._refused(key, reason_of(error), str(error))

        def read(layer: int) -> None:
            batch.until(index, reader.end_of(layer))
            try:
                reader.read(layer)
            except BlockFormatError:
                self._remove(key)
                raise

        block = LayeredBlock(reader.header, reader.token_ids, reader.kv, read, reader.block)
        wrong = self._wrong(key, block)
        if wrong is not None:
            batch.leave(index)
            return wrong
        share = len(batch.values)
        return ArrivingBlock(block, leave=lambda: batch.leave(index), read_s=lambda: value.came_s / share)

    def _judge(self, key: str, value: Value, limit: int) -> Block | Miss:
        if value is None:
            return Miss("absent")
        reason, detail, block = inspect(key, value, limit)
        if block is None:
            return self._refused(key, reason, detail)
        return self._wrong(key, block) or block

    def _refused(self, key: str, reason: str, detail: str) -> Miss:
        if reason == "foreign":
            self.unreadable.add(key)  # perhaps of a later version: others may be able to read it
        elif reason != "unavailable":
            self._remove(key)
        return Miss(reason, detail)

    def _wrong(self, key: str, block: Block | LayeredBlock) -> Miss | None:
        """Why a sound block must not be used."""
        if block.key != key:
            return self._refused(key, "mismatch", f"holds {block.key}")
        if is_expired(block.header, self._ttl_s, time.time()):
            return self._refused(key, "expired", f"older than {self._ttl_s:g} s")
        return None
