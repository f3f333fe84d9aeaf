"""Threads that read blocks for a store, in whatever process it is used."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

READERS = 4


class Readers:
    """A thread pool that is made at first use, and anew after a fork: threads do not survive one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None  # with the process that it works in

    def pool(self) -> ThreadPoolExecutor:
        """This process's pool."""
        with self._lock:
            if self._pool is None or self._pool[0] != os.getpid():
                self._pool = (os.getpid(), ThreadPoolExecutor(READERS, thread_name_prefix="kvboost-store"))
            return self._pool[1]

    def close(self) -> None:
        """Wait for what is running. The pool comes back at the next use."""
        if self._pool is not None:
            self._pool[1].shutdown()
            self._pool = None
