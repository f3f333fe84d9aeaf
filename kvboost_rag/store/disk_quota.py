"""How much one tenant may hold: who has too much loses blocks of his own, and never anybody else's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_AT_ONCE = 64  # rows asked for per query


class QuotaFull(Exception):
    """A tenant's pinned blocks leave no room for another block. Nothing was changed."""


class Quota:
    """The same for every tenant of a store. Methods run inside a transaction on the index.

    Args:
        limit: most bytes of one tenant's blocks; None: as many as fit the store.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit

    def require(self, cache: Any, salt: str, size: int) -> None:
        """Before a block comes in. Raises QuotaFull."""
        if self.limit is None:
            return
        pinned = cache.tenants.pinned(cache.tenants.of_salt(salt))
        if pinned + size > self.limit:
            raise QuotaFull(f"{pinned} bytes are pinned, {size} more do not fit the tenant's {self.limit}")

    def cull(self, cache: Any, added: Iterable[str]) -> int:
        """After rows were added: drop others of their tenants, in the policy's order, until each is within the quota;
        the number of blocks dropped."""
        if self.limit is None:
            return 0
        newest = {cache.tenants.of_key(key): key for key in added}
        return sum([self._fit(cache, tenant, key) for tenant, key in newest.items() if tenant is not None])

    def cull_all(self, cache: Any) -> int:
        """The same for every tenant, where the quota has become smaller."""
        if self.limit is None:
            return 0
        return sum([self._fit(cache, tenant, "") for tenant in cache.tenants.above(self.limit)])

    def _fit(self, cache: Any, tenant: str, spare: str) -> int:
        assert self.limit is not None
        over, dropped = cache.tenants.held(tenant) - self.limit, 0
        while over > 0 and (victims := cache.tenants.victims(tenant, spare, _AT_ONCE)):
            for key, size in victims:
                if over > 0:
                    cache.delete(key)
                    over, dropped = over - size, dropped + 1
        return dropped
