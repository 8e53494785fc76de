"""How a server ends: nothing new is begun, what was begun is finished, and all of it in time."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tierkit import SHARD as TIER_SHARD
from tierkit import MemoryTier, TieredCache
from tierkit import digests as tier_digests

from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import (
    ERROR_CODES,
    AbortStore,
    Clear,
    Cleared,
    CommitRetrieve,
    CommitStore,
    Done,
    EndSession,
    ErrorReply,
    Found,
    Hello,
    LoadSlots,
    Lookup,
    Ping,
    Pong,
    PrepareRetrieve,
    PrepareStore,
    Register,
    Registered,
    StoreSlots,
    Unregister,
    Welcome,
)
from lmcache_kernels.transfer.serving.draining import NEW_WORK, Drain, Phase
from lmcache_kernels.transfer.serving.later import Later
from lmcache_kernels.transfer.serving.service import CacheService

SHARD = b"s" * 32
CHUNK = 1000
TIMEOUT = 20.0


def digests(start, stop):
    return b"".join(bytes([number]) * 32 for number in range(start, stop))


class Scripted:
    """A service with as much under way as it is told."""

    def __init__(self):
        self.left = 0
        self.due = math.inf
        self.asked = []
        self.ticks = []
        self.replies = []

    def handle(self, request, now, deadline):
        self.asked.append((request, now, deadline))
        return Done()

    def finished(self, now):
        replies, self.replies = self.replies, []
        return replies

    def next_due(self):
        return self.due

    def tick(self, now):
        self.ticks.append(now)

    def under_way(self):
        return {"stores": self.left, "loads": 0}


class Draining(RuleBasedStateMachine):
    """Whatever comes in whatever order: phases only go forward, and the time is kept."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.service = Scripted()
        self.stops = []
        self.drain = Drain(self.service, TIMEOUT, lambda: self.stops.append(self.now))
        self.began = None
        self.expected = Phase.SERVING

    @rule(seconds=st.sampled_from([0.0, 0.5, 7.0, TIMEOUT]))
    def wait(self, seconds):
        self.now += seconds

    @rule(left=st.integers(0, 2))
    def work(self, left):
        self.service.left = left

    @rule()
    def turn(self):
        later = Later()
        self.service.replies.append((later, Done()))
        assert self.drain.finished(self.now) == [(later, Done())]
        self.look()

    @rule()
    def begin(self):
        self.drain.begin(self.now)
        if self.expected is Phase.SERVING:
            self.expected, self.began = Phase.DRAINING, self.now
            self.look()

    @rule()
    def stop(self):
        self.drain.stop()
        self.expected = Phase.STOPPED

    @rule(
        kind=st.sampled_from(
            [PrepareStore(instance=1, digests=b""), Ping(), EndSession(request="r")]
        )
    )
    def ask(self, kind):
        reply = self.drain.handle(kind, self.now, 7.0)
        if self.expected is not Phase.SERVING and isinstance(kind, PrepareStore):
            assert (reply.code, self.service.asked) == ("draining", [])
        else:
            assert reply == Done()
            assert self.service.asked.pop() == (kind, self.now, 7.0)

    @rule()
    def tick(self):
        self.drain.tick(self.now)
        assert self.service.ticks.pop() == self.now

    @precondition(lambda self: self.expected is Phase.DRAINING)
    @rule()
    def wait_as_long_as_may_be(self):
        """Whoever waits until something is due does not wait too long."""
        self.now = max(self.now, self.drain.next_due())
        self.turn()
        assert self.drain.phase is Phase.STOPPED

    def look(self):
        if self.expected is Phase.DRAINING and (
            not self.service.left or self.now >= self.began + TIMEOUT
        ):
            self.expected = Phase.STOPPED

    @invariant()
    def is_as_expected(self):
        assert self.drain.phase is self.expected
        assert len(self.stops) == (self.expected is Phase.STOPPED)
        due = self.began + TIMEOUT if self.expected is Phase.DRAINING else math.inf
        assert self.drain.next_due() == due


TestDraining = Draining.TestCase


def test_the_service_may_be_due_before():
    service = Scripted()
    drain = Drain(service, TIMEOUT)
    service.left, service.due = 1, 1005.0
    drain.begin(1000.0)
    assert drain.next_due() == 1005.0


def test_what_is_lost_is_logged(caplog):
    caplog.set_level(logging.INFO)
    service = Scripted()
    service.left = 2
    drain = Drain(service, TIMEOUT)
    drain.begin(0.0)
    drain.begin(1.0)
    drain.finished(TIMEOUT)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "ending in 20 s at the latest; under way: 2 stores"),
        ("WARNING", "ended after 20 s; under way, and lost: 2 stores"),
    ]


# --- of a real service ----------------------------------------------------------------------------


class Ending:
    """A cache service that is drained."""

    def __init__(self):
        self.now = 1000.0
        service = CacheService(
            arena_name="lmcache_kernels_test",
            arena_bytes=8 * (HEADER_BYTES + CHUNK),
            chunk_tokens=256,
            incarnation="i",
        )
        self.drain = Drain(service, TIMEOUT)
        assert isinstance(self.ask(self.registration(1)), Registered)

    def registration(self, instance):
        return Register(instance=instance, shard=SHARD, chunk_bytes=CHUNK)

    def ask(self, request):
        reply = self.drain.handle(request, self.now)
        self.drain.finished(self.now)
        return reply

    def store(self, start, stop):
        slots = self.ask(PrepareStore(instance=1, digests=digests(start, stop)))
        assert isinstance(slots, StoreSlots)
        return slots.ticket

    @property
    def over(self):
        return self.drain.phase is Phase.STOPPED


@pytest.fixture
def ending():
    return Ending()


def test_every_refusal_has_a_code_that_clients_know(ending):
    assert "draining" in ERROR_CODES
    ticket = ending.store(0, 1)
    ending.drain.begin(ending.now)
    new = [
        Lookup(request="r", shards=[SHARD], digests=digests(0, 1)),
        PrepareStore(instance=1, digests=digests(1, 2)),
        ending.registration(2),
    ]
    for request in new:
        reply = ending.ask(request)
        assert isinstance(reply, ErrorReply)
        assert reply.code == "draining"
        assert type(request).__name__ in reply.message
    assert {type(request) for request in new} < NEW_WORK
    assert ending.ask(CommitStore(instance=1, ticket=ticket)) == Done()


def test_nothing_under_way_is_over_at_once(ending):
    ending.ask(CommitStore(instance=1, ticket=ending.store(0, 2)))
    ending.drain.begin(ending.now)
    assert ending.over


@pytest.mark.parametrize("end", [CommitStore, AbortStore])
def test_a_store_is_waited_for(end, ending):
    ticket = ending.store(0, 2)
    ending.drain.begin(ending.now)
    assert isinstance(ending.ask(Hello(protocol=1)), Welcome)
    assert ending.ask(Ping(instance=1)) == Pong(incarnation="i", registered=True)
    assert not ending.over
    assert ending.ask(end(instance=1, ticket=ticket)) == Done()
    assert ending.over


def test_who_was_promised_something_can_fetch_it(ending):
    ending.ask(CommitStore(instance=1, ticket=ending.store(0, 2)))
    lookup = Lookup(request="r", shards=[SHARD], digests=digests(0, 2))
    assert ending.ask(lookup) == Found(chunks=2)
    ending.drain.begin(ending.now)
    assert not ending.over
    load = ending.ask(PrepareRetrieve(instance=1, digests=digests(0, 2)))
    assert isinstance(load, LoadSlots)
    assert len(load.offsets) == 2
    assert ending.ask(EndSession(request="r")) == Done()
    assert not ending.over
    assert ending.ask(CommitRetrieve(instance=1, ticket=load.ticket)) == Done()
    assert ending.over


def test_a_worker_that_leaves_is_not_waited_for(ending):
    ending.store(0, 2)
    ending.drain.begin(ending.now)
    assert ending.ask(Clear()) == Cleared(chunks=0)
    assert not ending.over
    assert ending.ask(Unregister(instance=1)) == Done()
    assert ending.over


def test_who_never_commits_is_waited_for_so_long_and_no_longer(ending):
    ending.store(0, 2)
    ending.drain.begin(ending.now)
    ending.now += TIMEOUT - 0.001
    ending.drain.finished(ending.now)
    assert not ending.over
    ending.now = ending.drain.next_due()
    ending.drain.finished(ending.now)
    assert ending.over


# --- with tiers -----------------------------------------------------------------------------------


def drained(cache):
    """A tiered cache that was told to end while a chunk is on its way down."""
    drain = Drain(cache.service, TIMEOUT)
    cache.service, cache.inner = drain, cache.service
    drain.begin(cache.now)
    return drain


def test_what_was_stored_goes_down_before_the_end():
    tier = MemoryTier()
    with TieredCache(tier) as cache:
        tier.gate.clear()
        cache.store(0, 5)
        drain = drained(cache)
        cache.serve()
        assert drain.phase is Phase.DRAINING
        tier.gate.set()
        cache.until(lambda: drain.phase is Phase.STOPPED)
        assert len(tier.chunks) == 5
        cache.service = cache.inner


def test_a_tier_that_is_away_is_not_waited_for():
    tier = MemoryTier()
    with TieredCache(tier) as cache:
        tier.away = True
        cache.store(0, 5)
        drain = drained(cache)
        cache.until(lambda: drain.phase is Phase.STOPPED)
        assert tier.chunks == {}
        cache.service = cache.inner


def test_a_lookup_that_waits_for_a_tier_is_answered_and_what_it_found_can_be_loaded():
    tier = MemoryTier()
    with TieredCache(tier) as cache:
        cache.store(0, 5)
        cache.settle()
        cache.drop_all()
        tier.gate.clear()
        wanted = Lookup(request="probe", shards=[TIER_SHARD], digests=tier_digests(0, 5))
        later = cache.begin(wanted)
        assert isinstance(later, Later)
        drain = drained(cache)
        tier.gate.set()
        assert cache.reply(later) == Found(chunks=5)
        assert cache.load(0, 5) == 5
        assert drain.phase is Phase.DRAINING
        cache.free()
        cache.serve()
        cache.until(lambda: drain.phase is Phase.STOPPED)
        cache.service = cache.inner
