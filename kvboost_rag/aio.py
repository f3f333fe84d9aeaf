"""Run a generator of pieces for async callers: in one worker thread, never on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvboost_rag.engine.decode import CancelToken
from kvboost_rag.errors import UsageError

T = TypeVar("T")
_END = object()


async def iterate(make: Callable[[], Iterator[T]], pool: ThreadPoolExecutor, cancel: CancelToken) -> AsyncIterator[T]:
    """Yield what ``make()`` yields. Waiting callers queue for ``pool``; leaving early cancels the generation after the
    token in progress, and a caller that is cancelled while still in the queue never starts."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[object] = asyncio.Queue()

    def hand(item: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def work() -> None:
        try:
            for item in make():
                hand(item)
        except BaseException as error:  # handed to the caller, who raises it
            hand(error)
        finally:
            hand(_END)

    try:
        future = pool.submit(work)
    except RuntimeError as error:  # all that a pool says of having been shut down
        raise UsageError("this engine is closed", hint="ask before close(), or build another engine") from error
    try:
        while (item := await queue.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item  # type: ignore[misc]
    finally:
        cancel.cancel()
        future.cancel()
