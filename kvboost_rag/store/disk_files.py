"""The files of a store on disk: where a block lies, how it gets there whole, how it is read, where damage goes.

::

    blocks/ab/cdef….kvb   one block; the name is the key's digest, so that no index is needed to find it
    pins/abcdef…          an empty file for each pinned block
    tmp/                  blocks being written, each locked by its writer
    quarantine/           what was found damaged or foreign; the last few only
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

import torch

from kvboost_rag.errors import BlockFormatError
from kvboost_rag.keys import KEY_PREFIX
from kvboost_rag.kv.codec import ForeignBlockError
from kvboost_rag.store.disk_folder import DIR_MODE, FILE_MODE

MAP_FROM_BYTES = 256 << 10  # smaller files are read: cheaper than a mapping, and mappings per process are limited
QUARANTINE_FILES = 64
QUARANTINE_BYTES = 256 << 20
_UNLOCKABLE_AGE_S = 3600.0  # where files cannot be locked, age tells an abandoned temporary file
_KEY = re.compile(re.escape(KEY_PREFIX) + r"([0-9a-f]{2})([0-9a-f]{62})")
_PLACE = re.compile(r"blocks/([0-9a-f]{2})/([0-9a-f]{62})\.kvb")

Identity = tuple[int, int, int]  # device, inode, mtime in ns


def block_name(key: str) -> str | None:
    """``blocks/ab/cdef….kvb`` for a key, or None for what cannot be one (so no key leads out of a store)."""
    match = _KEY.fullmatch(key)
    return f"blocks/{match[1]}/{match[2]}.kvb" if match else None


def block_of_name(name: str) -> str | None:
    """The key that such a name stands for, or None."""
    match = _PLACE.fullmatch(name)
    return f"{KEY_PREFIX}{match[1]}{match[2]}" if match else None


class IndexUnavailable(Exception):
    """The index does not answer now (locked, full disk). Blocks can be read and even written without it."""


class BlockFiles:
    """The block files below ``root``. Every method is safe from several processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blocks, self.tmp, self.quarantine = root / "blocks", root / "tmp", root / "quarantine"
        self.pins = root / "pins"
        self.make_folders()

    def make_folders(self) -> None:
        """Create what is missing. Raises OSError."""
        for folder in (self.blocks, self.tmp, self.quarantine, self.pins):
            folder.mkdir(mode=DIR_MODE, exist_ok=True)

    def path(self, key: str) -> Path | None:
        """Where the block of ``key`` lies, or None for what cannot be a key."""
        name = block_name(key)
        return self.root / name if name is not None else None

    def key(self, path: Path) -> str | None:
        """The key that a file in ``blocks/`` stands for, by its name."""
        return block_of_name(path.relative_to(self.root).as_posix())

    def walk(self) -> Iterator[Path]:
        """Every file below ``blocks/``, ours or not."""
        for folder, folders, names in os.walk(self.blocks):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            for name in (*names, *links):
                yield Path(folder, name)

    def read(self, path: Path) -> tuple[memoryview, Identity]:
        """The bytes of ``path``, mapped copy-on-write where that pays, and what they came from.

        Raises:
            ForeignBlockError: not a regular file.
            OSError: cannot be read.
        """
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise ForeignBlockError("not a regular file")
        if info.st_size >= MAP_FROM_BYTES:
            with suppress(RuntimeError):  # torch's way to say that it cannot be mapped: then it is read
                mapped = torch.from_file(str(path), shared=False, size=info.st_size, dtype=torch.uint8)
                return mapped.numpy().data, identity(info)
        return memoryview(bytearray(path.read_bytes())), identity(info)

    @contextmanager
    def staged(self, parts: Sequence[bytes | memoryview]) -> Iterator[Path]:
        """A temporary file that holds ``parts`` and is on the medium; gone afterwards unless it was renamed.

        Raises:
            OSError: it could not be written.
        """
        fd, path = self._create()
        try:
            for part in parts:
                _write_all(fd, part)
            os.fsync(fd)
            yield path
        finally:
            with suppress(OSError):
                path.unlink()
            os.close(fd)

    def _create(self) -> tuple[int, Path]:
        """A new temporary file, locked for as long as its descriptor is open."""
        while True:
            path = self.tmp / f"{os.getpid()}-{token_hex(8)}.tmp"
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd, path
            os.close(fd)  # swept by another process before the lock was there

    def publish(self, staged: Path, path: Path) -> None:
        """Give a staged file its final name: readers see all of it or nothing. Raises OSError."""
        path.parent.mkdir(mode=DIR_MODE, exist_ok=True)
        os.replace(staged, path)

    def set_aside(self, path: Path, seen: Identity | None, reason: str) -> bool:
        """Move ``path`` to the quarantine if it is still the file that was ``seen``. False if it is not, or stays."""
        target = self.quarantine / f"{reason}-{time.time_ns()}-{path.name[-80:]}"
        try:
            if seen is not None and identity(path.lstat()) != seen:
                return False
            os.replace(path, target)
        except OSError:
            return False
        self._trim_quarantine()
        return True

    def _trim_quarantine(self) -> None:
        """Keep the newest few: the quarantine is outside of the size limit, so it has a small one of its own."""
        with suppress(OSError):
            files = [(entry.stat(follow_symlinks=False), entry.path) for entry in os.scandir(self.quarantine)]
            files.sort(key=lambda item: item[0].st_ctime_ns, reverse=True)
            total = 0
            for count, (info, name) in enumerate(files, 1):
                total += info.st_size
                if count > QUARANTINE_FILES or total > QUARANTINE_BYTES:
                    with suppress(OSError):
                        os.unlink(name)

    def empty_quarantine(self) -> None:
        """Remove what was set aside."""
        for path in self.quarantine.iterdir():
            with suppress(OSError):
                path.unlink()

    def pin(self, key: str, on: bool) -> None:
        """Note that ``key`` is pinned, or no longer is. Raises OSError."""
        path = self.pins / key.removeprefix(KEY_PREFIX)
        if on:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
        else:
            path.unlink(missing_ok=True)

    def pinned(self) -> list[str]:
        """Keys noted as pinned."""
        keys = [KEY_PREFIX + name for name in os.listdir(self.pins)]
        return [key for key in keys if self.path(key) is not None]

    def abandoned(self) -> list[Path]:
        """Temporary files whose writer is gone."""
        return [path for path in sorted(self.tmp.glob("*.tmp")) if _is_abandoned(path)]

    def sweep(self) -> None:
        """Remove what writers that were killed left behind."""
        for path in self.abandoned():
            with suppress(OSError):
                path.unlink()


@contextmanager
def folder_lock(root: Path) -> Iterator[None]:
    """Only one process at a time in here; freed by the system if its holder dies. No lock where there are none."""
    fd = os.open(root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def identity(info: os.stat_result) -> Identity:
    """What tells a file from a later one under the same name."""
    return (info.st_dev, info.st_ino, info.st_mtime_ns)


def reason_of(error: BlockFormatError) -> str:
    """The word of :data:`~kvboost_rag.store.base.REASONS` for bytes that could not be decoded."""
    return "foreign" if isinstance(error, ForeignBlockError) else "damaged"


def _write_all(fd: int, part: bytes | memoryview) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(fd, view) :]


def _is_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(fd).st_mtime > _UNLOCKABLE_AGE_S
    finally:
        os.close(fd)
    return True
