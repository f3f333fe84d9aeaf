"""Opening a store's folder: is it one, may we write there, which layout is in it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from kvboost_rag.errors import StoreError

DIR_MODE = 0o700
FILE_MODE = 0o600
LAYOUT = 1
_MARKER = "store-format"
_MOST_BYTES = 4096  # of the marker
_MARK = re.compile(r"kvboost_rag store (\d{1,9})\s*")


def open_folder(folder: str | Path) -> Path:
    """The absolute path of ``folder``, which exists now, is writable and holds our layout or nothing yet.

    A folder that is made here, or is empty, becomes private to the user.

    Raises:
        StoreError
    """
    try:
        path = Path(folder).expanduser().absolute()
    except RuntimeError as error:  # no home to expand ~ to
        raise StoreError(f"store {str(folder)!r}: {error}", hint="give a full path") from None
    if path.exists() and not path.is_dir():
        raise StoreError(f"store {path} is a file", hint="give a folder")
    try:
        path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
        if not os.listdir(path):
            path.chmod(DIR_MODE)
    except OSError as error:
        raise StoreError(f"cannot use {path} as a store: {error}", hint="choose a folder that you may write") from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(f"store {path} is not writable", hint="choose another folder, or fix its permissions")
    _check_layout(path / _MARKER)
    return path


def is_store(folder: str | Path) -> bool:
    """Whether ``folder`` holds a store, of whatever layout; one whose marker was lost is known by its blocks."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (_MARKER, "blocks"))


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a file, never of a pipe or a device, which could keep whoever opens them waiting for ever.

    Raises:
        ValueError: it is no regular file, or has more than ``limit`` bytes.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
            raise ValueError(f"{path} is no file of at most {limit} bytes")
        return file.read(limit)


def _check_layout(marker: Path) -> None:
    try:
        mark = _mark(marker)
        if mark is None:
            fresh = marker.with_name(f"{_MARKER}.{os.getpid()}")
            with open(os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, FILE_MODE), "w") as file:
                file.write(f"kvboost_rag store {LAYOUT}\n")
            os.replace(fresh, marker)
        elif int(mark[1]) != LAYOUT:
            hint = "update kvboost_rag, or give another folder"
            raise StoreError(f"{marker.parent} has layout {mark[1]}, this version reads {LAYOUT}", hint=hint)
    except OSError as error:
        raise StoreError(f"cannot use {marker.parent} as a store: {error}", hint="choose another folder") from None


def _mark(marker: Path) -> re.Match[str] | None:
    """What the marker says; None where there is none, or something else. Raises OSError."""
    try:
        return _MARK.fullmatch(read_regular(marker, _MOST_BYTES).decode("ascii", "replace"))
    except (FileNotFoundError, ValueError):
        return None
