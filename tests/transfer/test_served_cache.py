"""A registered cache and its threads: every task ends once, and the cache closes after the last."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from contextlib import suppress

import pytest
from held_mover import Point
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_kernels.transfer.serving import served_cache
from lmcache_kernels.transfer.serving.request_checks import RefusedError
from lmcache_kernels.transfer.serving.served_cache import Permit, ServedCache

WAIT = 30.0


class Copies:
    """Attributes:
    closed: how often it was.
    """

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


class Serving:
    """A cache, and its service's thread, which is the test's."""

    def __init__(self):
        self.posted = queue.SimpleQueue()
        self.copies = Copies()
        self.cache = ServedCache(1, -1, self.posted.put)
        self.ended = []
        self.closed = 0
        self.gates = {}
        self.cache.when_closed(lambda now: setattr(self, "closed", self.closed + 1))

    def open(self):
        self.cache.open(lambda: self.copies, lambda task, now: None)
        self.turn(lambda: self.cache.copies is not None)

    def run(self, transfer, direction="store", deadline=None, held=True):
        self.cache.check_may_run(transfer)
        gate = self.gates[transfer] = threading.Event()
        if not held:
            gate.set()

        def work(permit):
            permit.wait_for(None)
            assert gate.wait(WAIT)
            return transfer

        limit = time.monotonic() + WAIT if deadline is None else deadline
        self.cache.run(direction, transfer, limit, work, self._over)

    def _over(self, task, now):
        self.ended.append("cancelled" if task.cancelled() else task.exception() or task.result())

    def turn(self, until):
        """Do what is posted until something is so."""
        give_up_at = time.monotonic() + WAIT
        while not until():
            self.posted.get(timeout=give_up_at - time.monotonic())(time.monotonic())

    def drain(self):
        while not self.posted.empty():
            self.posted.get()(time.monotonic())


@pytest.fixture
def serving():
    made = Serving()
    made.open()
    yield made
    for gate in made.gates.values():
        gate.set()
    made.cache.retire()
    made.turn(lambda: made.closed)


def test_transfers_of_a_direction_end_in_order_and_each_once(serving):
    for transfer in range(5):
        serving.run(transfer)
    serving.run(9, "load", held=False)
    serving.turn(lambda: serving.ended == [9])
    for transfer in (4, 3, 2, 1, 0):
        serving.gates[transfer].set()
    serving.turn(lambda: len(serving.ended) == 6)
    assert serving.ended == [9, 0, 1, 2, 3, 4]


def test_an_id_that_runs_is_not_taken_twice(serving):
    serving.run(1)
    with pytest.raises(RefusedError, match="in use"):
        serving.run(1)
    serving.gates[1].set()
    serving.turn(lambda: serving.ended == [1])


def test_settling_stops_what_waits_and_waits_for_what_runs(serving):
    settled = []
    for transfer in range(3):
        serving.run(transfer)
    serving.cache.settle([1, 2, 77], lambda now: settled.append("waiting ones"))
    serving.turn(lambda: settled == ["waiting ones"])
    assert serving.ended == ["cancelled", "cancelled"]
    serving.cache.settle([0, 1], lambda now: settled.append("the one that runs"))
    serving.cache.settle([88], lambda now: settled.append("none"))
    serving.turn(lambda: settled[-1] == "none")
    serving.gates[0].set()
    serving.turn(lambda: settled[-1] == "the one that runs")
    with pytest.raises(RefusedError) as caught:
        serving.run(77)
    assert caught.value.code == "stopped"


def test_what_is_barred_is_bounded(serving, monkeypatch):
    monkeypatch.setattr(served_cache, "MAX_BARRED", 3)
    serving.cache.settle(list(range(100, 110)), lambda now: None)
    serving.run(100, held=False)
    with pytest.raises(RefusedError, match="stopped"):
        serving.run(109)
    serving.turn(lambda: serving.ended == [100])


def test_a_deadline_that_has_passed_and_one_that_is_too_far(serving, monkeypatch):
    serving.run(1, deadline=time.monotonic() - 1, held=False)
    serving.turn(lambda: len(serving.ended) == 1)
    assert serving.ended[0].code == "expired"
    monkeypatch.setattr(served_cache, "MAX_SECONDS", -1.0)
    serving.run(2, deadline=float("inf"), held=False)
    serving.turn(lambda: len(serving.ended) == 2)
    assert serving.ended[1].code == "expired"


def test_a_cache_is_closed_after_its_last_task_and_once(serving):
    for transfer in range(3):
        serving.run(transfer)
    serving.run(7, "load")
    serving.cache.retire()
    serving.cache.retire()
    serving.drain()
    assert serving.copies.closed == 0
    serving.gates[0].set()
    serving.gates[7].set()
    serving.turn(lambda: serving.closed)
    assert (serving.copies.closed, serving.closed, len(serving.ended)) == (1, 1, 4)


def test_a_cache_that_is_retired_while_it_is_opened_is_closed():
    serving = Serving()
    gate = threading.Event()
    serving.cache.open(lambda: gate.wait(WAIT) and serving.copies, lambda task, now: None)
    serving.cache.retire()
    gate.set()
    serving.turn(lambda: serving.closed)
    assert serving.copies.closed == 1


def test_a_cache_that_cannot_be_opened_or_closed_is_gone_all_the_same(caplog):
    failed, stubborn = Serving(), Serving()

    def broken():
        raise ZeroDivisionError("no such luck")

    failed.cache.open(broken, lambda task, now: failed._over(task, now))
    failed.turn(lambda: failed.ended)
    stubborn.open()
    stubborn.copies.close = broken
    for one in (failed, stubborn):
        one.cache.retire()
        one.turn(lambda one=one: one.closed)
    assert "could not be closed" in caplog.text


def test_a_closed_cache_is_freed_by_its_last_reference_whoever_waited_for_its_end():
    """A server does not collect what is old, so that must not be needed."""
    freed = threading.Event()
    gc.disable()
    try:
        serving = Serving()
        serving.open()
        serving.cache.when_closed(lambda now, cache=serving.cache: None)
        gone = weakref.ref(serving.cache, lambda _: freed.set())
        serving.cache.retire()
        serving.turn(lambda serving=serving: serving.closed)
        del serving
        assert freed.wait(WAIT), gc.get_referrers(gone())
    finally:
        gc.enable()


def test_a_permit_waits_for_its_event_and_not_for_ever():
    point = Point()
    permit = Permit(time.monotonic() + WAIT)
    waiting = threading.Thread(target=permit.wait_for, args=(point,))
    waiting.start()
    point.reach()
    waiting.join(WAIT)
    assert not waiting.is_alive()
    permit.stop()
    with pytest.raises(RefusedError) as caught:
        permit.wait_for(point)
    assert caught.value.code == "stopped"
    late = Permit(time.monotonic() + 0.05)
    with pytest.raises(RefusedError) as caught:
        late.wait_for(Point())
    assert caught.value.code == "expired"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(0, 5), st.sampled_from(["store", "load"])),
        st.tuples(st.just("go"), st.integers(0, 5)),
        st.tuples(st.just("settle"), st.lists(st.integers(0, 5), max_size=4)),
        st.tuples(st.just("drain")),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(ACTIONS)
def test_whatever_is_asked_every_task_ends_once_and_the_cache_closes_once(actions):
    serving = Serving()
    serving.open()
    started, settles, settled = 0, 0, []
    for name, *arguments in actions:
        if name == "run":
            with suppress(RefusedError):  # it runs already, or was settled before
                serving.run(*arguments)
                started += 1
        elif name == "go" and arguments[0] in serving.gates:
            serving.gates[arguments[0]].set()
        elif name == "settle":
            serving.cache.settle(arguments[0], lambda now: settled.append(1))
            settles += 1
        else:
            serving.drain()
    for gate in serving.gates.values():
        gate.set()
    serving.cache.retire()
    serving.turn(lambda: serving.closed)
    assert len(serving.ended) == started
    assert len(settled) == settles
    assert serving.copies.closed == serving.closed == 1
