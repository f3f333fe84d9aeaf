"""Full host memory, said in one way: torch's allocator raises a ``RuntimeError``, Python a ``MemoryError``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_WORDS = ("can't allocate memory", "not enough memory")  # of torch's allocator on the CPU


@contextmanager
def within_memory() -> Iterator[None]:
    """Around work on tensors of host memory, also as a decorator.

    Raises:
        MemoryError: there is not enough.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _WORDS):
            raise
        raise MemoryError("out of memory") from None
