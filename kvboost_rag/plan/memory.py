"""Byte counts as people write them, and how much host memory may still be taken."""

from __future__ import annotations

import re
from pathlib import Path

from kvboost_rag.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "no limit"


def parse_bytes(value: str | int) -> int:
    """Bytes of ``"8GiB"`` or ``"8G"`` (powers of 1024), ``"8GB"`` (powers of 1000), or a plain number.

    Raises:
        UsageError: not a size, or not above zero.
    """
    match = _SIZE.fullmatch(str(value).strip())
    if not match or isinstance(value, bool):
        raise UsageError(f"{value!r} is not a size", hint="for example 8GiB, 7500MB or a number of bytes")
    number, unit, tail = match.groups()
    if "." in number and not unit:
        raise UsageError(f"{value!r} is no number of bytes", hint="for example 1.5GiB")
    base = 1000 if (tail or "").lower() == "b" else 1024
    found = int(float(number) * (base ** _POWERS[unit.lower()] if unit else 1))
    if found <= 0:
        raise UsageError(f"{value!r} is no memory at all", hint="for example 8GiB")
    return found


def gib(nbytes: float) -> str:
    """``"7.50 GiB"``."""
    return f"{nbytes / 2**30:.2f} GiB"


def available_host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take: the machine's, or its container's where that is less. None: unknown."""
    found = [n for n in (_mem_available(proc / "meminfo"), _cgroup_left(cgroup)) if n is not None]
    return min(found) if found else None


def _mem_available(meminfo: Path) -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def _cgroup_left(folder: Path) -> int | None:
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            allowed, taken = int((folder / limit).read_text()), int((folder / used).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        if allowed < UNLIMITED:
            return max(0, allowed - taken + _file_cache(folder / Path(used).parent / "memory.stat"))
    return None


def _file_cache(stat: Path) -> int:
    """Cached file pages count as used in a cgroup but are given back under pressure."""
    try:
        match = re.search(r"^(?:total_)?inactive_file (\d+)", stat.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
