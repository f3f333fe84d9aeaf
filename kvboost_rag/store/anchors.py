"""The anchor index: knows chunk *texts* without keeping them, and finds every known text inside any prompt.

::

    add     text ──► 64-byte record: anchor (first 32 / 128 characters), length, check, 128-bit hash, key digest
    find    prompt ──► all 32-character windows ──bitmap, sorted anchors──► candidates ──128-bit hash──► spans

Detection decides about speed only. A span means "this very text was stored under these keys" up to a 128-bit hash that
is not cryptographic; whoever uses a block compares its own token ids (the index is never proof). The texts themselves
cannot be read from the index, but whoever has the file can test whether a text that he already knows is in it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from kvboost_rag.errors import StoreError, UsageError
from kvboost_rag.keys import KEY_PREFIX
from kvboost_rag.store.anchor_file import AnchorFile, well_formed
from kvboost_rag.store.anchor_hash import ANCHOR_CHARS, salts, text_columns, text_digest
from kvboost_rag.store.anchor_match import CutCandidate, Matches, TextSpan, match
from kvboost_rag.store.anchor_scan import Scan
from kvboost_rag.store.anchor_table import RECORD, Records, Slab, Table, View, record_sums

__all__ = ["AnchorIndex", "CutCandidate", "Matches", "TextSpan"]

log = logging.getLogger(__name__)

_BATCH = 8192  # pairs added at once
_MOST_CHARS = (1 << 32) - 1  # of one text


class AnchorIndex:
    """Known texts, in memory (``path=None``) or in an append-only file that several processes may share.

    Texts shorter than 32 characters are not indexed. Safe from several threads. The arrays take 20 bytes of memory per
    record with a file, 64 without (plus the allocator's slack). A file whose header is not ours is left alone: the
    index then works in memory, and :meth:`check` tells. See :mod:`~kvboost_rag.store.anchor_file` for the file.

    Raises:
        StoreError: the file can be neither opened nor created.
    """

    def __init__(self, path: Path | None = None) -> None:
        #: Called with the records that :meth:`add` found new, for whoever carries them elsewhere. Holds no lock.
        self.on_new: Callable[[Records], None] | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._file = AnchorFile(Path(path)) if path is not None else None
        self._start()
        with self._lock:
            self._sync()
        if self._file and self._file.problem:
            log.warning("%s is left alone (%s); chunk texts are kept in memory", path, self._file.problem)

    def _start(self) -> None:
        """An empty table over the file, or over memory where there is no usable file."""
        shared = self._shared = self._file if self._file and not self._file.problem else None
        self._rows = 0  # of the file, read so far
        self._generation = shared.generation if shared else b""
        self._table = Table((lambda slab, i: shared.body(int(slab.payload[i]))) if shared else _memory_body)

    def _sync(self) -> None:
        """Take in what other processes appended. Hold the lock."""
        if self._closed:
            raise StoreError("the anchor index is closed", hint="open the store again")
        if not self._shared:
            return
        self._shared.poll()
        count = self._shared.count()
        if self._shared.generation != self._generation or count < self._rows:
            self._start()
        if self._shared and count > self._rows:
            slab = self._shared.read(self._rows, count)
            if slab:
                self._table.add(slab)
            self._rows = count

    def _view(self) -> View:
        with self._lock:
            self._sync()
            return self._table.view()

    # -- adding ----------------------------------------------------------------------------------------------------

    def add(self, items: Iterable[tuple[str, str]], salt: str = "") -> int:
        """Make (text, key) pairs known; returns how many were new.

        Texts are stripped of outer whitespace; those shorter than 32 characters then are left out. A pair that is known
        already changes nothing. Where the file cannot be written (full disk, read-only) the pairs are dropped with one
        warning.

        Raises:
            UsageError: an item is not a pair of strings, or a key is not ``kv1:`` and 64 hex digits.
            StoreError: the index is closed.
        """
        pairs = _clean(items)
        new = 0
        while batch := dict.fromkeys(islice(pairs, _BATCH)):
            records = _records(list(batch), salt)
            with self._lock:
                taken = self._take(records)
            new += len(taken)
            if self.on_new is not None and len(taken):
                self.on_new(taken)
        return new

    def merge(self, records: Records) -> int:
        """Make records known that another index gave out; malformed ones are left out. How many were new."""
        with self._lock:
            return len(self._take(np.unique(records[well_formed(records)])))

    def records(self) -> Records:
        """All records, to be given to another index: 64 bytes each, without the texts."""
        with self._lock:
            self._sync()
            if not self._shared:
                return _memory_records(self._table.view())
            return self._shared.records()

    def _take(self, records: Records) -> Records:
        """Those of ``records`` that were new. Hold the lock."""
        if not self._shared:
            self._sync()
            return self._insert(records)
        with self._shared.locked():
            self._sync()
            return self._insert(records)

    def _insert(self, records: Records) -> Records:
        records = records[~self._table.view().known(records)]
        payload = records["body"]
        if self._shared and len(records):
            if not self._shared.append(records):
                return records[:0]
            payload = np.arange(self._rows, self._rows + len(records), dtype=np.uint32)
            self._rows += len(records)
        self._table.add(Slab(records["anchor"], records["length"], records["check"], payload))
        return records

    # -- finding ---------------------------------------------------------------------------------------------------

    def find(self, text: str, salt: str = "", extra: Sequence[str] = ()) -> Matches:
        """Every known text inside ``text``: the leftmost, of several there the longest, then on behind it.

        ``extra`` are further texts to find under the same rule, of any length (stripped; empty ones are skipped). Time
        is nearly flat in the number of known texts and linear in the prompt; a prompt built to need more than hundreds
        of comparisons per character is searched only so far.

        Raises:
            UsageError: ``text`` or a text of ``extra`` is not a string.
            StoreError: the index is closed.
        """
        if not isinstance(text, str) or not all(isinstance(named, str) for named in extra):
            raise UsageError("the anchor index searches strings only", hint="pass the rendered prompt as str")
        return match(Scan(text, salts(salt), self._view()), text, extra)

    def contains(self, text: str, salt: str = "") -> bool:
        """Whether this text (stripped) is known under any key."""
        text = text.strip()
        first = Scan(text, salts(salt), self._view()).next(0)
        return first is not None and (first.start, first.end) == (0, len(text))

    def __len__(self) -> int:
        """Known (text, key) pairs."""
        with self._lock:
            self._sync()
            return self._table.size

    # -- care ------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything, for every process that shares the file. A file that is not ours is left alone.

        Raises:
            StoreError: the file is read-only, or the index is closed.
        """
        with self._lock:
            self._sync()
            if self._shared:
                with self._shared.locked():
                    self._shared.clear()
                    self._shared.poll()
            self._start()

    def check(self, fix: bool = False) -> list[str]:
        """What is wrong with the file, one line each; empty means healthy. Reads the whole file. ``fix`` repairs what
        can be, and sets a file that is not ours aside under another name (texts kept in memory until then go into the
        new one)."""
        with self._lock:
            self._sync()
            found = self._file.check(fix) if self._file else []
            if fix and found:
                kept = _memory_records(self._table.view()) if not self._shared else None
                self._start()
                self._sync()
                if kept is not None and len(kept):
                    self._take(kept)
            return found

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        with self._lock:
            self._closed = True
            if self._file:
                self._file.close()


def _memory_body(slab: Slab, index: int) -> bytes:
    return bytes(slab.payload[index].tobytes())


def _memory_records(view: View) -> Records:
    parts = [np.zeros(0, dtype=RECORD)]
    for slab in view.slabs:
        records = np.zeros(len(slab), dtype=RECORD)
        for name, column in zip(("anchor", "length", "check", "body"), slab.columns(), strict=True):
            records[name] = column
        parts.append(_sealed(records))
    return np.concatenate(parts)


def _sealed(records: Records) -> Records:
    records["sum"] = record_sums(records)
    return records


def _clean(items: Iterable[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
    """Stripped texts that are long enough, with the raw digests of their keys."""
    for text, key in items:
        if not isinstance(text, str) or not isinstance(key, str):
            raise UsageError("the anchor index takes pairs of a text and a key", hint="add([(text, block.key)])")
        text = text.strip()
        if ANCHOR_CHARS <= len(text) <= _MOST_CHARS:
            yield text, _key_digest(key)


def _key_digest(key: str) -> bytes:
    try:
        if len(key) != len(KEY_PREFIX) + 64 or not key.startswith(KEY_PREFIX):
            raise ValueError
        return bytes.fromhex(key[len(KEY_PREFIX) :])
    except ValueError:
        raise UsageError(f"{key[:80]!r} is not a block key", hint="a key is 'kv1:' and 64 hex digits") from None


def _records(pairs: list[tuple[str, bytes]], salt: str) -> Records:
    secret = salts(salt)
    texts = [text for text, _ in pairs]
    records = np.zeros(len(pairs), dtype=RECORD)
    records["anchor"], records["length"], records["check"] = text_columns(texts, secret)
    bodies = b"".join([text_digest(text, secret.digest) + digest for text, digest in pairs])
    records["body"] = np.frombuffer(bodies, dtype="V48")
    return _sealed(records)
