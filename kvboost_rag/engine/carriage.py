"""Blocks of one request that pass from host memory to the device, layer by layer, while its forwards run.

::

    copy stream     | layer 0 | layer 1 | wait | layer 2 | wait | layer 3 | …
    compute stream            | lay 0, run 0   | lay 1, run 1   | lay 2, run 2 | …

Of each layer, blocks go into a buffer one behind the other, in as many pieces as it takes; a piece never spans layers.
What turns a buffer into keys and values at their places is the same for every layer: it is worked out once, and takes a
dozen calls a piece however many blocks are in it. What the cache keeps in host memory is laid there by the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from kvboost_rag.engine.compose import PIECE, lay
from kvboost_rag.engine.report import Report
from kvboost_rag.kv.rope import RopeTable, turn_into
from kvboost_rag.model.cache import KVCache
from kvboost_rag.model.streaming.ring import SLOTS, Ring


@dataclass(frozen=True, slots=True)
class Place:
    """Positions ``[start, end)`` of a prompt get the first tokens of ``kv [num_layers, 2, num_kv_heads, >= end - start,
    head_dim]``, which lies in host memory, each layer in one piece."""

    start: int
    end: int
    kv: torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks that are in a buffer together: ``places`` with the row of the buffer, ``head_dim`` values wide, that their
    block begins at; ``sources`` with their offsets in bytes."""

    places: tuple[tuple[Place, int], ...]
    sources: tuple[tuple[int, torch.Tensor], ...]
    nbytes: int

    def parts(self, layer: int) -> list[tuple[int, torch.Tensor]]:
        """What is copied, and where to."""
        return [(offset, kv[layer].view(-1).view(torch.uint8)) for offset, kv in self.sources]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a piece comes to its places: ``rows [2 * num_kv_heads * n]`` of the buffer, ``table`` that turns the keys,
    ``places [n]`` in the cache. Good for as long as the cache's own ``layout`` stays as it was."""

    of: Hashable
    rows: torch.Tensor
    table: tuple[torch.Tensor, torch.Tensor]
    places: torch.Tensor


def layer_bytes(kv: torch.Tensor) -> int:
    """Bytes of one layer of a block."""
    return kv[0].nbytes


def pieces_of(places: Sequence[Place], most: int = PIECE) -> list[Piece]:
    """Cut into pieces of at most ``most`` bytes (no block's layer is larger); a block that stands at several places is
    in one piece, once."""
    by_block: dict[int, list[Place]] = {}
    for place in places:
        by_block.setdefault(id(place.kv), []).append(place)
    groups: list[list[list[Place]]] = []
    room = 0
    for block in by_block.values():
        size = layer_bytes(block[0].kv)
        if size > room:
            groups.append([])
            room = most
        groups[-1].append(block)
        room -= size
    return [_piece(group) for group in groups]


def _piece(blocks: Sequence[Sequence[Place]]) -> Piece:
    places, sources, offset = [], [], 0
    for block in blocks:
        kv = block[0].kv
        sources.append((offset, kv))
        places += [(place, offset // (kv.shape[-1] * kv.element_size())) for place in block]
        offset += layer_bytes(kv)
    return Piece(tuple(places), tuple(sources), offset)


class Carriage:
    """Carries ``places`` (at least one) into ``cache``. Everything happens in the thread that runs the forward, under
    the model's lock. :meth:`lay` is called before a layer is read, :meth:`close` at the end, whatever happened.

    Args:
        ring: the buffers; reserved, they hold any layer of any block that does not lie in host memory altogether.
        cache: has room for all of them.
        report: ``stages["compose"]`` gets the host's seconds.
        settle: wait for each copy on the host, in ``stages["wait"]``: for whoever wants to know how long they take.
    """

    def __init__(
        self,
        ring: Ring,
        cache: KVCache,
        places: Sequence[Place],
        rope: RopeTable,
        report: Report,
        *,
        settle: bool = False,
    ) -> None:
        self._ring, self._rope, self._report, self._settle = ring, rope, report, settle
        self._num_layers = places[0].kv.shape[0]
        self._user, self._sent, self._laid = ring.user(), 0, 0
        self._sources = list({id(p.kv): p.kv for p in places}.values())
        self._started = perf_counter()
        self.carried_s = 0.0  # until the last copy had happened, where that is waited for
        self._host_length = cache.host_length  # up to here everything is laid, at all layers
        for p in places:
            if p.start < self._host_length:
                lay(cache, p.start, min(p.end, self._host_length), p.kv, rope)
        cache.length = max(cache.length, *(p.end for p in places))
        self._pieces = pieces_of([p for p in places if p.end > self._host_length], min(PIECE, ring.stats.slot_bytes))
        self._layouts: list[Layout | None] = [None] * len(self._pieces)
        try:
            self._send(SLOTS)
            for i in range(len(self._pieces)):
                self._layout(cache, i)  # finding places may wait for the device: not in the forward
        except BaseException:
            self.close()
            raise

    def lay(self, cache: KVCache, layer: int) -> None:
        """``layer`` is in place when this returns: for the compute stream, that is; the host does not wait. What was
        laid once is not laid again: it may have been corrected since."""
        if not self._laid <= layer < self._num_layers:
            return
        with self._report.stage("compose"):
            for at in range(self._laid, layer + 1):
                for i in range(len(self._pieces)):
                    self._lay(cache, at, i)
                self._laid = at + 1
        if self._settle and self._laid == self._num_layers:
            self.carried_s = perf_counter() - self._started

    def close(self) -> None:
        """Nothing more will be laid. Host memory is held until copies that are under way have happened."""
        self._ring.keep(self._sources)
        self._sources, self._pieces, self._layouts = [], [], []

    def _send(self, stop: int) -> None:
        """Send the pieces before number ``stop``, as far as there are so many."""
        for number in range(self._sent, min(stop, len(self._pieces) * self._num_layers)):
            layer, i = divmod(number, len(self._pieces))
            self._ring.send((self._user, number), self._pieces[i].parts(layer))
            self._sent = number + 1

    def _lay(self, cache: KVCache, layer: int, i: int) -> None:
        piece, layout, number = self._pieces[i], self._layout(cache, i), layer * len(self._pieces) + i
        # The one behind this, to where the one before was. Not at once when that had been read: a copy from ordinary
        # memory holds the host up, and the layer before this is enqueued only by now.
        self._send(number + SLOTS)
        self._lay_on_host(cache, layer, piece)
        name = (self._user, number)
        kv = piece.sources[0][1]
        if self._settle:
            with self._report.stage("wait"):
                self._ring.settle(name)
        with self._ring.piece(name, piece.parts(layer)) as slot:
            rows = slot[: piece.nbytes].view(kv.dtype).view(-1, kv.shape[-1]).index_select(0, layout.rows)
        both = rows.view(2, kv.shape[2], -1, kv.shape[-1])
        keys = torch.empty_like(both[0])
        turn_into(keys, both[0], layout.table)
        cache.put(layer, layout.places, keys, both[1])

    def _lay_on_host(self, cache: KVCache, layer: int, piece: Piece) -> None:
        """Pages that have moved to the host since this began, before this layer was laid."""
        for place, _ in piece.places:
            a, b = max(place.start, self._host_length), min(place.end, cache.host_length)
            if a < b:
                here = slice(layer, layer + 1)
                lay(cache, a, b, place.kv[here, :, :, a - place.start :], self._rope, here)

    def _layout(self, cache: KVCache, i: int) -> Layout:
        found = self._layouts[i]
        if found is None or found.of != cache.layout:
            found = self._layouts[i] = _layout_of(self._pieces[i], cache, self._rope)
        return found


def _layout_of(piece: Piece, cache: KVCache, rope: RopeTable) -> Layout:
    """Of what the cache keeps on the device."""
    positions, first, stride = [], [], []
    for place, row in piece.places:
        start = min(max(place.start, cache.host_length), place.end)
        positions.append(torch.arange(start, place.end))
        first.append(torch.arange(row + start - place.start, row + place.end - place.start))
        stride.append(torch.full((place.end - start,), place.kv.shape[3]))
    at = torch.cat(positions)
    places = cache.places(at)
    heads = torch.arange(2 * piece.sources[0][1].shape[2], device=places.device)[:, None]
    rows = torch.cat(first).to(places.device) + heads * torch.cat(stride).to(places.device)
    return Layout(cache.layout, rows.flatten(), rope.at(at), places)
