"""Whether a server has a block; which it was just found not to have, so that it need not be asked again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvboost_rag.store.disk_files import block_name
from kvboost_rag.store.remote_link import Link, Medium, Unavailable

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


class Presence:
    """Asks ``medium`` for blocks without fetching them.

    Args:
        warn: told when the server does not answer.
    """

    def __init__(self, medium: Medium, link: Link, warn: Callable[[Exception], None]) -> None:
        self._medium, self._link, self._warn = medium, link, warn
        self.absent = Absences()

    def there(self, key: str) -> bool:
        """Whether the server has ``key``, as far as is known: for some seconds it is not asked for what it lacked."""
        if key in self.absent:
            return False
        there = self.ask(key)
        if there is False:
            self.absent.add(key)
        return there is True

    def ask(self, key: str) -> bool | None:
        """Whether the server has ``key``; None if it does not answer."""
        name = block_name(key)
        if name is None:
            return False
        try:
            return self._link.call(lambda: self._medium.exists(name))
        except Unavailable as error:
            self._warn(error)
            return None
