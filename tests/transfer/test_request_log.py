"""What is remembered of requests: exact counts for ever, the slowest for some minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.transfer.messages import (
    Done,
    EndSession,
    ErrorReply,
    Found,
    Lookup,
    PrepareStore,
)
from lmcache_kernels.transfer.serving.request_log import (
    BOUNDS,
    MINUTES,
    SLOWEST,
    RequestLog,
    SlowRequest,
)

END = EndSession(request="r")
DONE = Done()


def lookup(chunks: int) -> Lookup:
    return Lookup(request="r", shards=[bytes(32)], digests=bytes(32 * chunks))


def test_operations_and_outcomes_are_counted_by_name() -> None:
    log = RequestLog()
    assert log.served() == []
    log.record(PrepareStore(instance=1, digests=b""), ErrorReply(code="busy", message=""), 0, 0.5)
    log.record(lookup(1), Found(chunks=1), 1, 1.25)
    log.record(lookup(1), Found(chunks=0), 2, 2.25)
    log.record(lookup(1), ErrorReply(code="bad_request", message=""), 3, 3)
    lookups, stores = log.served()
    assert (lookups.operation, stores.operation) == ("lookup", "prepare_store")
    assert lookups.outcomes == {"ok": 2, "bad_request": 1}
    assert stores.outcomes == {"busy": 1}
    assert (lookups.seconds, stores.seconds) == (0.5, 0.5)


def test_what_was_given_out_does_not_change() -> None:
    log = RequestLog()
    log.record(END, DONE, 0, 1)
    (before,) = log.served()
    log.record(END, DONE, 0, 1)
    assert (before.outcomes, sum(before.buckets), before.seconds) == ({"ok": 1}, 1, 1.0)


@given(durations=st.lists(st.sampled_from([0.0, *BOUNDS, 2e-4, 1e9]), max_size=30))
def test_each_duration_is_in_the_bucket_of_the_first_bound_that_is_not_below(durations) -> None:
    log = RequestLog()
    for seconds in durations:
        log.record(END, DONE, 0.0, seconds)
    if not durations:
        return
    (served,) = log.served()
    limits = [*BOUNDS, float("inf")]
    expected = [0] * len(limits)
    for seconds in durations:
        expected[next(i for i, bound in enumerate(limits) if seconds <= bound)] += 1
    assert served.buckets == expected
    assert served.seconds == pytest.approx(sum(durations))


REQUESTS = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 20.0, 59.0, 61.0]), st.integers(0, 40)), max_size=120
)


@given(requests=REQUESTS)
def test_the_slowest_of_the_last_minutes_are_all_there(requests) -> None:
    log = RequestLog()
    now, all_of_them = 1000.0, []
    for pause, seconds in requests:
        now += pause
        log.record(END, DONE, now - seconds, now)
        all_of_them.append((float(seconds), now))
    recent = sorted((s for s, at in all_of_them if at >= now - 60 * MINUTES), reverse=True)
    found = log.slowest(now)
    assert [slow.seconds for slow in found] == recent[:SLOWEST]
    assert all(slow.ended_at >= now - 60 * MINUTES for slow in found)
    assert log.slowest(now + 60 * MINUTES + 1) == []


def test_a_slow_request_says_what_it_was() -> None:
    log = RequestLog()
    log.record(lookup(7), Found(chunks=1), 1.0, 3.0)
    slots = PrepareStore(instance=5, digests=bytes(64))
    log.record(slots, ErrorReply(code="busy", message="m"), 4.0, 7.0)
    assert log.slowest(7.0) == [
        SlowRequest("prepare_store", "busy", 3.0, 2, 5, 7.0),
        SlowRequest("lookup", "ok", 2.0, 7, None, 3.0),
    ]
