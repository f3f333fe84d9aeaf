"""Threads for work on layers, shared by all blocks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

_ALONE = 1 << 20  # less work than that many values is not worth a second thread


def workers_for(layers: int, values: int) -> int:
    """How many threads should share ``layers`` with ``values`` values in all: no more than torch uses itself."""
    return 1 if values < _ALONE else min(layers, torch.get_num_threads())


def pool() -> ThreadPoolExecutor:
    """This process's threads: those of a parent do not survive a fork."""
    return _pool(os.getpid())


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=8, thread_name_prefix="kvboost-layers")
