"""Bounds from few measurements hold for every cost that grows with size, but no faster."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.engine.curve import REACH, SAMPLES, Curve

sizes = st.floats(1, 1e6)


@given(st.floats(0, 10), st.floats(1e-6, 10), st.floats(0.05, 1), st.lists(sizes, min_size=1, max_size=6), sizes)
def test_the_truth_lies_between_the_bounds(start: float, slope: float, power: float, at: list[float], x: float) -> None:
    def truth(size: float) -> float:
        return start + slope * size**power

    curve = Curve([(size, truth(size)) for size in at])
    assert curve.low(x) <= truth(x) * (1 + 1e-9)
    assert curve.high(x) >= truth(x) * (1 - 1e-9)


def test_nothing_measured_bounds_nothing() -> None:
    assert (Curve().low(5), Curve().high(5)) == (0.0, math.inf)
    far = Curve([(1.0, 1.0)])
    assert (far.low(REACH * 1.01), far.high(REACH * 1.01)) == (0.0, math.inf)
    assert far.low(REACH) == 1.0
    assert far.high(REACH) == REACH
    assert (far.low(0), far.high(0)) == (0.0, 0.0)


def test_more_measurements_only_tighten() -> None:
    one, two = Curve([(100, 1.0)]), Curve([(100, 1.0), (400, 2.0)])
    for x in (60, 100, 200, 400, 800):
        assert one.low(x) <= two.low(x) <= two.high(x) <= one.high(x)
    assert two.low(200) == 1.0
    assert two.high(200) == 2.0


def test_the_fastest_of_several_counts_and_stays() -> None:
    curve = Curve()
    told = [curve.observe(100, seconds) for seconds in (3.0, 1.0, 2.0)]
    assert told == [False] * (SAMPLES - 1) + [True]
    assert curve.points == [(100, 1.0)]
    for seconds in (5.0, 1.0, 0.9):
        assert not curve.observe(101, seconds), "what is known stays as it is"
        assert not curve.learn(100, seconds)
    assert curve.points == [(100, 1.0)]
    assert curve.knows(102)
    assert not curve.knows(130)
    assert not curve.knows(0)


def test_what_was_measured_on_a_busy_machine_is_corrected() -> None:
    curve = Curve([(100, 1.0)])
    assert curve.observe(101, 0.5)
    assert curve.points == [(101, 0.5)]
    one, two = Curve([(100, 1.0), (200, 0.5)]), Curve([(100, 1.0), (200, 9.0)])
    assert one.low(100) == one.high(100) == 0.5, "less work cannot take longer"
    assert two.low(200) == two.high(200) == 2.0, "and twice the work no more than twice as long"


@pytest.mark.parametrize(("size", "seconds"), [(0, 1), (-1, 1), (1, 0), (1, -1), (math.nan, 1), (1, math.inf)])
def test_nonsense_is_not_learned(size: float, seconds: float) -> None:
    curve = Curve([(size, seconds)])
    for _ in range(SAMPLES):
        assert not curve.observe(size, seconds)
    assert curve.points == []
