"""Warnings that are told once: a service that meets the same trouble a thousand times logs it once."""

from __future__ import annotations

import logging
import threading


class Once:
    """Remembers which causes were told. Thread-safe."""

    def __init__(self, logger: str = "kvboost_rag") -> None:
        self._log = logging.getLogger(logger)
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, cause: str, message: str) -> None:
        """Log ``message`` unless ``cause`` was told before."""
        with self._lock:
            if cause in self._told:
                return
            self._told.add(cause)
        self._log.warning(message)
