"""Faults that caches of this kind have had in public, at a service whose clock moves when told to."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.transfer.keys import ChunkChain, Span, root_digest
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import (
    PROTOCOL_VERSION,
    AbortStore,
    Clear,
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
    StoreSlots,
    Unregister,
)
from lmcache_kernels.transfer.serving.known_workers import Liveness
from lmcache_kernels.transfer.serving.service import CacheService

SHARD = b"s" * 32
CHUNK = 1536
SLOT = HEADER_BYTES + CHUNK


class Cache:
    def __init__(self, slots: int, **options) -> None:
        self.now = 0.0
        self.service = CacheService(
            arena_name="lmcache_kernels_test",
            arena_bytes=slots * SLOT,
            chunk_tokens=16,
            incarnation="i",
            **options,
        )

    def ask(self, request):
        return self.service.handle(request, self.now)

    def register(self, instance: int, shard: bytes = SHARD) -> None:
        reply = self.ask(Register(instance=instance, shard=shard, chunk_bytes=CHUNK))
        assert not isinstance(reply, ErrorReply)

    def store(self, instance: int, digests: list[bytes]) -> int:
        slots = self.ask(PrepareStore(instance=instance, digests=b"".join(digests)))
        assert isinstance(slots, StoreSlots)
        if slots.indices:
            assert self.ask(CommitStore(instance=instance, ticket=slots.ticket)) == Done()
        return len(slots.indices)

    def lookup(self, digests: list[bytes], request: str = "r", shards: tuple = (SHARD,)) -> int:
        found = self.ask(Lookup(request=request, shards=list(shards), digests=b"".join(digests)))
        assert isinstance(found, Found)
        return found.chunks

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.service.tick(self.now)

    def __getitem__(self, name: str) -> int:
        return self.service.stats()[name]


def some(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


TEXT = st.text(max_size=8)


@given(
    TEXT,
    TEXT,
    TEXT,
    st.lists(st.builds(Span, TEXT, st.integers(0, 40), st.integers(1, 9)), max_size=2),
)
def test_fault_d01_whatever_is_in_a_key_letting_go_is_as_easy_as_taking(model, salt, lora, spans):
    cache = Cache(8)
    cache.register(1)
    root = root_digest(model=model, chunk_tokens=16, salt=salt, adapter=lora)
    digests = ChunkChain(root, 16, spans).extend(list(range(64)))
    assert cache.store(1, digests) == 4
    assert cache.lookup(digests) == 4
    assert cache["idle"] == 0
    assert cache.ask(EndSession(request="r")) == Done()
    assert (cache["leases"], cache["idle"]) == (0, 4)


def test_fault_d02_clients_that_look_up_and_vanish_leave_a_cache_that_can_be_evicted_whole() -> (
    None
):
    cache = Cache(64, lease_ttl=300)
    cache.register(1)
    digests = some(64)
    cache.store(1, digests)
    for turn in range(1000):
        assert cache.lookup(digests, request=f"zombie {turn}") == 64
        if turn % 100 == 0:
            cache.pass_time(1)
            cache.ask(Ping(instance=1))
    assert cache["idle"] == 0
    cache.pass_time(100)
    cache.ask(Ping(instance=1))
    cache.pass_time(100)
    cache.ask(Ping(instance=1))
    cache.pass_time(100)
    assert (cache["leases"], cache["idle"]) == (0, 64)
    assert cache.store(1, some(64)) == 64


def test_fault_d04_a_lease_that_ran_out_costs_nothing_while_its_chunks_are_there() -> None:
    cache = Cache(4, lease_ttl=0.2, read_ttl=10)
    cache.register(1)
    kept, gone = some(2), some(2)
    cache.store(1, kept)
    cache.store(1, gone)
    assert cache.lookup(kept, "kept") == cache.lookup(gone, "gone") == 2
    cache.pass_time(0.5)
    load = cache.ask(PrepareRetrieve(instance=1, digests=b"".join(kept)))
    assert isinstance(load, LoadSlots)
    assert len(load.offsets) == 2
    assert cache.store(1, some(4)) == 2, "what is being read stays, however long that takes"
    assert cache.ask(PrepareRetrieve(instance=1, digests=b"".join(gone))) == LoadSlots(
        ticket=0, offsets=[]
    )
    assert cache.ask(CommitRetrieve(instance=1, ticket=load.ticket)) == Done()


@pytest.mark.parametrize("how", ["abort", "unregister", "silence", "expiry"])
def test_fault_d05_mp_d33_a_store_that_failed_is_never_offered_and_its_slots_come_back(how) -> None:
    cache = Cache(8, write_ttl=600, liveness=Liveness(120, 600))
    cache.register(1)
    digests = some(4)
    cache.store(1, digests[:1])
    slots = cache.ask(PrepareStore(instance=1, digests=b"".join(digests)))
    assert slots.indices == [1, 2, 3]
    assert cache.lookup(digests) == 1
    if how == "abort":
        assert cache.ask(AbortStore(instance=1, ticket=slots.ticket)) == Done()
    elif how == "unregister":
        cache.ask(Unregister(instance=1))
    elif how == "silence":
        cache.ask(Ping(instance=1))
        cache.pass_time(120)
    else:
        for _ in range(6):
            cache.pass_time(100)
            cache.ask(Ping(instance=1))
    late = cache.ask(CommitStore(instance=1, ticket=slots.ticket))
    assert late.code in ("unknown_ticket", "unknown_instance")
    assert cache.lookup(digests) == 1
    assert (cache["used_bytes"], cache["writing"]) == (SLOT, 0)
    cache.register(1)
    assert cache.store(1, digests) == 3, "trying again works"
    assert cache.lookup(digests) == 4


def test_fault_d09_lookups_that_load_nothing_starve_no_eviction() -> None:
    cache = Cache(100)
    cache.register(1)
    digests = some(100)
    cache.store(1, digests)
    for turn in range(10_000):
        cache.lookup(digests[: 1 + turn % 100], request="probe")
    assert cache["leases"] == 1
    cache.ask(EndSession(request="probe"))
    assert cache["idle"] == 100
    assert cache.store(1, some(100)) == 100


def test_mp_d37_fault_d04_looking_up_again_renews_what_a_request_holds() -> None:
    """No message is needed for that alone; a read that has begun needs no lease any more."""
    cache = Cache(4, lease_ttl=300, liveness=Liveness(1e6, 1e6))
    cache.register(1)
    digests = some(2)
    cache.store(1, digests)
    assert cache.lookup(digests, "a") == 2
    for _ in range(3):
        cache.pass_time(200)
        assert cache.lookup(digests, "a") == 2
        assert (cache["leases"], cache["idle"]) == (1, 0), "once, not once more each time"
    cache.pass_time(299)
    load = cache.ask(PrepareRetrieve(instance=1, digests=b"".join(digests)))
    cache.pass_time(1)
    assert cache["leases"] == 0
    assert cache.store(1, some(4)) == 2, "it is being read"
    assert cache.ask(CommitRetrieve(instance=1, ticket=load.ticket)) == Done()


def test_mp_086_a_lookup_is_answered_once_and_leaves_no_job_that_could_be_asked_twice() -> None:
    """Its answer is the hit itself. Who asks again is told what is true then."""
    cache = Cache(8)
    cache.register(1)
    digests = some(4)
    assert cache.lookup(digests) == 0
    assert cache["leases"] == 0
    cache.store(1, digests[:3])
    assert [cache.lookup(digests) for _ in range(3)] == [3, 3, 3]
    assert cache["leases"] == 1
    cache.ask(EndSession(request="r"))
    assert (cache["leases"], cache["idle"]) == (0, 3)
    cache.ask(Clear())
    assert cache.lookup(digests) == 0


def test_mp_088_fault_g06_each_of_four_readers_holds_what_it_reads() -> None:
    """One object for all ranks of a model that each need all of it: after three of four reads it is
    held still, after the fourth it can be evicted. The lookup's lease is a fifth holder."""
    cache = Cache(2)
    ranks = (1, 2, 3, 4)
    for instance in ranks:
        cache.register(instance)
    digests = some(2)
    assert cache.store(1, digests) == 2
    assert cache["stored"] == 2
    assert cache.lookup(digests) == 2
    reads = {
        instance: cache.ask(PrepareRetrieve(instance=instance, digests=b"".join(digests)))
        for instance in ranks
    }
    assert {tuple(load.offsets) for load in reads.values()} == {(0, SLOT)}
    assert cache["reads"] == 4
    assert cache.ask(EndSession(request="r")) == Done()
    for left, instance in zip((3, 2, 1, 0), ranks, strict=True):
        assert cache.store(1, some(2)) == 0
        done = CommitRetrieve(instance=instance, ticket=reads[instance].ticket)
        assert cache.ask(done) == Done()
        assert cache.ask(done).code == "unknown_ticket", "its share is given back once"
        assert (cache["reads"], cache["idle"]) == (left, 0 if left else 2)
    assert cache.store(1, some(2)) == 2


@given(st.permutations([0, 1, 2]))
def test_mp_d34_reads_of_the_same_chunks_by_one_worker_are_each_their_own(order) -> None:
    """Two requests load the same range at once, and a third a part of it: each end lets go of its own."""
    cache = Cache(4)
    cache.register(1)
    digests = some(4)
    cache.store(1, digests)
    parts = [digests, digests, digests[:2]]
    reads = [cache.ask(PrepareRetrieve(instance=1, digests=b"".join(part))) for part in parts]
    assert len({load.ticket for load in reads}) == 3
    for position, number in enumerate(order):
        done = CommitRetrieve(instance=1, ticket=reads[number].ticket)
        assert cache.ask(done) == Done()
        assert cache.ask(done).code == "unknown_ticket"
        held = max((len(parts[other]) for other in order[position + 1 :]), default=0)
        assert cache["idle"] == 4 - held


def test_fault_e02_an_idle_worker_that_pings_is_kept_for_ever() -> None:
    cache = Cache(4, liveness=Liveness(120, 600))
    cache.register(1)
    for _ in range(36):
        cache.pass_time(10)
        assert cache.ask(Ping(instance=1)) == Pong(incarnation="i", registered=True)
    assert cache.store(1, some(2)) == 2


def test_fault_e04_a_worker_that_leaves_takes_nothing_from_another_of_the_same_model() -> None:
    cache = Cache(8)
    digests = some(3)
    for instance in (1, 2):
        cache.register(instance)
    cache.store(1, digests[:2])
    assert cache.ask(Unregister(instance=1)) == Done()
    assert cache.lookup(digests) == 2
    assert cache.store(2, digests) == 1
    assert cache.ask(Unregister(instance=2)) == Done()
    assert cache.lookup(digests) == 3, "what was stored does not need who stored it"
    assert cache.lookup(digests, shards=(b"t" * 32,)) == 0
    cache.register(1)
    assert cache.store(1, digests) == 0


def test_fault_e13_another_protocol_version_is_refused_naming_both() -> None:
    reply = Cache(1).ask(Hello(protocol=PROTOCOL_VERSION + 1))
    assert isinstance(reply, ErrorReply)
    assert reply.code == "unsupported"
    assert f"expected {PROTOCOL_VERSION}, got {PROTOCOL_VERSION + 1}" in reply.message


def test_mp_084_a_rank_without_a_chunk_ends_the_hit_for_all() -> None:
    cache = Cache(16)
    ranks = (b"0" * 32, b"1" * 32)
    digests = some(5)
    for instance, shard in enumerate(ranks):
        cache.register(instance, shard)
    cache.store(0, digests[:3])
    cache.store(1, digests[:2])
    assert cache.lookup(digests, shards=ranks[:1]) == 3
    assert cache.lookup(digests, shards=ranks) == 2


def test_mp_090_d38_the_end_of_a_session_lets_go_of_everything_it_held() -> None:
    cache = Cache(8)
    cache.register(1)
    digests = some(8)
    cache.store(1, digests)
    for request in ("a", "b", "a"):
        cache.lookup(digests, request=request)
    cache.ask(EndSession(request="a"))
    assert cache["idle"] == 0, "the other request has them still"
    for request in ("b", "b", "unknown"):
        assert cache.ask(EndSession(request=request)) == Done()
    assert (cache["leases"], cache["idle"]) == (0, 8)


def test_mp_097_whoever_comes_second_has_nothing_to_write_and_no_failure() -> None:
    cache = Cache(8)
    for instance in (1, 2):
        cache.register(instance)
    digests = some(4)
    first = cache.ask(PrepareStore(instance=1, digests=b"".join(digests)))
    second = cache.ask(PrepareStore(instance=2, digests=b"".join(digests)))
    assert (first.indices, second) == ([0, 1, 2, 3], StoreSlots(ticket=0, indices=[], offsets=[]))
    assert cache.ask(CommitStore(instance=1, ticket=first.ticket)) == Done()
    assert cache.store(2, digests) == 0
    assert (cache.lookup(digests), cache["used_bytes"]) == (4, 4 * SLOT)


def test_mp_d37_a_session_ends_by_idleness_and_not_by_age() -> None:
    cache = Cache(4, lease_ttl=600, liveness=Liveness(1e6, 1e6))
    cache.register(1)
    digests = some(2)
    cache.store(1, digests)
    for _ in range(5):
        assert cache.lookup(digests, request="long") == 2
        cache.pass_time(599)
        assert cache["leases"] == 1
    cache.pass_time(1)
    assert cache["leases"] == 0


@given(st.integers(0, 2**63 - 1))
def test_mp_093_a_worker_that_nobody_knows_gets_an_error_and_takes_nothing(instance) -> None:
    cache = Cache(4)
    cache.register(instance)
    digests = some(2)
    cache.store(instance, digests)
    assert cache.lookup(digests) == 2
    cache.ask(Unregister(instance=instance))
    before = cache.service.stats()
    packed = b"".join(digests)
    for request in (
        PrepareStore(instance=instance, digests=packed),
        PrepareRetrieve(instance=instance, digests=packed),
        CommitRetrieve(instance=instance, ticket=1),
    ):
        reply = cache.ask(request)
        assert isinstance(reply, ErrorReply)
        assert reply.code == "unknown_instance"
    after = cache.service.stats()
    assert after == before | {"refused": before["refused"] + 3}
    assert (after["leases"], after["idle"]) == (1, 0), "the request keeps what it looked up"
