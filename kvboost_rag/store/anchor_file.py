"""The anchor file: a 64-byte header, then 64-byte records, only ever appended to.

::

    header   "kvanchor" | version u32 | record size u32 | generation 16 B | zeros 24 B | xxh3_64 of the 56 bytes before
    record   see anchor_table.RECORD

Writers take ``flock`` for each append; readers take nothing. A record that a killed writer left half-written is cut off
by the next writer and never read. A new generation (:meth:`AnchorFile.clear`) tells other processes to forget what they
read. The file is read with ``pread``, not mapped: another process may shorten it, and touching a mapped page that is
gone kills the reader.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvboost_rag.errors import StoreError
from kvboost_rag.store.anchor_hash import ANCHOR_CHARS, I64
from kvboost_rag.store.anchor_table import RECORD, Records, Slab, join, record_sums

log = logging.getLogger(__name__)

MAGIC = b"kvanchor"
VERSION = 1
SIZE = 64  # of the header and of each record
_OTHER_VERSION = "format version"
_BODY = 16  # offset of the body in a record
_PIECE = 1 << 13  # records read at once: half a MiB, so that opening leaves no large hole in the heap
_SHOWN = 50  # malformed records that check() lists one by one


def _header() -> bytes:
    head = struct.pack("<8sII16s24x", MAGIC, VERSION, SIZE, os.urandom(16))
    return head + xxhash.xxh3_64_digest(head)


def _header_problem(head: bytes) -> str:
    if len(head) < SIZE:  # a writer died while creating the file, or it is another, short file
        return "" if MAGIC.startswith(head[:8]) or head.startswith(MAGIC) else "not an anchor file"
    if not head.startswith(MAGIC):
        return "not an anchor file"
    if xxhash.xxh3_64_digest(head[:56]) != head[56:]:
        return "header damaged"
    version, size = struct.unpack_from("<II", head, 8)
    if (version, size) != (VERSION, SIZE):
        return (
            f"{_OTHER_VERSION} {version} with records of {size} bytes; this program reads version {VERSION} of {SIZE}"
        )
    return ""


class AnchorFile:
    """One open anchor file.

    ``problem`` is not empty where the file's header is not one of ours; such a file is never written to.

    Raises:
        StoreError: the file can be neither opened nor created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writable = True
        self.problem = ""
        self.generation = b""  # the header that records were last read under
        self._fd = -1
        self._warned = False
        self._reopen()

    # -- opening ---------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        self.close()
        self.writable = True
        flags = os.O_APPEND | os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._fd = os.open(self.path, flags, 0o600)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                self._fd, self.writable = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), False
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                self.close()
                raise OSError(errno.EINVAL, "not a regular file")
        except OSError as error:
            raise StoreError(
                f"cannot open the anchor file {self.path}: {error.strerror}",
                hint="give the store a folder that this user may write to",
            ) from error
        self._pid = os.getpid()
        self.generation, self.problem = b"", ""
        self.poll()
        if not self.generation and not self.problem and self.writable:
            with self.locked():
                self.poll()

    def _own(self) -> int:
        """The descriptor; a forked child opens its own, because it would share its parent's lock."""
        if self._fd < 0:
            raise StoreError(f"the anchor file {self.path} is closed", hint="open the store again")
        if self._pid != os.getpid():
            self._reopen()
        return self._fd

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file against other writers. The file has a header then, and ends with a whole record."""
        while True:
            fd = self._own()
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                break
            self._reopen()  # deleted under us
        try:
            if self.writable and not self.problem:
                self._mend(fd)
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def _mend(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size < SIZE:
            os.ftruncate(fd, 0)
            self._write(fd, _header())
        elif size % SIZE:
            os.ftruncate(fd, size - size % SIZE)

    # -- reading ---------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Look at the header again. Where ``generation`` changes, what was read before is void."""
        if not os.fstat(self._own()).st_nlink:
            self._reopen()
        head = os.pread(self._fd, SIZE, 0)
        if head == self.generation:
            return
        problem = _header_problem(head)
        if problem and self.generation:
            return  # damaged after we read it: carry on, check() tells
        self.problem = problem
        self.generation = head if len(head) == SIZE and not problem else b""

    def count(self) -> int:
        """Whole records in the file."""
        return max(0, os.fstat(self._own()).st_size // SIZE - 1) if self.generation else 0

    def read(self, first: int, stop: int) -> Slab | None:
        """The well-formed records ``[first, stop)`` with their row numbers as payload; None if there are none."""
        parts = []
        for row, records in self._pieces(first, stop):
            good = np.flatnonzero(well_formed(records))
            rows = np.arange(row, row + len(records), dtype=np.uint32)
            parts.append(Slab(records["anchor"], records["length"], records["check"], rows).take(good))
        filled = [part for part in parts if len(part)]
        return join(filled) if filled else None

    def _pieces(self, first: int, stop: int) -> Iterator[tuple[int, Records]]:
        while first < stop:
            data = os.pread(self._own(), min(stop - first, _PIECE) * SIZE, SIZE * (first + 1))
            records = np.frombuffer(data[: len(data) - len(data) % SIZE], dtype=RECORD)
            if not len(records):
                return  # shortened meanwhile
            yield first, records
            first += len(records)

    def records(self) -> Records:
        """All well-formed records, as they lie in the file."""
        parts = [np.zeros(0, dtype=RECORD)]
        parts += [records[well_formed(records)] for _, records in self._pieces(0, self.count())]
        return np.concatenate(parts)

    def body(self, row: int) -> bytes:
        """Text hash and key digest of one record; shorter than 48 bytes if the row is gone."""
        try:
            return os.pread(self._own(), SIZE - _BODY, SIZE * (row + 1) + _BODY)
        except OSError:
            return b""

    # -- writing (call these while :meth:`locked`) -----------------------------------------------------------------

    def append(self, records: Records) -> bool:
        """Write records at the end; False, with one warning, if there is no room or no permission."""
        fd, size = self._own(), os.fstat(self._own()).st_size
        try:
            if not self.writable:
                raise PermissionError(f"{self.path} is read-only")
            self._write(fd, records.tobytes())
        except OSError as error:
            if self.writable:
                os.ftruncate(fd, size)
            if not self._warned:
                log.warning("chunk texts are not recorded, so that later runs will not find them: %s", error)
            self._warned = True
            return False
        return True

    def clear(self) -> None:
        """Drop all records and begin a new generation.

        Raises:
            StoreError: the file is read-only.
        """
        if not self.writable:
            raise StoreError(f"the anchor file {self.path} is read-only", hint="clear it as the user who owns it")
        os.ftruncate(self._own(), 0)
        self._write(self._fd, _header())

    @staticmethod
    def _write(fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    # -- health ----------------------------------------------------------------------------------------------------

    def check(self, fix: bool) -> list[str]:
        """What is wrong with the file; reads all of it. ``fix`` cuts a torn end off, blanks malformed records (a blank
        one is nothing to anybody), renews a damaged header, and moves a file that is not ours aside."""
        fd = self._own()
        problem = _header_problem(os.pread(fd, SIZE, 0))
        if problem:
            if fix:
                self._renew(problem)
            return [f"{self.path.name}: {problem}"]
        found = []
        torn = os.fstat(fd).st_size % SIZE
        if torn:
            found.append(f"{self.path.name}: {torn} bytes of a torn record at the end")
        bad = [row + int(i) for row, records in self._pieces(0, self.count()) for i in _malformed(records)]
        found += [f"{self.path.name}: record {row} is malformed" for row in bad[:_SHOWN]]
        if len(bad) > _SHOWN:
            found.append(f"{self.path.name}: {len(bad) - _SHOWN} more malformed records")
        if fix and found:
            with self.locked():  # cuts the torn end
                self._patch([(SIZE * (row + 1), bytes(SIZE)) for row in bad])
        return found

    def _patch(self, changes: list[tuple[int, bytes]]) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)  # pwrite on an O_APPEND descriptor would append
        try:
            for offset, data in changes:
                os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def _renew(self, problem: str) -> None:
        """A file that still holds records of ours gets a new header; any other is moved aside for a new file."""
        ours = not problem.startswith(_OTHER_VERSION) and any(
            well_formed(records).any() for _, records in self._pieces(0, os.fstat(self._own()).st_size // SIZE - 1)
        )
        if ours:
            with self.locked():
                self._patch([(0, _header())])
        else:
            self.path.rename(_free_name(self.path))
        self._reopen()

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def well_formed(records: Records) -> NDArray[np.bool_]:
    """Which records are what a writer of ours wrote."""
    return np.asarray((records["length"] >= ANCHOR_CHARS) & (records["sum"] == record_sums(records)))


def _malformed(records: Records) -> I64:
    blank = ~records.view("<u8").reshape(-1, 8).any(axis=1)
    return np.flatnonzero(~well_formed(records) & ~blank)


def _free_name(path: Path) -> Path:
    number = 0
    while (target := path.with_name(f"{path.name}.bad{number or ''}")).exists():
        number += 1
    return target
