"""Redis and Valkey as a remote medium: one string per value.

A server may hold a million blocks beside other things, and can list names only by walking all of them. So the names of
the two small areas (known texts, manifest) are also kept in a set each; blocks are walked only when all are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvboost_rag.errors import MissingExtraError, UnknownOptionError, UsageError
from kvboost_rag.store.redis_ledger import RedisLedger
from kvboost_rag.store.remote_link import Piece, TooLarge, Value

DEFAULT_PREFIX = "kvboost:"
_MOST = 512 << 20  # bytes of a string, by the server's own limit
_PAGE = 1000
_FIRST_PIECE, _LAST_PIECE = 128 << 10, 1 << 20  # bytes of each value at a time; the first ones come soon


class RedisMedium:
    """A Redis or Valkey server.

    Args:
        url: ``redis://`` or ``rediss://`` (TLS), as redis-py takes it.
        prefix: stands before every name, so that a server can be shared.
        timeout_s: of each read from or write to the socket.
        ttl_s: the server drops blocks this long after they were written; None: it keeps them.
        cluster: the URL names one node of a cluster; the others are found through it.

    Raises:
        MissingExtraError: redis-py is not installed.
        UsageError: the URL makes no sense.
        UnknownOptionError: it has an option that redis-py does not know.
    """

    kind = "redis"
    max_value_bytes = _MOST

    def __init__(
        self,
        url: str,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = 5.0,
        ttl_s: float | None = None,
        cluster: bool = False,
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            hint = "pip install 'kvboost-rag[redis]'"
            raise MissingExtraError(f"a store at redis:// needs redis-py: {error}", hint=hint) from None
        settings = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),  # the link retries
            "protocol": 2,  # plain, as every Redis and Valkey speaks it
        }
        try:
            single = redis.Redis.from_url(url, **settings)
        except (ValueError, TypeError) as error:
            raise UsageError(f"not a Redis URL: {error}", hint="redis://[user:password@]host[:6379]/[db]") from None
        try:
            single.connection_pool.make_connection()  # not connected: only tells whether it takes the options
        except TypeError as error:
            hint = "options of a redis:// URL are those of docs/store.md, or redis-py's own"
            raise UnknownOptionError(f"an option of the store's URL: {error}", hint=hint) from None
        # A cluster's client asks for the nodes when it is made, and the server may not answer yet: on first use.
        self._lock = threading.Lock()
        self._client: Any = None if cluster else single
        self._connect = lambda: redis.RedisCluster.from_url(url, **settings)
        self.prefix = prefix
        self.is_cluster = cluster
        self.ttl_ms = max(1, int(ttl_s * 1000)) if ttl_s else None

    @property
    def redis(self) -> Any:
        """The client; a cluster's is made at first use."""
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def read(self, names: Sequence[str], limit: int) -> list[Value]:
        found: list[Value] = [None] * len(names)
        wanted = []
        for i, size in enumerate(self._sizes(names)):
            if size is None:  # something else under this name
                found[i] = b""
            elif size > limit:
                found[i] = TooLarge(size)
            elif size:
                wanted.append(i)
        # a range and not the whole value: it may have grown meanwhile
        values = self._pipe([("GETRANGE", self._key(names[i]), 0, limit - 1) for i in wanted])
        for k, i in enumerate(wanted):
            found[i] = (values[k] or None) if isinstance(values[k], bytes) else b""
        return found

    def stream(self, names: Sequence[str], limit: int, starts: Sequence[int]) -> Iterator[tuple[int, Piece]]:
        left: dict[int, tuple[int, int]] = {}  # of which value, from where to where
        for i, size in enumerate(self._sizes(names)):
            yield i, TooLarge(size) if size and size > limit else None if size == 0 else size or 0
            if size and size <= limit:
                left[i] = (starts[i], size)
        step = _FIRST_PIECE
        while left:
            commands = [("GETRANGE", self._key(names[i]), a, min(a + step, b) - 1) for i, (a, b) in left.items()]
            for i, piece in zip(list(left), self._pipe(commands), strict=True):
                if not isinstance(piece, bytes) or not piece:
                    raise ConnectionError("a value went away while it was read")
                yield i, piece
                a, b = left.pop(i)
                if a + len(piece) < b:
                    left[i] = (a + len(piece), b)
            left = dict(sorted(left.items()))
            step = min(2 * step, _LAST_PIECE)

    def write(self, name: str, value: bytes) -> None:
        self._put(name, value)

    def create(self, name: str, value: bytes) -> bool:
        return self._put(name, value, "NX")

    def _put(self, name: str, value: bytes, *how: str) -> bool:
        area = name.split("/")[0]
        if area == "blocks":
            expiry = () if self.ttl_ms is None else ("PX", self.ttl_ms)
            return bool(self.redis.execute_command("SET", self._key(name), value, *how, *expiry))
        # the name first: a name without a value is nothing to anybody, a value without a name is lost
        self.redis.sadd(self._names(area), name)
        return bool(self.redis.execute_command("SET", self._key(name), value, *how))

    def exists(self, name: str) -> bool:
        return bool(self.redis.exists(self._key(name)))

    def delete(self, names: Sequence[str]) -> int:
        total = 0
        for first in range(0, len(names), _PAGE):
            page = names[first : first + _PAGE]
            total += int(self.redis.delete(*[self._key(name) for name in page]))
            for area in {name.split("/")[0] for name in page} - {"blocks"}:
                self.redis.srem(self._names(area), *[name for name in page if name.startswith(f"{area}/")])
        return total

    def entries(self, area: str) -> Iterator[tuple[str, int]]:
        page: list[str] = []
        for name in self._walk() if area == "blocks" else self._named(area):
            page.append(name)
            if len(page) == _PAGE:
                yield from self._sized(page)
                page = []
        yield from self._sized(page)

    def _walk(self) -> Iterator[str]:
        start = self.prefix.encode()
        escaped = "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in self.prefix)
        seen: set[bytes] = set()  # a walk may show a key twice
        for key in self.redis.scan_iter(match=f"{escaped}blocks/*", count=_PAGE):
            if key not in seen:
                seen.add(key)
                yield key[len(start) :].decode("ascii", "replace")

    def _named(self, area: str) -> Iterator[str]:
        for name in self.redis.sscan_iter(self._names(area), count=_PAGE):
            yield name.decode("ascii", "replace")

    def _sized(self, names: Sequence[str]) -> Iterator[tuple[str, int]]:
        for name, size in zip(names, self._sizes(names), strict=True):
            if size:
                yield name, size

    def _sizes(self, names: Sequence[str]) -> list[int | None]:
        """Bytes of each value, 0 where there is none, None where something else lies under the name."""
        answers = self._pipe([("STRLEN", self._key(name)) for name in names])
        return [answer if isinstance(answer, int) else None for answer in answers]

    def _pipe(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answers to several commands, sent at once; an error in place of an answer where a command failed."""
        if not commands:
            return []
        with self.redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(pipe.execute(raise_on_error=False))

    def _key(self, name: str) -> str:
        return self.prefix + name

    def _names(self, area: str) -> str:
        return f"{self.prefix}names:{area}"

    def ledger(self) -> RedisLedger:
        return RedisLedger(self)

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
