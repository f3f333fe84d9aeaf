"""What stands between a store and a server that may be slow, dead or lying: deadlines, retries, a circuit breaker.

::

    call ──► breaker open? ──► a thread does the work (attempts with backoff) ──► answer, or Unavailable at the deadline
                 │ yes: Unavailable at once

The caller waits for the deadline and no longer, whatever the client library does: its own time-outs count from byte to
byte, so a server that sends one byte a second would never trip them. A thread that is left behind ends by them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvboost_rag.store.remote_quota import Ledger

T = TypeVar("T")


class Unavailable(Exception):
    """The server did not do what was asked, in time. The text says why."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """In place of a value: it is larger than asked for, and was not fetched."""

    size: int  # bytes


Value = bytes | memoryview | TooLarge | None


class Medium(Protocol):
    """The small protocol that a remote engine has to speak. Names are ``area/rest``, plain ASCII; areas are ``blocks``,
    ``anchors``, ``meta`` and ``tenants``. Any exception means that it did not work; it may be called from several
    threads."""

    kind: str
    max_value_bytes: int

    def read(self, names: Sequence[str], limit: int) -> list[Value]:
        """The values, None where there is none. Nothing larger than ``limit`` bytes is fetched."""

    def write(self, name: str, value: bytes) -> None:
        """Set a value, whatever was there. Readers see the old one or the new one."""

    def create(self, name: str, value: bytes) -> bool:
        """Set a value if there is none, atomically. False if there was one."""

    def exists(self, name: str) -> bool:
        """Whether there is a value."""

    def delete(self, names: Sequence[str]) -> int:
        """Remove values; how many of them there were."""

    def entries(self, area: str) -> Iterator[tuple[str, int]]:
        """(name, bytes) of everything in an area."""

    def ledger(self) -> Ledger:
        """Where it is kept which blocks are whose, for quotas."""

    def close(self) -> None:
        """Release connections."""


class Breaker:
    """Stops asking a server that does not answer: after ``failures`` in a row for ``pause_s`` seconds, then one call
    may try; if that fails too, for twice as long, up to ``max_pause_s``. Thread-safe."""

    def __init__(
        self,
        failures: int = 3,
        pause_s: float = 2.0,
        max_pause_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._first_pause, self._max_pause, self._clock = failures, pause_s, max_pause_s, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = pause_s
        self._until = 0.0
        self._probing = False
        self.why = ""

    def enter(self) -> None:
        """Ask to make a call. Raises Unavailable while the circuit is open."""
        with self._lock:
            if self._failures < self._limit:
                return
            left = self._until - self._clock()
            if left > 0 or self._probing:
                raise Unavailable(f"not asked for {max(left, 0):.0f} s more, after: {self.why}")
            self._probing = True

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._pause, self._probing, self.why = 0, self._first_pause, False, ""

    def failed(self, why: str, *, at_once: bool = False) -> None:
        """``at_once``: as bad as several failures (a caller had to wait for nothing)."""
        with self._lock:
            again = self._failures >= self._limit
            self._failures = self._limit if at_once else self._failures + 1
            self.why, self._probing = why, False
            if self._failures >= self._limit:
                self._pause = min(self._pause * 2, self._max_pause) if again else self._first_pause
                self._until = self._clock() + self._pause


class Link:
    """Calls to one server.

    Args:
        timeout_s: most seconds that a caller waits.
        attempts: tries within that time.
        backoff_s: pause before the second try; doubled each time, with jitter.
        calls: most calls under way; more are refused, because their threads would pile up behind a stuck server.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        attempts: int = 3,
        backoff_s: float = 0.05,
        calls: int = 16,
        breaker: Breaker | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.breaker = breaker or Breaker()
        self._attempts, self._backoff = attempts, backoff_s
        self._free = threading.BoundedSemaphore(calls)

    def call(self, work: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """``work``, in time. Raises Unavailable, and nothing else that is an Exception."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self.breaker.enter()
        if not self._free.acquire(blocking=False):
            self.breaker.failed("all connections are busy", at_once=True)
            raise Unavailable("all connections are busy")
        future: Future[T] = Future()
        threading.Thread(
            target=self._run, args=(work, future, time.monotonic() + timeout_s), name="kvboost-remote", daemon=True
        ).start()
        try:
            result = future.result(timeout_s)
        except FutureTimeout:
            future.cancel()
            self.breaker.failed(f"no answer within {timeout_s:g} s", at_once=True)
            raise Unavailable(f"no answer within {timeout_s:g} s") from None
        except Exception as error:
            self.breaker.failed(describe(error))
            raise Unavailable(describe(error)) from error
        self.breaker.succeeded()
        return result

    def _run(self, work: Callable[[], T], future: Future[T], deadline: float) -> None:
        try:
            for attempt in range(self._attempts):
                try:
                    result = work()
                except Exception as error:
                    pause = self._backoff * 2**attempt * random.uniform(0.5, 1.5)
                    if attempt + 1 == self._attempts or time.monotonic() + pause >= deadline:
                        _settle(future, error=error)
                        return
                    time.sleep(pause)
                else:
                    _settle(future, result=result)
                    return
        finally:
            self._free.release()


def _settle(future: Future[T], *, result: T | None = None, error: Exception | None = None) -> None:
    if future.set_running_or_notify_cancel():  # else the caller is gone
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]


def describe(error: BaseException) -> str:
    """An error in one line, without the URL's password: what libraries say may hold the whole URL."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}" if "://" not in lines[0] else type(error).__name__
