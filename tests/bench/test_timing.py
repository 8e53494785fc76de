"""Quantiles, and who is timed when."""

from __future__ import annotations

from fractions import Fraction

import pytest

from bench.timing import WARM_UPS, Contender, HostClock, Spread, measure, spread_of


class ScriptedClock:
    """Tells times off a list and notes who asked."""

    def __init__(self, times):
        self.times = iter(times)
        self.asked = []

    def seconds(self, contender):
        self.asked.append(contender.name)
        return next(self.times)


def test_quantiles_of_known_numbers():
    assert spread_of([Fraction(n) for n in range(11)]) == Spread(2, 5, 8)
    assert spread_of([3.0, 1.0]) == Spread(pytest.approx(1.4), 2.0, pytest.approx(2.6))
    assert spread_of([7.0] * 5) == Spread(7.0, 7.0, 7.0)


def test_a_hundredth_is_told_of_a_hundred_values():
    assert spread_of([float(n) for n in range(99)]).p99 is None
    assert spread_of([float(n) for n in range(101)]).p99 == 99.0


def test_quantiles_lie_within_the_values():
    found = spread_of([1.0, 1.0, 9.0])
    assert 1.0 <= found.p20 <= found.p50 <= found.p80 <= 9.0


def test_everyone_is_timed_once_a_round_and_each_comes_first_in_turn():
    clock = ScriptedClock(range(9))
    contenders = [Contender(name, lambda: None, 1) for name in "abc"]
    found = measure(contenders, 3, clock)
    assert clock.asked == list("abcbcacab")
    assert found["a"].p50 == 5
    assert found["b"].p50 == 3
    assert found["c"].p50 == 4


def test_everyone_is_warm_before_anybody_is_timed():
    calls = []
    contenders = [Contender(name, lambda name=name: calls.append(name), 1) for name in "ab"]

    class Clock(ScriptedClock):
        def seconds(self, contender):
            assert calls == ["a"] * WARM_UPS + ["b"] * WARM_UPS
            return super().seconds(contender)

    measure(contenders, 2, Clock([1.0] * 4))


def test_the_host_clock_runs_what_it_times():
    calls = []
    assert HostClock().seconds(Contender("a", lambda: calls.append(1), 1)) > 0
    assert calls == [1]
