"""Small named values of a store on disk: one file each, the first writer wins."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from pathlib import Path

import xxhash

from kvboost_rag.store.counters import Counters
from kvboost_rag.store.disk_files import BlockFiles, folder_lock
from kvboost_rag.store.disk_folder import DIR_MODE, read_regular

MAX_VALUE_BYTES = 64 << 20
_MAGIC = b"kvboost_rag meta 1"


class Manifest:
    """Named values in ``meta/``. Kept beside the index, not in it: the index may be evicted from and rebuilt."""

    def __init__(self, files: BlockFiles, counters: Counters) -> None:
        self.folder = files.root / "meta"
        self.folder.mkdir(mode=DIR_MODE, exist_ok=True)
        self._files = files
        self._counters = counters
        self._lock = threading.Lock()
        self._held: dict[str, bytes] = {}  # values that could not be written: true for this process at least

    def path(self, name: str) -> Path:
        return self.folder / entry_name(name)

    def get(self, name: str) -> bytes | None:
        """The value of ``name``, or None. A damaged one is set aside and counts as unset."""
        path = self.path(name)
        try:
            return unpack_entry(read_regular(path, MAX_VALUE_BYTES + 65536), name)
        except ValueError:
            self._files.set_aside(path, None, "damaged")
        except OSError:
            pass
        with self._lock:
            return self._held.get(name)

    def put(self, name: str, value: bytes) -> bytes:
        """Set ``name`` unless it is set; the value that holds now."""
        for _ in range(3):
            present = self.get(name)
            if present is not None:
                return present
            try:
                with self._files.staged([pack_entry(name, value)]) as staged:
                    _link(staged, self.path(name))
                return bytes(value)
            except FileExistsError:
                continue  # another process was first: read what it wrote
            except OSError as error:
                self._counters.warn("manifest", f"manifest entry {name!r} is not kept beyond this process: {error}")
                break
        with self._lock:
            return self._held.setdefault(name, bytes(value))

    def set(self, name: str, value: bytes) -> bool:
        """Set ``name``, whoever set it before; False if it cannot be written (a new one holds in this process)."""
        try:
            with self._files.staged([pack_entry(name, value)]) as staged:
                os.replace(staged, self.path(name))
        except OSError as error:
            self._counters.warn("manifest", f"manifest entry {name!r} is not kept beyond this process: {error}")
            with self._lock:
                self._held[name] = bytes(value)
            return False
        with self._lock:
            self._held.pop(name, None)
        return True

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
        for path in self.folder.glob("*.meta"):
            with suppress(OSError):
                path.unlink()

    def check(self) -> list[Path]:
        """Entries that cannot be read."""
        return [path for path in sorted(self.folder.glob("*.meta")) if not _is_sound(path)]


def entry_name(name: str) -> str:
    """The file name of an entry."""
    return f"{hashlib.sha256(name.encode()).hexdigest()}.meta"


def _link(staged: Path, path: Path) -> None:
    """Give ``staged`` a second name, if that name is free: the one step that is atomic and never overwrites.

    Raises:
        FileExistsError: the name is taken.
        OSError: anything else.
    """
    try:
        os.link(staged, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with folder_lock(path.parent.parent):
            if path.exists():
                raise FileExistsError from None
            os.replace(staged, path)


def pack_entry(name: str, value: bytes) -> bytes:
    """The bytes of one entry."""
    body = json.dumps(name).encode("ascii") + b"\n" + value
    return b"\n".join([_MAGIC, xxhash.xxh3_128(body).hexdigest().encode("ascii"), body])


def unpack_entry(data: bytes, name: str | None) -> bytes:
    """The value in ``data``. Raises ValueError if it is not a sound entry, or one of another name."""
    magic, checksum, stated, value = data.split(b"\n", 3)
    body = stated + b"\n" + value
    if magic != _MAGIC or checksum.decode("ascii") != xxhash.xxh3_128(body).hexdigest():
        raise ValueError
    if name is not None and json.loads(stated) != name:
        raise ValueError
    return value


def _is_sound(path: Path) -> bool:
    try:
        unpack_entry(read_regular(path, MAX_VALUE_BYTES + 65536), None)
    except ValueError:
        return False
    except OSError:
        return True  # gone meanwhile
    return True
