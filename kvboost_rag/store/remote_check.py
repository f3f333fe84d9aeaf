"""Whether a value from a server is the block that it should be; and the same for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

from kvboost_rag.errors import BlockFormatError, MissingExtraError
from kvboost_rag.keys import KEY_PREFIX
from kvboost_rag.kv.block import Block
from kvboost_rag.kv.codec import decode_block
from kvboost_rag.store.base import Problem
from kvboost_rag.store.disk_files import block_of_name, reason_of
from kvboost_rag.store.remote_link import Link, Medium, TooLarge, Unavailable

_COUNTED = 10_000  # blocks that are counted at most
_COUNT_S = 2.0
_PAGE = 1000  # values removed at once


def measure(medium: Medium, link: Link) -> tuple[int, int, bool]:
    """(blocks, bytes, whether that is all): counted for two seconds, or up to 10,000. Raises Unavailable."""
    deadline = time.monotonic() + _COUNT_S

    def count() -> tuple[int, int, bool]:
        blocks = size = 0
        for _, one in islice(medium.entries("blocks"), _COUNTED):
            blocks, size = blocks + 1, size + one
            if time.monotonic() > deadline:
                return blocks, size, False
        return blocks, size, blocks < _COUNTED

    return link.call(count, timeout_s=2 * _COUNT_S + 1)


def inspect(key: str | None, value: bytes | memoryview | TooLarge, limit: int) -> tuple[str, str, Block | None]:
    """(reason, detail, block) of what lay under ``key``; no reason if it is that block."""
    if key is None or not key.startswith(KEY_PREFIX):
        return "foreign", "not a block's name", None
    if isinstance(value, TooLarge):
        return "foreign", f"{value.size} bytes, at most {limit} are fetched", None
    try:
        block = decode_block(value)
    except BlockFormatError as error:
        return reason_of(error), str(error), None
    except MemoryError:
        return "unavailable", "out of memory", None
    except MissingExtraError as error:  # sound: others can read it
        return "unavailable", str(error), None
    return ("", "", block) if block.key == key else ("mismatch", f"holds {block.key}", None)


def drop_all(medium: Medium, link: Link, area: str, timeout_s: float) -> int:
    """Remove everything in an area; how much there was. Raises Unavailable."""
    names = [name for name, _ in link.call(lambda: list(medium.entries(area)), timeout_s=timeout_s)]
    for first in range(0, len(names), _PAGE):
        page = names[first : first + _PAGE]
        link.call(lambda page=page: medium.delete(page), timeout_s=timeout_s)  # type: ignore[misc]
    return len(names)


Sound = Callable[[str, int, str], object]  # told of a sound block: its name, bytes and salt


def check_blocks(medium: Medium, link: Link, limit: int, fix: bool, sound: Sound) -> list[Problem]:
    """Fetch every block and list what is wrong; with ``fix``, remove it and tell ``sound`` of the others."""
    problems: list[Problem] = []
    try:
        for name, _ in link.call(lambda: list(medium.entries("blocks"))):
            problem = _check_one(name, medium, link, limit, fix, sound)
            problems += [problem] if problem is not None else []
    except Unavailable as error:
        problems.append(Problem("unavailable", medium.kind, str(error)))
    return problems


def _check_one(name: str, medium: Medium, link: Link, limit: int, fix: bool, sound: Sound) -> Problem | None:
    value, key = link.call(lambda: medium.read([name], limit)[0]), block_of_name(name)
    if value is None:  # removed meanwhile
        return None
    reason, detail, block = inspect(key, value, limit)
    if block is not None and fix:
        size, salt = (len(value) if not isinstance(value, TooLarge) else 0), block.header.salt
        link.call(lambda: sound(name, size, salt))
    if not reason:
        return None
    fixed = fix and reason != "unavailable" and link.call(lambda: medium.delete([name])) > 0
    return Problem(reason, key or name, detail, fixed)
