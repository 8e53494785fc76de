"""Which chunks go when room is needed: policies alone, and the store that follows them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.serving import eviction
from lmcache_kernels.transfer.serving.accounts import Account, Pool
from lmcache_kernels.transfer.serving.chunk_table import Chunk
from lmcache_kernels.transfer.serving.eviction import POLICIES, Eviction, LeastRecentlyUsed, S3Fifo
from lmcache_kernels.transfer.serving.store import ChunkStore

UNIT = 512
SHARD = b"s" * 32
EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def digests(first: int, count: int) -> list[bytes]:
    return [digest(first + n) for n in range(count)]


def chunk(number: int, hits: int = 0, units: int = 1) -> Chunk:
    account = Account("", None, Pool("", LeastRecentlyUsed()))
    return Chunk((SHARD, digest(number)), number * UNIT, units * UNIT, account, hits=hits)


class PolicyMachine(RuleBasedStateMachine):
    """Whatever the order: what goes was idle, and nothing is lost or there twice."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy) -> None:
        self.policy = POLICIES[policy]()
        self.idle: dict[int, Chunk] = {}

    @rule(
        numbers=st.lists(st.integers(0, 9), unique=True, max_size=6),
        hits=st.integers(0, 5),
        units=st.integers(1, 3),
    )
    def add(self, numbers, hits, units) -> None:
        new = {number: chunk(number, hits, units) for number in numbers if number not in self.idle}
        self.policy.add(list(new.values()))
        self.idle |= new

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def remove(self, data) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.idle)), unique=True))
        self.policy.remove([self.idle.pop(number) for number in some])

    @rule()
    def victim(self) -> None:
        found = self.policy.victim()
        if found is None:
            assert not self.idle
        else:
            assert self.idle.pop(int.from_bytes(found.key[1], "big")) is found

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.idle)
            assert self.policy.nbytes == sum(one.slot_bytes for one in self.idle.values())
            assert {*self.policy} == {*self.idle.values()}

    def teardown(self) -> None:
        while hasattr(self, "policy") and self.idle:
            self.victim()


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(stateful_step_count=60)


def victims(policy, count: int) -> list[int]:
    return [int.from_bytes(policy.victim().key[1], "big") for _ in range(count)]


def test_the_least_recently_used_goes_first() -> None:
    policy = LeastRecentlyUsed()
    some = [chunk(n) for n in range(4)]
    policy.add(some[1::-1])
    policy.add(some[:1:-1])
    policy.remove(some[:1])
    policy.add(some[:1])
    assert victims(policy, 4) == [1, 2, 3, 0]
    assert policy.victim() is None


def test_chunks_that_nobody_found_go_before_those_that_somebody_did() -> None:
    policy = S3Fifo()
    for number in range(4):
        policy.add([chunk(number, hits=1)])
    for number in range(4, 8):
        policy.add([chunk(number)])
    # Down to their tenth of the bytes; then the found ones, in the order in which they came.
    assert victims(policy, 8) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_often_found_ones_get_as_many_rounds_and_no_more_than_three() -> None:
    policy = S3Fifo()
    for number, hits in enumerate((1000, 3, 2, 1)):
        policy.add([chunk(number, hits=hits)])
    assert victims(policy, 4) == [3, 2, 1, 0]


def test_one_that_is_stored_again_soon_counts_as_found() -> None:
    policy = S3Fifo()
    for number in range(3):
        policy.add([chunk(number)])
    assert victims(policy, 1) == [0]
    policy.add([chunk(0)])
    assert victims(policy, 3) == [1, 2, 0]


@EVERY_POLICY
def test_chunks_that_are_held_again_are_let_go_of(policy) -> None:
    """Also those of a batch of which one stays idle for ever."""
    made = POLICIES[policy]()
    keeper = [chunk(1000 + n) for n in range(200)]
    for turn in range(200):
        others = [chunk(number) for number in range(100)]
        made.add([keeper[turn], *others])
        made.remove(others)
    batches = {id(one.batch): one.batch for one in keeper}
    assert len(batches) == len(made) == 200
    assert sum(len(batch.chunks) for batch in batches.values()) <= 200 * eviction.SPARSE


@given(st.lists(st.integers(0, 400), max_size=300))
def test_the_names_that_are_remembered_are_no_more_than_chunks_ever_were(numbers) -> None:
    policy = S3Fifo()
    idle = set()
    for number in numbers:
        if number not in idle:
            policy.add([chunk(number)])
            idle.add(number)
        if len(idle) > 20:
            idle -= set(victims(policy, 1))
    assert len(policy._gone) <= 21


@dataclass
class Cache:
    store: ChunkStore
    now: float = 0.0

    def put(self, some: list[bytes]) -> int:
        slots = self.store.reserve(1, SHARD, some, UNIT, self.now)
        assert not slots.indices or self.store.commit(1, slots.ticket, self.now)
        return len(slots.indices)

    def use(self, some: list[bytes]) -> int:
        """As an engine does: look up, and store what is missing."""
        found = self.store.lookup("r", [SHARD], some, self.now)
        self.put(some[found:])
        self.store.end_session("r")
        return found


@pytest.mark.parametrize(("policy", "found"), [("lru", 0), ("s3fifo", 20)])
def test_a_flood_of_prompts_seen_once_spares_a_shared_prefix_only_if_asked_to(
    policy, found
) -> None:
    cache = Cache(ChunkStore(100 * UNIT, eviction=Eviction(policy)))
    shared = digests(0, 20)
    cache.use(shared)
    assert cache.use(shared) == 20
    for turn in range(30):
        cache.use(digests(1000 * (turn + 1), 10))
    assert cache.use(shared) == found


@EVERY_POLICY
def test_mp_095_d36_a_full_store_makes_room_on_demand_by_bytes(policy) -> None:
    cache = Cache(ChunkStore(64 * UNIT, eviction=Eviction(policy)))
    assert cache.put(digests(0, 64)) == 64
    assert cache.put(digests(100, 32)) == 32, "half of the pool is stored at once"
    assert cache.store.lookup("r", [SHARD], digests(0, 64), 0) == 32
    assert cache.store.lookup("s", [SHARD], digests(100, 32), 0) == 32
    assert cache.store.reserve(1, SHARD, digests(200, 5), UNIT, 0).indices == []
    cache.store.end_session("s")
    assert cache.put(digests(200, 40)) == 32, "as many as are not leased"
    assert cache.store.lookup("r", [SHARD], digests(0, 64), 0) == 32


@EVERY_POLICY
def test_mp_101_d39_crossing_the_watermark_evicts_and_does_so_again(policy) -> None:
    cache = Cache(ChunkStore(100 * UNIT, eviction=Eviction(policy, watermark=0.8, ratio=0.2)))
    for turn in range(5):
        cache.store.make_room()
        cache.put(digests(1000 * turn, 79 - cache.store.stats()["used_bytes"] // UNIT))
        cache.store.make_room()
        assert cache.store.stats()["used_bytes"] == 79 * UNIT, "below it nothing goes"
        cache.put(digests(1000 * turn + 500, 1))
        cache.store.make_room()
        assert cache.store.stats()["used_bytes"] == 60 * UNIT


def test_mp_087_leased_chunks_survive_the_watermark_until_they_are_let_go() -> None:
    half = Eviction(watermark=0.5, ratio=1.0)
    cache = Cache(ChunkStore(10 * UNIT, eviction=half, lease_ttl=300))
    cache.put(digests(0, 10))
    assert cache.store.lookup("kept", [SHARD], digests(0, 4), 0) == 4
    assert cache.store.lookup("forgotten", [SHARD], digests(0, 6), 0) == 6
    cache.store.make_room()
    assert cache.store.stats()["resident"] == 6
    cache.store.end_session("kept")
    cache.store.make_room()
    assert cache.store.stats()["resident"] == 6, "the other request still has them"
    cache.store.tick(300.0)
    cache.store.make_room()
    assert cache.store.stats()["resident"] == 0


def test_without_a_watermark_nothing_goes_before_room_is_needed() -> None:
    cache = Cache(ChunkStore(10 * UNIT))
    cache.put(digests(0, 10))
    cache.store.make_room()
    assert cache.store.stats()["resident"] == 10


def test_the_watermark_can_be_moved() -> None:
    cache = Cache(ChunkStore(10 * UNIT))
    cache.put(digests(0, 10))
    cache.store.change(watermark=0.5, ratio=0.3)
    cache.store.make_room()
    assert cache.store.stats()["resident"] == 7
    cache.store.change(watermark=1.0, ratio=0.3)
    cache.store.make_room()
    assert cache.store.stats()["resident"] == 7


def test_others_wait_for_a_bounded_number_of_evictions(monkeypatch) -> None:
    monkeypatch.setattr("lmcache_kernels.transfer.serving.chunk_table.MOST_EVICTED", 3)
    cache = Cache(ChunkStore(10 * UNIT, eviction=Eviction(watermark=0.5, ratio=1.0)))
    cache.put(digests(0, 10))
    for left in (7, 4, 4):
        cache.store.make_room()
        assert cache.store.stats()["resident"] == left


class Broken(LeastRecentlyUsed):
    """Gives one victim, then raises."""

    given = 0

    def victim(self) -> Chunk | None:
        self.given += 1
        if self.given > 1:
            raise ZeroDivisionError("a policy with a bug")
        return super().victim()


def test_mp_102_a_policy_that_raises_loses_no_slot_and_no_lease(monkeypatch) -> None:
    monkeypatch.setitem(POLICIES, "broken", Broken)
    cache = Cache(ChunkStore(8 * UNIT, eviction=Eviction("broken", watermark=0.5, ratio=0.5)))
    cache.put(digests(0, 7))
    assert cache.store.lookup("r", [SHARD], digests(0, 2), 0) == 2
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            cache.store.reserve(1, SHARD, [*digests(0, 2), *digests(100, 8)], UNIT, 0)
        with pytest.raises(ZeroDivisionError):
            cache.store.make_room()
        stats = cache.store.stats()
        assert (stats["resident"], stats["idle"], stats["writing"]) == (6, 4, 0)
        assert stats["used_bytes"] == 6 * UNIT
    cache.store.end_session("r")
    assert cache.store.lookup("r", [SHARD], digests(0, 7), 0) == 6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "noop"}, "lru, s3fifo"),
        ({"watermark": 0.0}, "watermark"),
        ({"watermark": 1.01}, "watermark"),
        ({"watermark": float("nan")}, "watermark"),
        ({"ratio": 0.0}, "ratio"),
        ({"ratio": -1.0}, "ratio"),
    ],
)
def test_what_cannot_be_is_refused(options, named) -> None:
    with pytest.raises(ConfigError, match=named):
        Eviction(**options)
