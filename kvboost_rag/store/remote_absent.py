"""Which blocks a server was just found not to have, so that it need not be asked again and again."""

from __future__ import annotations

import time

_ABSENT_S = 10.0
_ABSENT_KEYS = 4096


class Absences:
    """Keys without a block, for some seconds."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __contains__(self, key: str) -> bool:
        return self._until.get(key, 0.0) > time.monotonic()

    def add(self, key: str) -> None:
        if len(self._until) >= _ABSENT_KEYS:
            self._until.clear()
        self._until[key] = time.monotonic() + _ABSENT_S

    def drop(self, key: str) -> None:
        """A block was written."""
        self._until.pop(key, None)

    def clear(self) -> None:
        self._until.clear()
