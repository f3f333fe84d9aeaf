"""Whose a block on a Redis or Valkey server is: per tenant a sorted set of names by last use, and a hash of their
sizes.

On one server a script does all of a write: enter the block, drop the tenant's oldest ones, set the value. Nobody sees
anything in between, so the quota holds exactly, whoever writes. A script may not touch several slots of a cluster:
there it keeps the books of one tenant (which lie in one slot), and the values follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

# KEYS: uses, sizes. ARGV: name, bytes, limit, now, then, where the script shall do the rest: prefix, and to write the
# block: value, milliseconds to live or 0. The field "" of the hash is the sum. Answers the names that have to go, or
# that went. Numbers that somebody spoilt count as 0.
_ENTER = """
local name, size, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local function number(field) return tonumber(redis.call('HGET', KEYS[2], field) or '0') or 0 end
local total = number('') + size - number(name)
redis.call('HSET', KEYS[2], name, size)
redis.call('ZADD', KEYS[1], ARGV[4], name)
local gone = {}
while total > limit do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 1)
  local victim = oldest[1] ~= name and oldest[1] or oldest[2]
  if not victim then break end
  total = total - number(victim)
  redis.call('HDEL', KEYS[2], victim)
  redis.call('ZREM', KEYS[1], victim)
  if not ARGV[5] or redis.call('DEL', ARGV[5] .. victim) == 1 then gone[#gone + 1] = victim end
end
redis.call('HSET', KEYS[2], '', total)
if ARGV[6] then
  if ARGV[7] == '0' then redis.call('SET', ARGV[5] .. name, ARGV[6])
  else redis.call('SET', ARGV[5] .. name, ARGV[6], 'PX', ARGV[7]) end
end
return gone
"""
# KEYS as above. ARGV: name, where the script may look: the block's key. One that was written again meanwhile stays.
_LEAVE = """
if ARGV[2] and redis.call('EXISTS', ARGV[2]) == 1 then return end
local size = redis.call('HGET', KEYS[2], ARGV[1])
if size then
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HINCRBY', KEYS[2], '', -(tonumber(size) or 0))
end
"""


class RedisValues(Protocol):
    """What of the medium is needed here."""

    prefix: str
    ttl_ms: int | None
    is_cluster: bool

    @property
    def redis(self) -> Any:
        """The client."""

    def write(self, name: str, value: bytes) -> None:
        """Set a value."""

    def delete(self, names: list[str]) -> int:
        """Remove values; how many there were."""


class RedisLedger:
    """The tenants of one server or cluster; see :class:`~kvboost_rag.store.remote_quota.Ledger`."""

    def __init__(self, values: RedisValues, clock: Callable[[], float] = time.time) -> None:
        self._values, self._clock = values, clock

    def write(self, name: str, value: bytes, tenant: str, limit: int) -> int:
        v = self._values
        if not v.is_cluster:
            return self._enter(name, len(value), tenant, limit, v.prefix, value, v.ttl_ms or 0)
        dropped = self._enter(name, len(value), tenant, limit)
        v.write(name, value)
        if v.redis.hget(self._keys(tenant)[1], name) is None:  # another writer has dropped it from the books meanwhile
            v.delete([name])
        return dropped

    def adopt(self, name: str, size: int, tenant: str, limit: int) -> int:
        if self._values.redis.hexists(self._keys(tenant)[1], name):
            return 0
        return self._enter(name, size, tenant, limit, *(() if self._values.is_cluster else (self._values.prefix,)))

    def _enter(self, name: str, size: int, tenant: str, limit: int, *rest: object) -> int:
        """Run the script; how many blocks went."""
        v = self._values
        v.redis.sadd(self._all(), tenant)
        gone = v.redis.eval(_ENTER, 2, *self._keys(tenant), name, size, limit, self._clock(), *rest)
        return len(gone) if rest else sum(v.delete([victim.decode("ascii", "replace")]) for victim in gone)

    def used(self, names: Mapping[str, str]) -> None:
        with self._values.redis.pipeline(transaction=False) as pipe:
            for name, tenant in names.items():
                pipe.zadd(self._keys(tenant)[0], {name: self._clock()}, xx=True)
            pipe.execute()

    def removed(self, name: str, tenant: str) -> None:
        v, key = self._values, self._values.prefix + name
        if v.is_cluster and v.redis.exists(key):  # in another slot than the books
            return
        v.redis.eval(_LEAVE, 2, *self._keys(tenant), name, *(() if v.is_cluster else (key,)))

    def held(self, tenant: str) -> int:
        return int(self._values.redis.hget(self._keys(tenant)[1], "") or 0)

    def clear(self) -> None:
        redis = self._values.redis
        for tenant in redis.smembers(self._all()):
            redis.delete(*self._keys(tenant.decode("ascii", "replace")))
        redis.delete(self._all())

    def _keys(self, tenant: str) -> tuple[str, str]:
        """Names of a tenant's sorted set and hash, in one slot of a cluster."""
        start = f"{self._values.prefix}quota:{{{tenant}}}"
        return f"{start}:uses", f"{start}:bytes"

    def _all(self) -> str:
        return f"{self._values.prefix}names:tenants"
