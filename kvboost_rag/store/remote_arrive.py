"""Values that come from a server in pieces, side by side: the first layers of all blocks before the last of any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvboost_rag.store.remote_link import Link, Medium, Piece, TooLarge, Unavailable


class Incoming:
    """One value: what is known of it, and its bytes as far as they have come. Guarded by its batch."""

    def __init__(self) -> None:
        self.what: int | TooLarge | None = None  # its size; too large; nothing there
        self.known = False
        self.wanted = True
        self.gone = False  # while it came
        self.buffer = bytearray()
        self.have = 0  # bytes
        self.came_s = 0.0  # when it was whole, from the beginning

    @property
    def is_whole(self) -> bool:
        return self.known and (not isinstance(self.what, int) or self.have == self.what)

    def take(self, piece: Piece) -> None:
        """Raises ConnectionError: it does not go together with what came before."""
        if isinstance(piece, int | TooLarge) or piece is None:
            if self.known and piece is None:
                self.gone = True
            elif self.known and piece != self.what:
                raise ConnectionError("a value changed while it was read")
            elif not self.known:
                self.what, self.known = piece, True
                self.buffer = bytearray(piece if isinstance(piece, int) else 0)
            return
        if self.have + len(piece) > len(self.buffer):
            raise ConnectionError("the server sent more than it said")
        self.buffer[self.have : self.have + len(piece)] = piece
        self.have += len(piece)


class Batch:
    """Fetches ``names`` in the background, within the link's time-out.

    Raises:
        Unavailable: the server is not asked now.
    """

    def __init__(self, medium: Medium, link: Link, names: Sequence[str], limit: int) -> None:
        self._medium, self._link, self._names, self._limit = medium, link, names, limit
        self._state = threading.Condition()
        self.values = [Incoming() for _ in names]
        self._started = time.monotonic()
        self._over = False
        self._call = link.begin(self._pull)
        self._call.then(self._ended)

    def known(self, index: int) -> int | TooLarge | None:
        """Wait until it is known what there is. Raises Unavailable."""
        value = self.values[index]
        with self._state:
            self._wait(value, lambda: value.known)
            return value.what

    def until(self, index: int, nbytes: int) -> None:
        """Wait for the first ``nbytes`` of a value. Raises Unavailable."""
        value = self.values[index]
        with self._state:
            self._wait(value, lambda: value.have >= nbytes)

    def leave(self, index: int) -> None:
        """Nobody waits for this one any more. When all are left, the server is not asked further."""
        with self._state:
            self.values[index].wanted = False
            self._state.notify_all()

    def _wait(self, value: Incoming, there: Callable[[], bool]) -> None:
        while not there():
            if not value.wanted:
                raise Unavailable("nobody waits for it any more")
            if value.gone:
                raise Unavailable("it was removed meanwhile")
            left = self._call.deadline - time.monotonic()
            if self._over or left <= 0:
                self._give_up()
            self._state.wait(left)

    def _give_up(self) -> None:
        """Raises Unavailable, with the reason."""
        try:
            self._call.result()
        except Unavailable:
            if any(value.is_whole for value in self.values):
                self._link.breaker.succeeded()  # slow, but it works
            raise
        raise Unavailable("the server sent less than it said")

    def _pull(self) -> None:
        """In the link's thread; a second attempt goes on behind the first."""
        wanted = [i for i, value in enumerate(self.values) if value.wanted and not value.is_whole]
        starts = [self.values[i].have for i in wanted]
        for at, piece in self._medium.stream([self._names[i] for i in wanted], self._limit, starts):
            with self._state:
                value = self.values[wanted[at]]
                value.take(piece)
                if value.is_whole:
                    value.came_s = time.monotonic() - self._started
                self._state.notify_all()
                if not any(self.values[i].wanted for i in wanted):
                    return
        if not all(value.is_whole or value.gone or not value.wanted for value in self.values):
            raise ConnectionError("the server sent less than it said")

    def _ended(self) -> None:
        with self._state:
            self._over = True
            self._state.notify_all()
