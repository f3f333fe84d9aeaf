"""Which blocks were used since the index was last told: look-ups note it here, and never wait for the index."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvboost_rag.store.disk_files import IndexUnavailable

BATCH = 256  # look-ups after which the index should be told


class Uses:
    """Keys used since the last :meth:`flush`, oldest first. Thread-safe.

    Args:
        tell: takes the keys, in this order; may raise IndexUnavailable or OSError, then they are kept.
    """

    def __init__(self, tell: Callable[[Iterable[str]], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._keys: dict[str, None] = {}
        self._count = 0

    def note(self, key: str) -> bool:
        """Note a use. True if it is time to :meth:`flush`."""
        with self._lock:
            self._keys.pop(key, None)
            self._keys[key] = None
            self._count += 1
            return self._count % BATCH == 0

    def drop(self, key: str | None = None) -> None:
        """Forget what is noted of ``key``, or of all: the rows of deleted blocks must not come back."""
        with self._lock:
            if key is None:
                self._keys.clear()
            else:
                self._keys.pop(key, None)

    def flush(self) -> None:
        """Tell of everything that was noted; what cannot be told waits for the next time."""
        with self._lock:
            keys, self._keys = self._keys, {}
        if not keys:
            return
        told = False
        with suppress(IndexUnavailable, OSError):
            self._tell(keys)
            told = True
        if not told:
            with self._lock:
                self._keys = {**keys, **self._keys}
