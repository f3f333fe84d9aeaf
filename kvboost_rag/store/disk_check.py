"""Reading a whole store on disk and saying, or mending, what is wrong with it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost_rag.errors import BlockFormatError, MissingExtraError
from kvboost_rag.kv.codec import decode_block
from kvboost_rag.store.anchors import AnchorIndex
from kvboost_rag.store.base import Problem
from kvboost_rag.store.disk_files import BlockFiles, Identity, IndexUnavailable, reason_of
from kvboost_rag.store.manifest import Manifest

if TYPE_CHECKING:
    from kvboost_rag.store.disk_index import BlockIndex


def check_store(
    files: BlockFiles, index: BlockIndex, manifest: Manifest, anchors: AnchorIndex, fix: bool
) -> list[Problem]:
    """Every problem of a store. With ``fix``, damage is set aside and index and files agree afterwards."""
    problems, sound = _check_blocks(files, fix)
    problems += _check_tmp(files, fix)
    try:
        problems += _check_rows(files, index, sound, fix)
        problems += _check_index(index, fix)
    except (IndexUnavailable, OSError) as error:
        problems.append(Problem("index", "index/cache.db", f"does not answer: {error}"))
    for path in manifest.check():
        moved = fix and files.set_aside(path, None, "damaged")
        problems.append(Problem("damaged", _name(files, path), "unreadable manifest entry", moved))
    return problems + [Problem("anchors", "anchors.bin", text, fix) for text in anchors.check(fix)]


def _check_blocks(files: BlockFiles, fix: bool) -> tuple[list[Problem], list[str]]:
    """(problems, keys of sound blocks)."""
    problems, sound = [], []
    for path in sorted(files.walk()):
        key = files.key(path)
        try:
            reason, detail, seen = _inspect(files, path, key)
        except FileNotFoundError:
            continue  # evicted meanwhile
        if reason == "unavailable":
            problems.append(Problem(reason, key or _name(files, path), detail))
            sound += [key] if key is not None else []
        elif reason:
            moved = fix and files.set_aside(path, seen, reason)
            problems.append(Problem(reason, key or _name(files, path), detail, moved))
        elif key is not None:
            sound.append(key)
    return problems, sound


def _inspect(files: BlockFiles, path: Path, key: str | None) -> tuple[str, str, Identity | None]:
    """(reason, detail, what was read) of one file; no reason if it is sound. Raises FileNotFoundError."""
    if key is None:
        return "foreign", "not a block's name", None
    seen = None
    try:
        buffer, seen = files.read(path)
        stated = decode_block(buffer).key
    except MissingExtraError as error:  # its checksums are right
        return "unavailable", str(error), None
    except BlockFormatError as error:
        return reason_of(error), str(error), seen
    except FileNotFoundError:
        raise
    except OSError as error:
        return "damaged", str(error), seen
    return ("", "", seen) if stated == key else ("mismatch", f"holds {stated}", seen)


def _check_tmp(files: BlockFiles, fix: bool) -> list[Problem]:
    problems = []
    for path in files.abandoned():
        if fix:
            with suppress(OSError):
                path.unlink()
        detail = "left behind by a writer that was killed"
        problems.append(Problem("orphan file", _name(files, path), detail, fix and not path.exists()))
    return problems


def _check_rows(files: BlockFiles, index: BlockIndex, sound: list[str], fix: bool) -> list[Problem]:
    rows = set(index.keys())
    orphans = [key for key in sound if key not in rows]
    problems = [Problem("orphan file", key, "no row in the index", fix) for key in orphans]
    missing = [key for key in rows if (path := files.path(key)) is None or not path.exists()]
    problems += [Problem("missing file", key, "a row in the index, but no file", fix) for key in sorted(missing)]
    if fix:
        for key in missing:
            index.forget(key)
        index.touch(orphans)
    return problems


def _check_index(index: BlockIndex, fix: bool) -> list[Problem]:
    """What diskcache finds in its own tables: wrong sizes, wrong totals, damaged pages."""
    messages = [text for text in index.integrity(fix) if not text.startswith("file not found")]
    if fix and any(not text.startswith(("wrong file size", "Settings.", "unknown file")) for text in messages):
        index.rebuild(messages[0])
    return [Problem("index", "index/cache.db", text, fix) for text in messages]


def _name(files: BlockFiles, path: Path) -> str:
    return path.relative_to(files.root).as_posix()
