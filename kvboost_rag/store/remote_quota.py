"""How much one tenant may hold on a server: who has too much loses blocks of his own, and never anybody else's.

Servers look values up by the key alone, so whose a block is stands beside the blocks: in a *ledger*, which each kind
of server keeps as well as it can. An entry without a block is harmless (it goes when its turn comes); so a block is
entered before it is written, and leaves the ledger after it was removed.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvboost_rag.kv.block import Block
from kvboost_rag.store.disk_files import block_name

if TYPE_CHECKING:
    from kvboost_rag.store.remote_link import Medium

_KNOWN = 16_384  # blocks whose tenant is remembered
_USES = 256  # uses that are noted before the server is told
_REFRESH_S = 60.0  # how long a listing is believed
_AREA = "tenants"
_MARK = re.compile(_AREA + r"/([0-9a-f]{32})/([0-9a-f]{12})-([0-9]{1,13})-([0-9a-f]{2})([0-9a-f]{62})")


class Ledger(Protocol):
    """Which blocks a server holds for whom. Any exception means that it did not work."""

    def write(self, name: str, value: bytes, tenant: str, limit: int) -> int:
        """Write a block of a tenant, of whom ``limit`` bytes are kept: others of his blocks go first, the oldest ones;
        how many there were."""

    def adopt(self, name: str, size: int, tenant: str, limit: int) -> int:
        """Enter a block that is there, unless it is entered; others may go for it, as for one that is written."""

    def used(self, names: Mapping[str, str]) -> None:
        """Note the use of blocks: name → tenant."""

    def removed(self, name: str, tenant: str) -> None:
        """A block is gone."""

    def held(self, tenant: str) -> int:
        """Bytes of a tenant's blocks, as far as they are entered."""

    def clear(self) -> None:
        """Forget everything."""


def tenant_of(salt: str) -> str:
    """What stands for the tenant with this salt. No secret: a block's own header has the salt."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"kvboost tenant").hexdigest()


class RemoteQuota:
    """The quota of a remote store's tenants.

    Args:
        ledger: of the server.
        write: sets a value without asking whose it is.
        limit: most bytes of one tenant's blocks; None: no quota, and no ledger is kept.
    """

    def __init__(self, ledger: Ledger, write: Callable[[str, bytes], None], limit: int | None) -> None:
        self.ledger, self.limit = ledger, limit
        self._write = write
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, str] = OrderedDict()  # of blocks that were seen here: name → tenant
        self._used: dict[str, str] = {}

    def write(self, name: str, value: bytes, salt: str) -> int:
        """Write a block; the number of others that went for it. May raise what the medium raises."""
        if self.limit is None:
            self._write(name, value)
            return 0
        tenant = tenant_of(salt)
        self.tell()
        dropped = self.ledger.write(name, value, tenant, self.limit)
        self._remember(name, tenant)
        return dropped

    def adopt(self, name: str, size: int, salt: str) -> int:
        """Count a block that was found, perhaps written without a quota; how many went for it. May raise what the
        medium raises."""
        return 0 if self.limit is None else self.ledger.adopt(name, size, tenant_of(salt), self.limit)

    def saw(self, found: Iterable[object]) -> None:
        """Blocks that were read: whose they are, and that they were used."""
        if self.limit is not None:
            for block in found:
                if isinstance(block, Block):
                    self._remember(str(block_name(block.key)), tenant_of(block.header.salt))
                    self.touch(block.key)

    def touch(self, key: str) -> None:
        """A block was used; the server hears of it with the next write."""
        if self.limit is None:
            return
        with self._lock:
            name = str(block_name(key))
            if name in self._tenants and (name in self._used or len(self._used) < _USES):
                self._used.pop(name, None)
                self._used[name] = self._tenants[name]

    def tell(self) -> None:
        """Tell the server of uses. May raise what the medium raises; then they are lost, which costs order, not
        blocks."""
        with self._lock:
            used, self._used = self._used, {}
        if used:
            self.ledger.used(used)

    def removed(self, name: str) -> None:
        """A block is gone, if it was seen here. May raise what the medium raises."""
        if self.limit is None:
            return
        with self._lock:
            tenant = self._tenants.pop(name, None)
            self._used.pop(name, None)
        if tenant is not None:
            self.ledger.removed(name, tenant)

    def _remember(self, name: str, tenant: str) -> None:
        with self._lock:
            self._tenants[name] = tenant
            self._tenants.move_to_end(name)
            if len(self._tenants) > _KNOWN:
                self._tenants.popitem(last=False)


@dataclass(slots=True)
class _Held:
    """A tenant's marks by block: (the mark's name, bytes), oldest first; as of a moment."""

    marks: OrderedDict[str, tuple[str, int]] = field(default_factory=OrderedDict)
    listed_s: float = 0.0

    def bytes(self) -> int:
        return sum(size for _, size in self.marks.values())


class MarkLedger:
    """A ledger of small values beside the blocks, ``tenants/<tenant>/<time>-<bytes>-<block>``, for servers that do
    nothing but keep values. Each machine lists a tenant's marks at first use and every minute, and counts what it
    writes itself: several machines that write for one tenant at once may go beyond the quota by what they wrote
    meanwhile. Blocks go in the order in which they were written."""

    def __init__(self, medium: Medium, clock: Callable[[], float] = time.time) -> None:
        self._medium, self._clock = medium, clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}

    def write(self, name: str, value: bytes, tenant: str, limit: int) -> int:
        with self._lock:
            dropped = self._enter(name, len(value), tenant, limit)
        self._medium.write(name, value)
        with self._lock:
            if name not in self._listed(tenant).marks:  # another write has dropped it from the books meanwhile
                self._medium.delete([name])
        return dropped

    def adopt(self, name: str, size: int, tenant: str, limit: int) -> int:
        with self._lock:
            return 0 if name in self._listed(tenant).marks else self._enter(name, size, tenant, limit)

    def _enter(self, name: str, size: int, tenant: str, limit: int) -> int:
        held, dropped = self._listed(tenant), 0
        before = held.marks.pop(name, None)
        mark = f"{_AREA}/{tenant}/{int(self._clock() * 1000):012x}-{size}-{_digest(name)}"
        self._medium.write(mark, b"1")
        held.marks[name] = (mark, size)
        if before is not None and before[0] != mark:
            self._medium.delete([before[0]])
        while held.bytes() > limit and len(held.marks) > 1:
            victim, (old, _) = next(iter(held.marks.items()))
            dropped += self._medium.delete([victim])
            self._medium.delete([old])
            del held.marks[victim]
        return dropped

    def used(self, names: Mapping[str, str]) -> None:
        """Not noted: every use would be a request."""

    def removed(self, name: str, tenant: str) -> None:
        with self._lock:
            mark = self._listed(tenant).marks.pop(name, None)
            if mark is not None:
                self._medium.delete([mark[0]])

    def held(self, tenant: str) -> int:
        with self._lock:
            return self._listed(tenant).bytes()

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            names = [name for name, _ in self._medium.entries(_AREA)]
            if names:
                self._medium.delete(names)

    def _listed(self, tenant: str) -> _Held:
        held = self._held.get(tenant)
        now = self._clock()
        if held is None or not 0 <= now - held.listed_s < _REFRESH_S:
            names = sorted(name for name, _ in self._medium.entries(f"{_AREA}/{tenant}"))
            held = self._held[tenant] = _Held(_marks(names), now)
        return held


def _marks(names: Sequence[str]) -> OrderedDict[str, tuple[str, int]]:
    marks: OrderedDict[str, tuple[str, int]] = OrderedDict()
    for name in names:
        match = _MARK.fullmatch(name)
        if match is not None:
            block = f"blocks/{match[4]}/{match[5]}.kvb"
            marks.pop(block, None)  # written twice: the later mark counts
            marks[block] = (name, int(match[3]))
    return marks


def _digest(name: str) -> str:
    return name.removeprefix("blocks/").removesuffix(".kvb").replace("/", "")
