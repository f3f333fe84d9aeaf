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
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvboost_rag.store.remote_quota import Ledger

T = TypeVar("T")


class Unavailable(Exception):
    """The server did not do what was asked, in time. The text says why."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """In place of a value: it is larger than asked for, and was not fetched."""

    size: int  # bytes


Value = bytes | memoryview | TooLarge | None
Piece = int | bytes | memoryview | TooLarge | None  # a number: the size of the value that follows


class Medium(Protocol):
    """The small protocol that a remote engine has to speak. Names are ``area/rest``, plain ASCII; areas are ``blocks``,
    ``anchors``, ``meta`` and ``tenants``. Any exception means that it did not work; it may be called from several
    threads."""

    kind: str
    max_value_bytes: int

    def read(self, names: Sequence[str], limit: int) -> list[Value]:
        """The values, None where there is none. Nothing larger than ``limit`` bytes is fetched."""

    def stream(self, names: Sequence[str], limit: int, starts: Sequence[int]) -> Iterator[tuple[int, Piece]]:
        """Several values side by side, in pieces of which each comes with its name's number: first what there is (None,
        TooLarge, or how many bytes it has), then its bytes from ``starts[i]`` on, in order."""

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


class Call(Generic[T]):
    """A call under way. Its outcome is told to the breaker, once."""

    def __init__(self, future: Future[T], breaker: Breaker, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self._future, self._breaker, self._timeout_s = future, breaker, timeout_s
        self._lock = threading.Lock()
        self._told = False

    def then(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when the work is done or has failed, in whatever thread."""

        def ended(future: Future[T]) -> None:
            with suppress(Unavailable, CancelledError):
                self.result()
            listener()

        self._future.add_done_callback(ended)

    def result(self) -> T:
        """Wait for it, until the deadline and no longer. Raises Unavailable."""
        try:
            result = self._future.result(max(0.0, self.deadline - time.monotonic()))
        except (FutureTimeout, CancelledError):
            self._future.cancel()
            why = f"no answer within {self._timeout_s:g} s"
            self._tell(lambda: self._breaker.failed(why, at_once=True))
            raise Unavailable(why) from None
        except Exception as error:
            why = describe(error)
            self._tell(lambda: self._breaker.failed(why))
            raise Unavailable(why) from error
        self._tell(self._breaker.succeeded)
        return result

    def _tell(self, how: Callable[[], None]) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            how()


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
        return self.begin(work, timeout_s=timeout_s).result()

    def begin(self, work: Callable[[], T], *, timeout_s: float | None = None) -> Call[T]:
        """Have ``work`` done in the background. Raises Unavailable: it is not even begun."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self.breaker.enter()
        if not self._free.acquire(blocking=False):
            self.breaker.failed("all connections are busy", at_once=True)
            raise Unavailable("all connections are busy")
        future: Future[T] = Future()
        call = Call(future, self.breaker, timeout_s)
        threading.Thread(
            target=self._run, args=(work, future, call.deadline), name="kvboost-remote", daemon=True
        ).start()
        return call

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
