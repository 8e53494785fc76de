"""Real servers above real tiers: what one has stored the other finds, whatever happens to either."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack

import pytest
from raw_worker import SLOT, RawWorker
from tier_stores import STORES
from tier_stores import opened as opened_store

from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.errors import KVTransferError

WAIT = 30.0
COUNT = 40


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=list(STORES))
def shared(request, stack):
    """A store that two servers share."""
    return stack.enter_context(opened_store(request.param))


def start(stack, store, chunks=4 * COUNT, **settings):
    size = (chunks + 1) * SLOT / (1 << 30)  # it is rounded down
    server = stack.enter_context(
        spawn_server(size_gb=max(size, 0.001), l2_tier=(store.full_url(),), **settings)
    )
    return server, stack.enter_context(RawWorker(server.url))


def until(condition):
    pause, end = threading.Event(), time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        pause.wait(0.02)


def found(worker, count=COUNT):
    """Does the worker's server find that many, and do they read back right?"""
    if worker.lookup(0, count) < count:
        return False
    assert worker.load(0, count) == count
    worker.free()
    return True


def test_a_server_finds_what_another_has_stored(shared, stack):
    _, one = start(stack, shared)
    _, two = start(stack, shared)
    assert one.store(0, COUNT) == COUNT
    until(lambda: found(two))


def test_more_than_the_arena_holds_is_found_below(shared, stack):
    """Prompts go down while later ones push them out, and come up again."""
    _, worker = start(stack, shared, chunks=COUNT)
    _, other = start(stack, shared, chunks=6 * COUNT)

    def is_below(first):
        """What was evicted before it had gone down is stored again."""
        worker.store(first, first + COUNT)
        return other.lookup(first, first + COUNT) == COUNT

    for prompt in range(5):
        first = prompt * COUNT
        # A few chunks that are just going down leave no room for others.
        assert worker.store(first, first + COUNT) >= COUNT - 8
        until(lambda first=first: is_below(first))
    until(lambda: found(worker))


def test_clear_reaches_what_is_below(shared, stack):
    _, one = start(stack, shared)
    assert one.store(0, COUNT) == COUNT
    _, two = start(stack, shared)
    until(lambda: found(two))
    one.clear()
    two.clear()
    until(lambda: one.lookup(0, COUNT) == 0)
    assert two.lookup(0, COUNT) == 0


@pytest.mark.parametrize("name", ["files", "valkey"])
def test_what_went_down_outlives_a_server_that_is_killed(name, stack):
    store = stack.enter_context(opened_store(name))
    _, two = start(stack, store)
    with ExitStack() as short:
        server, one = start(short, store)
        assert one.store(0, COUNT) == COUNT
        until(lambda: found(two))
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(KVTransferError):
            one.ask_until_gone()
    _, three = start(stack, store)
    until(lambda: found(three))


@pytest.mark.parametrize("name", ["valkey", "mooncake"])
def test_a_service_that_is_killed_is_a_miss_and_is_used_again_when_it_is_back(name, stack):
    store = stack.enter_context(opened_store(name))
    _, worker = start(stack, store)
    assert worker.store(0, 4) == 4
    store.service.kill()
    began = time.monotonic()
    for prompt in range(1, 6):
        first = prompt * COUNT
        assert worker.lookup(first, first + 4, request=f"r{prompt}") == 0
        assert worker.store(first, first + 4) == 4
        assert worker.lookup(first, first + 4, request=f"r{prompt}") == 4
        assert worker.load(first, first + 4) == 4
    assert time.monotonic() - began < WAIT
    store.service.start()
    _, other = start(stack, store)
    numbers = iter(range(1000, 10_000))

    def goes_down():
        """A chunk that is stored now; while the breaker is open it waits."""
        number = next(numbers)
        assert worker.store(number, number + 1) == 1
        return other.lookup(number - 1, number) == 1

    until(goes_down)
