"""Which tenant each row of the index belongs to, and how much each of them holds.

A tenant is known by a digest of its salt, keyed with a secret that lives and dies with the database: who reads the
index learns how many tenants there are and how much they hold, not their salts. (A block's own header has the salt, as
its key is derived from it; so a lost table is filled again from the headers.)
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from typing import Any

_TABLES = (
    "CREATE TABLE IF NOT EXISTS TenantSecret (id INTEGER PRIMARY KEY CHECK (id = 1), secret BLOB NOT NULL)",
    "INSERT OR IGNORE INTO TenantSecret VALUES (1, randomblob(32))",
    "CREATE TABLE IF NOT EXISTS Tenants (key BLOB PRIMARY KEY, tenant TEXT NOT NULL, bytes INTEGER NOT NULL) "
    "WITHOUT ROWID",  # key as in the table Cache, so that its index serves the join
    "CREATE INDEX IF NOT EXISTS Tenants_tenant ON Tenants (tenant, bytes)",
    # whatever drops a row, or corrects its size, does so here too
    "CREATE TRIGGER IF NOT EXISTS Tenants_delete AFTER DELETE ON Cache FOR EACH ROW BEGIN "
    "DELETE FROM Tenants WHERE key = OLD.key; END",
    "CREATE TRIGGER IF NOT EXISTS Tenants_size AFTER UPDATE OF size ON Cache FOR EACH ROW BEGIN "
    "UPDATE Tenants SET bytes = NEW.size WHERE key = NEW.key; END",
)
_FREE = "key NOT IN (SELECT key FROM Pins)"


class Tenants:
    """The tenants of one open index.

    Args:
        sql: executes a statement on this thread's connection.
        order: who goes first (see :data:`~kvboost_rag.store.policy.POLICIES`).
    """

    def __init__(self, sql: Any, order: str) -> None:
        self._sql, self._order = sql, order
        for statement in _TABLES:
            sql(statement)
        ((secret,),) = sql("SELECT secret FROM TenantSecret").fetchall()
        if type(secret) is not bytes or len(secret) != 32:
            raise sqlite3.DatabaseError("a tenants' secret of another form")  # handled like any other damage
        self._secret = secret

    def of_salt(self, salt: str) -> str:
        """What stands for the tenant with this salt."""
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=16).hexdigest()

    def own(self, key: str, tenant: str, size: int) -> None:
        """Note that the row of ``key`` is the tenant's."""
        self._sql("INSERT OR REPLACE INTO Tenants VALUES (?, ?, ?)", (key, tenant, size))

    def held(self, tenant: str) -> int:
        """Bytes of a tenant's blocks."""
        return self._number("SELECT COALESCE(SUM(bytes), 0) FROM Tenants WHERE tenant = ?", tenant)

    def pinned(self, tenant: str) -> int:
        """Bytes of a tenant's pinned blocks."""
        query = "SELECT COALESCE(SUM(bytes), 0) FROM Tenants WHERE tenant = ? AND key IN (SELECT key FROM Pins)"
        return self._number(query, tenant)

    def of_key(self, key: str) -> str | None:
        """The tenant of a row, if it is noted."""
        rows = self._sql("SELECT tenant FROM Tenants WHERE key = ?", (key,)).fetchall()
        return str(rows[0][0]) if rows else None

    def count(self) -> int:
        """How many tenants hold blocks."""
        # from one tenant to the next in the index, not through all of their rows
        following = "SELECT (SELECT MIN(tenant) FROM Tenants WHERE tenant > name) FROM Names WHERE name IS NOT NULL"
        names = f"WITH RECURSIVE Names (name) AS (SELECT MIN(tenant) FROM Tenants UNION ALL {following})"
        return self._number(f"{names} SELECT COUNT(name) FROM Names")

    def above(self, quota: int) -> list[str]:
        """Tenants that hold more than ``quota`` bytes."""
        rows = self._sql("SELECT tenant FROM Tenants GROUP BY tenant HAVING SUM(bytes) > ?", (quota,)).fetchall()
        return [str(tenant) for (tenant,) in rows]

    def victims(self, tenant: str, spare: str, count: int) -> list[tuple[str, int]]:
        """(key, bytes) of up to ``count`` of a tenant's rows that would go first; pinned ones and ``spare`` stay."""
        # CROSS JOIN: from the tenant's rows to the cache's, never through all of the cache in the policy's order
        own = "SELECT Cache.* FROM Tenants CROSS JOIN Cache ON Cache.key = Tenants.key WHERE Tenants.tenant = ?"
        order = self._order.format(now=time.time())
        query = f"SELECT key, size FROM ({own}) WHERE {_FREE} AND key != ? ORDER BY {order} LIMIT ?"
        rows = self._sql(query, (tenant, spare, count)).fetchall()
        return [(str(key), size) for key, size in rows if type(size) is int]

    def unknown(self, rows: int) -> list[str]:
        """Keys of rows whose tenant is not noted: written before there were tenants. ``rows``: how many there are."""
        if self._number("SELECT COUNT(*) FROM Tenants") == rows:
            return []
        return [str(key) for (key,) in self._sql("SELECT key FROM Cache WHERE key NOT IN (SELECT key FROM Tenants)")]

    def _number(self, query: str, *values: object) -> int:
        ((number,),) = self._sql(query, values).fetchall()
        if type(number) is not int:
            raise sqlite3.DatabaseError(f"a sum of {number!r}")
        return number
