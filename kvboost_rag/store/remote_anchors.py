"""Known texts that travel: anchor records in a remote medium, shared by every machine that uses it.

Records lie in batches ``anchors/<count>-<hash of the contents>``, a set without order: adding the same batch twice, or
from two machines, changes nothing. Small batches are merged into larger ones by whoever finds many; a reader that meets
a name whose batch has just been merged away lists again. Batches are hostile input: sizes are bounded, malformed
records are left out, and a false one can cost a look-up, never an answer (the index is never proof).
"""

from __future__ import annotations

import logging
import re
import threading

import numpy as np
import xxhash

from kvboost_rag.store.anchor_table import RECORD, Records
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.remote_link import Link, Medium, Unavailable

log = logging.getLogger("kvboost_rag.store")

MERGE_FROM = 32  # small batches
LARGE = 1 << 16  # records: such a batch is left as it is
MOST = 1 << 18  # records in one batch (16 MiB); larger ones are not read
_NAME = re.compile(r"anchors/([0-9]{1,7})-([0-9a-f]{32})")
_PAGE = 16  # batches fetched at once
_BYTES = RECORD.itemsize


class AnchorSync:
    """Keeps ``index`` and the remote batches the same. Thread-safe."""

    def __init__(self, index: AnchorIndex, medium: Medium, link: Link) -> None:
        self.index = index
        self._medium = medium
        self._link = link
        self._lock = threading.Lock()  # one transfer at a time
        self._guard = threading.Lock()
        self._pending: list[Records] = []
        self._seen: set[str] = set()
        index.on_new = self.note

    def note(self, records: Records) -> None:
        """Records that others should know, at the next :meth:`flush`."""
        with self._guard:
            self._pending.append(records)

    def flush(self) -> bool:
        """Send what was noted. False, with nothing lost, if the remote does not answer."""
        with self._lock:
            with self._guard:
                pending, self._pending = self._pending, []
            if not pending:
                return True
            records = np.unique(np.concatenate(pending))
            try:
                for first in range(0, len(records), LARGE):
                    self._send(records[first : first + LARGE])
            except Unavailable:
                with self._guard:
                    self._pending.insert(0, records)
                return False
            return True

    def _send(self, records: Records) -> str:
        data = records.tobytes()
        name = f"anchors/{len(records)}-{xxhash.xxh3_128_hexdigest(data)}"
        self._link.call(lambda: self._medium.write(name, data))
        self._seen.add(name)
        return name

    def refresh(self) -> int:
        """Take in what other machines added; how many records were new here. Raises Unavailable."""
        with self._lock:
            new, vanished = self._read_new()
            if vanished:  # merged while we looked
                new += self._read_new()[0]
            return new

    def _read_new(self) -> tuple[int, bool]:
        names = self._names()
        self._seen &= set(names)
        fresh, found, small = [n for n in names if n not in self._seen], 0, []
        vanished = False
        for first in range(0, len(fresh), _PAGE):
            page = fresh[first : first + _PAGE]
            for name, records in zip(page, self._read(page), strict=True):
                vanished |= records is None
                self._seen.add(name)
                if records is not None:
                    found += self.index.merge(records)
        small = [name for name in names if _count(name) < LARGE]
        if len(small) >= MERGE_FROM and not vanished:
            self._merge(small)
        return found, vanished

    def push_missing(self) -> None:
        """Send what this machine knows and the remote does not: texts of an earlier time, or of a remote that was
        emptied. Raises Unavailable."""
        mine = self.index.records()
        if not len(mine):
            return
        with self._lock:
            names = self._names()
            theirs = [np.zeros(0, dtype=RECORD)]
            for first in range(0, len(names), _PAGE):
                theirs += [r for r in self._read(names[first : first + _PAGE]) if r is not None]
            missing = np.setdiff1d(_flat(mine), _flat(np.concatenate(theirs))).view(RECORD)
            for first in range(0, len(missing), LARGE):
                self._send(missing[first : first + LARGE])

    def clear(self) -> None:
        """Remove every batch. Raises Unavailable."""
        with self._lock:
            with self._guard:
                self._pending = []
            self._seen = set()
            names = [name for name, _ in self._link.call(lambda: list(self._medium.entries("anchors")))]
            if names:
                self._link.call(lambda: self._medium.delete(names))

    def _names(self) -> list[str]:
        listed = self._link.call(lambda: list(self._medium.entries("anchors")))
        return [n for n, size in listed if _NAME.fullmatch(n) and size == _count(n) * _BYTES <= MOST * _BYTES]

    def _read(self, names: list[str]) -> list[Records | None]:
        values = self._link.call(lambda: self._medium.read(names, MOST * _BYTES))
        found: list[Records | None] = []
        for name, value in zip(names, values, strict=True):
            if value is None:
                found.append(None)
                continue
            sound = isinstance(value, bytes | memoryview) and xxhash.xxh3_128_hexdigest(value) == name.split("-")[1]
            if not sound:
                log.warning("a batch of known texts is damaged and left out: %s", name)
            data = bytes(value) if sound and isinstance(value, bytes | memoryview) else b""
            found.append(np.frombuffer(data[: len(data) - len(data) % _BYTES], dtype=RECORD))
        return found

    def _merge(self, names: list[str]) -> None:
        """Small batches into one. Another machine may do so too: it is the same batch then, or some are twice."""
        parts, merged = [np.zeros(0, dtype=RECORD)], []
        for first in range(0, len(names), _PAGE):
            page = names[first : first + _PAGE]
            for name, records in zip(page, self._read(page), strict=True):
                if records is not None and sum(map(len, parts)) + len(records) <= MOST:
                    parts.append(records)
                    merged.append(name)
        if len(merged) > 1:
            kept = self._send(np.unique(np.concatenate(parts)))
            doomed = [name for name in merged if name != kept]
            self._link.call(lambda: self._medium.delete(doomed))
            self._seen -= set(doomed)


def _count(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _flat(records: Records) -> Records:
    return np.ascontiguousarray(records).view(f"V{_BYTES}").reshape(-1)
