"""The contract of every block store.

A store maps a key to a :class:`~kvboost_rag.kv.block.Block`. Three rules stand above all:

* **The index is never proof.** A block is served only if the key derived from its own header and token ids equals the
  key that was asked for. Everything else is a :class:`Miss` with a reason.
* **A store never breaks an answer.** A damaged, foreign or unreadable block is a miss and is set aside; a full disk or
  full memory is a skipped write with one warning. Only a store that cannot be opened at all raises
  :class:`~kvboost_rag.errors.StoreError`.
* **Blocks are immutable.** Writing a key that exists is a no-op that counts as success.

Every method is safe from several threads, and for stores on disk from several processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvboost_rag.errors import UsageError
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.layers import LayeredBlock
from kvboost_rag.store.anchors import AnchorIndex

if TYPE_CHECKING:
    import torch

    from kvboost_rag.store.arriving import ArrivingBlock

# Reasons of a miss, as shown to users. Stores use these words and no others.
REASONS = (
    "absent",  # never stored, or evicted and forgotten
    "store off",  # the null store
    "damaged",  # truncated, bit-flipped, unreadable; set aside
    "foreign",  # not a block of ours, or of an unknown format version; set aside
    "mismatch",  # the header says it is another computation; set aside
    "unavailable",  # a tier did not answer in time, or the block needs a library that is not installed here
    "expired",  # older than its time to live
)

# From a number of bytes to host memory, uint8 ``[nbytes]``; raises MemoryError.
Allocate = Callable[[int], "torch.Tensor"]

# Seconds; how long look-ups took is counted between these.
LATENCY_BOUNDS_S = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, slots=True)
class Miss:
    """Why there is no block: one of :data:`REASONS`, and a detail for humans."""

    reason: str
    detail: str = ""


@dataclass(slots=True)
class StoreStats:
    """Counters since opening, and what is held now. ``bytes`` counts K and V payload as stored."""

    kind: str
    blocks: int = 0
    bytes: int = 0
    limit_bytes: int | None = None
    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)  # reason → count
    writes: int = 0
    skipped_writes: int = 0  # full disk, full memory, larger than the limit
    evictions: int = 0
    known_chunks: int = 0
    complete: bool = True  # False: there are more blocks than were counted (a large or slow remote)
    pinned: int = 0
    policy: str = ""  # who goes first when the limit is reached
    ttl_s: float | None = None
    compression: str = "none"
    tenants: int = 0  # salts under which there are blocks
    tenant_bytes: int | None = None  # most bytes of the blocks under one salt
    read_bytes: int = 0  # K and V handed out
    read_s: float = 0.0  # spent on look-ups that hit
    write_s: float = 0.0
    read_counts: list[int] = field(default_factory=list)  # look-ups that hit, by LATENCY_BOUNDS_S; the last: slower
    tiers: list[StoreStats] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "tiers"}
        return {**own, "tiers": [tier.as_dict() for tier in self.tiers]}


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding of :meth:`BlockStore.check`."""

    kind: str  # "damaged" | "foreign" | "mismatch" | "orphan file" | "missing file" | "index" | "anchors"
    where: str  # key or file
    detail: str
    fixed: bool = False


class BlockStore(ABC):
    """Where blocks are kept. See the module's docstring for what always holds."""

    #: The texts known to this store (persisted with it where the store persists). Grows by :meth:`AnchorIndex.add`;
    #: it may know texts whose block is gone (evicted): such a span is found, and its look-up is a miss.
    anchors: AnchorIndex

    #: What this store rounds to when something is put: ``"none"``, ``"int8"`` or ``"int4"``. A block's own header says
    #: what it went through; a rounded one never counts as exact. (What is squeezed without loss on its way to the
    #: medium is the same block.)
    compression: str = "none"

    #: Whether :meth:`open_many` hands out blocks whose layers are still on their way.
    arrives: bool = False

    #: Whether :meth:`prune` works here.
    prunable: bool = False

    #: Where the nearest tier keeps blocks, if that is not host memory: what is handed out may lie there.
    device: torch.device | None = None

    @abstractmethod
    def get(self, key: str) -> Block | Miss:
        """The block under ``key``, verified, or why not. Does not modify stored data, except to set damage aside
        and to note recency. The tensor may be a read-only view of a mapped file: never write into it."""

    @abstractmethod
    def put(self, block: Block) -> bool:
        """Keep ``block`` under its own key. True if it is stored now (or was before); False if the write was skipped
        (no room). Atomic: readers see the whole block or none."""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether ``key`` is probably here. Cheap, reads no tensor, and no proof: :meth:`get` may still miss."""

    def tier_of(self, key: str) -> int:
        """The number of the tier that a look-up of ``key`` would probably be served from, the nearest is 0. Cheap: the
        last tier is not asked, so it also stands for "nowhere"."""
        return 0

    def levels(self) -> list[BlockStore]:
        """The stores that a look-up goes through, the nearest first, as :meth:`tier_of` counts them."""
        return [self]

    @property
    def deletions(self) -> int:
        """How often something was deleted, for :meth:`promote`."""
        return 0

    def device_room(self, salt: str) -> int:
        """Bytes that a tier on :attr:`device` takes under ``salt`` before somebody has to go; 0 where there is none."""
        return 0

    def promote(self, blocks: Iterable[Block], since: int, used: Iterable[str] = ()) -> int:
        """Bring ``blocks``, which were looked up here, to a tier in front that takes them later because it takes time:
        called when the answer is there. ``since`` are the :attr:`deletions` before the look-up; ``used`` are keys of
        the same request that are in front already, and are not driven out. The number of blocks that moved."""
        return 0

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Forget ``key``. True if it was here."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """All keys, in no order. Concurrent changes may or may not be seen."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Counters and sizes."""

    def quick_stats(self) -> StoreStats:
        """:meth:`stats` without what is costly to find out (a server's blocks are not counted): for being asked every
        few seconds."""
        return self.stats()

    @abstractmethod
    def check(self, fix: bool = False) -> list[Problem]:
        """Read everything and list what is wrong; with ``fix`` set it aside. An empty list means healthy.
        Costs a full read of the store."""

    @abstractmethod
    def clear(self) -> int:
        """Drop every block, known text and manifest entry; the number of blocks dropped."""

    @abstractmethod
    def get_meta(self, name: str) -> bytes | None:
        """A small named value of the store's manifest (for example the frozen canonical head of a model)."""

    @abstractmethod
    def put_meta(self, name: str, value: bytes) -> bytes:
        """Set ``name`` if it is not set, atomically; returns the value that holds now (first writer wins)."""

    @abstractmethod
    def set_meta(self, name: str, value: bytes) -> bool:
        """Set ``name`` whether it is set or not, atomically (last writer wins), for what is measured again. Never for
        what keys rest on. True if it is kept as long as the blocks are."""

    def get_many(self, keys: Sequence[str]) -> list[Block | Miss]:
        """:meth:`get` for several keys, in order. Stores with slow media override it to read in parallel."""
        return [self.get(key) for key in keys]

    def open_many(self, keys: Sequence[str]) -> list[Block | ArrivingBlock | Miss]:
        """:meth:`get_many` for whoever can begin with the first layers: on slow media a block comes as soon as header
        and token ids are verified, and its layers are read from it. It counts, and moves to faster tiers, when
        :meth:`ArrivingBlock.finish` is called; damage in a layer is set aside and counted when it is met. The same key
        twice may give the same block twice."""
        return [*self.get_many(keys)]

    def layers(self, key: str) -> LayeredBlock | Miss:
        """The block under ``key``, header and token ids verified, to be read layer by layer: on slow media the first
        layers can be used before the last have arrived. A hit here moves nothing to a faster tier."""
        found = self.get(key)
        return found if isinstance(found, Miss) else LayeredBlock.of(found)

    def touch(self, key: str) -> None:  # noqa: B027 - optional hook
        """Note that ``key`` was used elsewhere (a faster tier had it), for stores that evict by use. Cheap."""

    def keep_in(self, allocate: Allocate | None) -> None:  # noqa: B027 - optional hook
        """K and V that are put from now on, and kept in this process's memory, lie in memory that ``allocate`` gives
        (None: ordinary memory): a device copies from page-locked memory several times faster. What is kept elsewhere,
        or compressed, is not concerned."""

    def prune(self, max_bytes: int | None = None, older_than_s: float | None = None) -> int:
        """Drop expired blocks, those not used for ``older_than_s`` seconds, then as many as must go to leave at most
        ``max_bytes``; the number of blocks dropped. Pinned blocks go last, and never for their age.

        Raises:
            UsageError: this kind of store cannot be pruned, or a limit makes no sense.
        """
        hint = "store clear, or a smaller limit where the store is opened"
        raise UsageError(f"a {self.stats().kind} store cannot be pruned", hint=hint)

    def delete_tagged(self, tag: str) -> int:
        """Drop every block that carries ``tag`` (see :attr:`BlockHeader.tags`); the number of blocks dropped. The
        hashes of their texts stay among the known chunks until :meth:`clear`: they answer "was this very text here",
        and nothing else. Costs a full scan."""
        keys = [key for key in self.keys() if isinstance(b := self.get(key), Block) and tag in b.header.tags]
        return sum(self.delete(key) for key in keys)

    def pin(self, keys: Iterable[str]) -> int:
        """Keep these blocks from eviction, as far as all pinned ones stay within half of the store's limit; the number
        that is held and pinned now. Survives restarts where blocks do."""
        return 0

    def unpin(self, keys: Iterable[str]) -> None:  # noqa: B027 - optional hook
        """Let these blocks be evicted again."""

    def tenant_usage(self, salt: str) -> int:
        """Bytes of the blocks under ``salt``; 0 where that is not known.

        Raises:
            StoreError: who should know does not answer.
        """
        return 0

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release handles. Safe to call twice."""

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
