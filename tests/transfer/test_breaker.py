"""The breaker: when something that has failed may be tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.transfer.tiering.breaker import FIRST_PAUSE, LONGEST_PAUSE, Breaker


def test_it_opens_at_the_first_failure_and_one_may_try_after_each_pause():
    breaker = Breaker()
    assert breaker.may_try(0.0)
    breaker.failed(0.0)
    assert not breaker.closed
    assert not breaker.may_try(FIRST_PAUSE - 0.1)
    assert breaker.may_try(FIRST_PAUSE)
    assert not breaker.may_try(FIRST_PAUSE)  # one is trying
    breaker.succeeded()
    assert breaker.closed
    assert breaker.may_try(FIRST_PAUSE)


def test_pauses_double_up_to_a_bound():
    breaker, now, pauses = Breaker(), 0.0, []
    breaker.failed(now)
    for _ in range(12):
        began = now
        while not breaker.may_try(now):
            now += 0.5
        pauses.append(now - began)
        breaker.failed(now)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE


def test_what_was_under_way_when_it_opened_does_not_make_the_pause_longer():
    breaker = Breaker()
    for _ in range(10):
        breaker.failed(0.0)
    assert breaker.may_try(FIRST_PAUSE)


def test_a_try_that_never_ends_does_not_bar_the_next():
    breaker = Breaker()
    breaker.failed(0.0)
    assert breaker.may_try(FIRST_PAUSE)
    assert breaker.may_try(2 * FIRST_PAUSE)


@given(st.lists(st.sampled_from(["fail", "succeed", "try", "wait"]), max_size=60))
def test_it_is_never_shut_for_longer_than_the_longest_pause(steps):
    breaker, now = Breaker(), 0.0
    for step in steps:
        if step == "fail":
            breaker.failed(now)
        elif step == "succeed":
            breaker.succeeded()
        elif step == "try":
            breaker.may_try(now)
        else:
            now += 3.0
    assert breaker.may_try(now + LONGEST_PAUSE)
