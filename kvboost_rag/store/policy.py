"""Who goes when a store is full, and what keeps a block from going: eviction policies as data, time to live, pins.

A policy is an order: the first rows go first. It is written in SQL over diskcache's columns, because that is where the
rows are; ``value`` holds the seconds of compute that a block saves, ``{now}`` is the unix time.
"""

from __future__ import annotations

from kvboost_rag.errors import UnknownOptionError, UsageError
from kvboost_rag.kv.block import BlockHeader

DEFAULT_POLICY = "lru"
POLICIES: dict[str, str] = {
    # least recently used
    "lru": "access_time",
    # least often used; of those the least recently used
    "lfu": "access_count, access_time",
    # the fewest seconds of compute saved per byte and use, losing worth with the time since the last use
    "cost": "COALESCE(value, 0) * (1 + access_count) / size / (1 + MAX(0, {now} - access_time)), access_time",
}
PINNED_SHARE = 0.5  # of a store's limit: the rest must be able to move


def check_policy(name: str) -> str:
    """``name``, if it is a policy.

    Raises:
        UnknownOptionError
    """
    if name not in POLICIES:
        raise UnknownOptionError(f"no eviction policy {name!r}", hint=f"one of {', '.join(POLICIES)}")
    return name


def check_ttl(ttl_s: float | None) -> float | None:
    """``ttl_s`` in seconds; 0 and None are "no limit".

    Raises:
        UsageError: it is negative or no number.
    """
    if ttl_s is not None and not 0 <= ttl_s < float("inf"):
        raise UsageError(f"a time to live of {ttl_s} s", hint="give seconds, or 0 for no limit")
    return ttl_s or None


def check_quota(tenant_bytes: int | None) -> int | None:
    """``tenant_bytes``; 0 and None are "no quota".

    Raises:
        UsageError: it is negative or no whole number.
    """
    if tenant_bytes is not None and (type(tenant_bytes) is not int or tenant_bytes < 0):
        raise UsageError(f"a quota of {tenant_bytes!r} bytes per tenant", hint="give bytes, or 0 for no quota")
    return tenant_bytes or None


def check_write(write: str) -> str:
    """``write``, if it is a way to write.

    Raises:
        UsageError
    """
    if write not in ("through", "back"):
        raise UsageError(f"write={write!r}", hint='"through" or "back"')
    return write


def is_expired(header: BlockHeader, ttl_s: float | None, now: float, stored_s: float = 0.0) -> bool:
    """Whether a block is older than ``ttl_s``. Its own time counts, else when it was stored; unknown: never."""
    born = header.created_s if header.created_s > 0 else stored_s
    return ttl_s is not None and born > 0 and now - born > ttl_s
