"""Expiry in order of insertion against a plain dict of deadlines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.serving.expiring import Expiring

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "pop", "expire"]),
        st.integers(0, 4),
        st.sampled_from([0.0, 1.0, 4.0, 10.0]),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_entries_end_exactly_at_their_deadline(steps: list[tuple[str, int, float]]) -> None:
    entries: Expiring[int, int] = Expiring(10.0, "ttl")
    deadlines: dict[int, tuple[float, int]] = {}
    now = 0.0
    for number, (what, key, seconds) in enumerate(steps):
        now += seconds
        if what == "put":
            entries.put(key, number, now)
            deadlines[key] = (now + 10.0, number)
        elif what == "pop":
            assert entries.pop(key) == deadlines.pop(key, (0.0, None))[1]
        else:
            late = {k: v for k, (deadline, v) in deadlines.items() if deadline <= now}
            ended = entries.expire(now)
            assert dict(ended) == late
            assert [deadlines[k][0] for k, _ in ended] == sorted(deadlines[k][0] for k in late)
            for key_ in late:
                del deadlines[key_]
        assert len(entries) == len(deadlines)
        assert dict(entries.items()) == {k: v for k, (_, v) in deadlines.items()}
        assert entries.get(key) == deadlines.get(key, (0.0, None))[1]


def test_an_entry_put_again_does_not_delay_the_others() -> None:
    entries: Expiring[str, int] = Expiring(10.0, "ttl")
    entries.put("busy", 1, 0.0)
    entries.put("silent", 2, 1.0)
    entries.put("busy", 3, 9.0)
    assert entries.expire(11.0) == [("silent", 2)]
    assert entries.expire(19.0) == [("busy", 3)]


def test_infinite_time_never_ends() -> None:
    entries: Expiring[str, int] = Expiring(math.inf, "ttl")
    entries.put("a", 1, 0.0)
    assert entries.expire(1e300) == []


@pytest.mark.parametrize("ttl", [0.0, -1.0, math.nan])
def test_impossible_times_are_refused(ttl: float) -> None:
    with pytest.raises(ConfigError, match="some_ttl"):
        Expiring(ttl, "some_ttl")


def test_another_time_counts_for_what_is_there() -> None:
    entries: Expiring[str, int] = Expiring(10.0, "ttl")
    entries.put("a", 1, 0.0)
    entries.put("b", 2, 5.0)
    entries.ttl = 3.0
    assert entries.expire(4.0) == [("a", 1)]
    entries.ttl = math.inf
    assert entries.expire(1e300) == []


def test_ages_are_from_when_an_entry_was_put_last() -> None:
    for ttl in (10.0, math.inf):
        entries: Expiring[str, int] = Expiring(ttl, "ttl")
        entries.put("a", 1, 0.0)
        entries.put("b", 2, 1.0)
        entries.put("a", 3, 4.0)
        assert list(entries.ages(6.0)) == [("b", 2, 5.0), ("a", 3, 2.0)]
