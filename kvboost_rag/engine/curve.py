"""Seconds by size, from few measurements: what can be said for certain about sizes that were not measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

SAMPLES = 3  # measurements of about one size before they count
FASTER = 0.8  # times what was known
STEPS = 4  # "about one size": so many steps to a doubling
REACH = 8.0  # a measurement says nothing about sizes that are further away than this factor

Point = tuple[float, float]  # size, seconds


class Curve:
    """Lower and upper bounds of a time that grows with size, but no faster than size.

    That is all that is assumed: more work takes no less time, and a unit of work no more time in a larger batch. So a
    measurement bounds what lies on either side of it, and without one the bounds are 0 and infinity: a decision that
    needs a bound cannot be taken before it is known.

    Each size (to a step, see :data:`STEPS`) is measured :data:`SAMPLES` times and the fastest counts: the others met a
    busy machine. Then it stays, so that decisions do not change from run to run, unless a later measurement is faster
    by :data:`FASTER`: then all of the first had met one. Where measurements contradict each other, the faster holds.
    """

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points: dict[int, Point] = {}
        self._open: dict[int, list[Point]] = {}
        for size, seconds in points:
            self.learn(size, seconds)

    @property
    def points(self) -> list[Point]:
        """What is known, by size."""
        return sorted(self._points.values())

    def knows(self, size: float) -> bool:
        """Whether about this size was measured."""
        return size > 0 and _step(size) in self._points

    def learn(self, size: float, seconds: float) -> bool:
        """Take a measurement as it is, unless that size is known and this is not clearly faster. True if it was."""
        if not _sound(size, seconds):
            return False
        known = self._points.get(_step(size))
        if known is not None and seconds / size > FASTER * known[1] / known[0]:
            return False
        self._points[_step(size)] = (size, seconds)
        return True

    def observe(self, size: float, seconds: float) -> bool:
        """Take one of several measurements. True if something became known by it."""
        if self.knows(size) or not _sound(size, seconds):
            return self.learn(size, seconds)
        seen = self._open.setdefault(_step(size), [])
        seen.append((size, seconds))
        return len(seen) >= SAMPLES and self.learn(*min(seen, key=lambda p: p[1] / p[0]))

    def low(self, size: float) -> float:
        """Seconds that ``size`` takes at least."""
        if size <= 0:
            return 0.0
        return max((self.high(x) * min(1.0, size / x) for x, _ in self._near(size)), default=0.0)

    def high(self, size: float) -> float:
        """Seconds that ``size`` takes at most."""
        if size <= 0:
            return 0.0
        return min((t * max(1.0, size / x) for x, t in self._near(size)), default=math.inf)

    def _near(self, size: float) -> list[Point]:
        return [(x, t) for x, t in self._points.values() if size / REACH <= x <= size * REACH]


def _step(size: float) -> int:
    return math.floor(STEPS * math.log2(size))


def _sound(size: float, seconds: float) -> bool:
    return math.isfinite(size) and math.isfinite(seconds) and size > 0 and seconds > 0
