"""Random lives of a cache with two tiers: what is found reads back right, what was cleared stays away."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tierkit import SHARD, MemoryTier, TieredCache, digests

from lmcache_kernels.transfer.messages import Lookup
from lmcache_kernels.transfer.serving.later import Later

NUMBERS = st.integers(0, 9)
LENGTHS = st.integers(1, 6)
TIERS = st.integers(0, 1)


class TieredLife(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tiers = [MemoryTier("upper"), MemoryTier("lower")]
        self.cache = TieredCache(*self.tiers, slots=6)
        self.stored = set()
        self.requests = 0
        self.begun = []

    @rule(start=NUMBERS, length=LENGTHS)
    def store(self, start, length):
        self.cache.store(start, start + length)
        self.stored |= set(range(start, start + length))

    @rule(start=NUMBERS, length=LENGTHS)
    def look_up_and_load(self, start, length):
        found = self.cache.lookup(start, start + length)
        assert set(range(start, start + found)) <= self.stored
        assert self.cache.load(start, start + found) == found
        self.cache.free()

    @rule(start=NUMBERS, length=LENGTHS)
    def look_up_without_waiting(self, start, length):
        self.requests += 1
        name = f"r{self.requests % 3}"
        wanted = Lookup(request=name, shards=[SHARD], digests=digests(start, start + length))
        reply = self.cache.begin(wanted)
        if isinstance(reply, Later):
            self.begun.append(reply)

    @rule(number=st.integers(0, 2))
    def end_session(self, number):
        self.cache.free(f"r{number}")

    @rule(tier=TIERS, away=st.booleans())
    def turn(self, tier, away):
        self.tiers[tier].away = away

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 400.0]))
    def pass_time(self, seconds):
        self.cache.pass_time(seconds)

    @rule()
    def serve(self):
        self.cache.serve()

    @rule()
    def drop_all(self):
        self.cache.drop_all()

    @rule()
    def clear(self):
        self.cache.clear()
        self.stored.clear()

    @rule(tier=TIERS, number=NUMBERS)
    def lose(self, tier, number):
        """A tier may forget what it likes."""
        for key in list(self.tiers[tier].chunks)[number : number + 1]:
            self.tiers[tier].chunks.pop(key, None)

    @precondition(lambda self: self.begun)
    @rule()
    def every_lookup_is_answered(self):
        for later in self.begun:
            assert self.cache.reply(later).chunks >= 0
        self.begun.clear()

    @invariant()
    def nothing_is_lost(self):
        stats = self.cache.stats()
        assert stats["used_bytes"] <= stats["capacity_bytes"]

    def teardown(self):
        for later in self.begun:
            self.cache.reply(later)
        for number in range(3):
            self.cache.free(f"r{number}")
        self.cache.settle()
        self.cache.until(lambda: self.cache.stats()["writing"] == 0)
        self.cache.until(lambda: self.cache.stats()["reads"] == 0)
        stats = self.cache.stats()
        assert (stats["leases"], stats["waiting_lookups"]) == (0, 0)
        assert stats["idle"] == stats["resident"]
        self.cache.close()


TestTieredLife = TieredLife.TestCase
TestTieredLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
