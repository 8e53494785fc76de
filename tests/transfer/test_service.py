"""The service: one reply to every request, whatever it is, and nobody else's chunks are touched."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest
from formkit import GROUPS, PARTS, piece
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer import messages
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import (
    ERROR_CODES,
    MAX_CHUNKS,
    MAX_NAME,
    MAX_PIN_SECONDS,
    MAX_TENANT,
    PROTOCOL_VERSION,
    REPLY_OF,
    AbortStore,
    Clear,
    Cleared,
    CommitRetrieve,
    CommitStore,
    Done,
    EndSession,
    ErrorReply,
    Found,
    GetPart,
    Hello,
    LoadBlocks,
    LoadSlots,
    Lookup,
    Pin,
    Ping,
    Pong,
    PrepareRetrieve,
    PrepareStore,
    PutPart,
    Register,
    RegisterCache,
    Registered,
    Reply,
    Request,
    Settle,
    StoreBlocks,
    StoreSlots,
    Unpin,
    Unregister,
    Welcome,
)
from lmcache_kernels.transfer.serving import known_workers, pins
from lmcache_kernels.transfer.serving.eviction import Eviction
from lmcache_kernels.transfer.serving.known_workers import Liveness
from lmcache_kernels.transfer.serving.quotas import Quotas
from lmcache_kernels.transfer.serving.service import CacheService

SHARD, OTHER = b"s" * 32, b"o" * 32
CHUNK = 1536
SLOT = HEADER_BYTES + CHUNK
DIGESTS = b"".join(bytes([i]) * 32 for i in range(8))


def digests(start: int, stop: int) -> bytes:
    return DIGESTS[32 * start : 32 * stop]


class Cache:
    """A service with a clock that moves when told to."""

    def __init__(self, slots: int = 8, **options: float) -> None:
        self.now = 1000.0
        self.service = CacheService(
            arena_name="lmcache_kernels_test",
            arena_bytes=slots * SLOT,
            chunk_tokens=256,
            incarnation="first",
            **options,
        )

    def ask(self, request: Request) -> Reply:
        reply = self.service.handle(request, self.now)
        assert isinstance(reply, (REPLY_OF.get(type(request), ErrorReply), ErrorReply))
        if isinstance(reply, ErrorReply):
            assert reply.code in ERROR_CODES
        return reply

    def code(self, request: Request) -> str:
        reply = self.ask(request)
        assert isinstance(reply, ErrorReply), reply
        return reply.code

    def register(self, instance: int, shard: bytes = SHARD) -> None:
        assert self.ask(Register(instance=instance, shard=shard, chunk_bytes=CHUNK)) == Registered(
            arena_name="lmcache_kernels_test", arena_bytes=self.service.stats()["capacity_bytes"]
        )

    def store(self, instance: int, packed: bytes) -> int:
        slots = self.ask(PrepareStore(instance=instance, digests=packed))
        assert isinstance(slots, StoreSlots)
        if slots.indices:
            assert self.ask(CommitStore(instance=instance, ticket=slots.ticket)) == Done()
        return len(slots.indices)

    def lookup(self, packed: bytes, request: str = "probe", shards: tuple = (SHARD,)) -> int:
        found = self.ask(Lookup(request=request, shards=list(shards), digests=packed))
        assert isinstance(found, Found)
        return found.chunks


@pytest.fixture
def cache() -> Cache:
    cache = Cache()
    cache.register(1)
    return cache


# --- the good path --------------------------------------------------------------------------------


def test_handshake() -> None:
    cache = Cache()
    assert cache.ask(Hello(protocol=PROTOCOL_VERSION)) == Welcome(
        protocol=PROTOCOL_VERSION, incarnation="first", clock=1000.0, chunk_tokens=256
    )
    reply = cache.ask(Hello(protocol=99))
    assert isinstance(reply, ErrorReply)
    assert reply.code == "unsupported"
    assert f"expected {PROTOCOL_VERSION}, got 99" in reply.message


def test_store_lookup_retrieve(cache: Cache) -> None:
    slots = cache.ask(PrepareStore(instance=1, digests=digests(0, 3)))
    assert isinstance(slots, StoreSlots)
    assert slots.indices == [0, 1, 2]
    assert sorted(slots.offsets) == [0, SLOT, 2 * SLOT]
    assert cache.lookup(digests(0, 4)) == 0
    assert cache.ask(CommitStore(instance=1, ticket=slots.ticket)) == Done()
    assert cache.lookup(digests(0, 4)) == 3
    load = cache.ask(PrepareRetrieve(instance=1, digests=digests(0, 4)))
    assert isinstance(load, LoadSlots)
    assert load.offsets == slots.offsets
    assert cache.ask(CommitRetrieve(instance=1, ticket=load.ticket)) == Done()
    assert cache.ask(EndSession(request="probe")) == Done()
    assert cache.ask(EndSession(request="probe")) == Done()
    assert cache.ask(Clear()) == Cleared(chunks=3)
    assert cache.ask(PrepareRetrieve(instance=1, digests=digests(0, 4))) == LoadSlots(
        ticket=0, offsets=[]
    )


def test_lookup_needs_every_shard(cache: Cache) -> None:
    cache.register(2, OTHER)
    cache.store(1, digests(0, 3))
    cache.store(2, digests(0, 2))
    assert cache.lookup(digests(0, 4), shards=(SHARD, OTHER, SHARD)) == 2


def test_damaged_chunks_are_not_offered_again(cache: Cache) -> None:
    cache.store(1, digests(0, 3))
    load = cache.ask(PrepareRetrieve(instance=1, digests=digests(0, 3)))
    assert isinstance(load, LoadSlots)
    bad = CommitRetrieve(instance=1, ticket=load.ticket, damaged=[3])
    assert cache.code(bad) == "bad_request"
    assert cache.code(msgspec.structs.replace(bad, damaged=[-1])) == "bad_request"
    assert cache.ask(msgspec.structs.replace(bad, damaged=[1])) == Done()
    assert cache.lookup(digests(0, 3)) == 1


@pytest.mark.parametrize("shards", [[], [SHARD], [SHARD, SHARD, OTHER]])
def test_nothing_old_is_found_after_a_clear(cache: Cache, shards: list[bytes]) -> None:
    cache.store(1, digests(0, 3))
    assert cache.lookup(digests(0, 1), "r") == 1
    load = cache.ask(PrepareRetrieve(instance=1, digests=digests(1, 2)))
    assert isinstance(load, LoadSlots)
    staged = cache.ask(PrepareStore(instance=1, digests=digests(3, 5)))
    assert isinstance(staged, StoreSlots)
    assert cache.ask(Clear(shards=shards)) == Cleared(chunks=3)
    assert cache.lookup(digests(0, 1), "r") == 0
    assert cache.code(CommitStore(instance=1, ticket=staged.ticket)) == "unknown_ticket"
    assert cache.ask(CommitRetrieve(instance=1, ticket=load.ticket)) == Done()
    assert [cache.lookup(digests(i, i + 1)) for i in range(5)] == [0] * 5
    assert cache.service.stats()["used_bytes"] == 0
    assert cache.store(1, digests(0, 5)) == 5


def test_a_clear_of_one_shard_leaves_the_others(cache: Cache) -> None:
    cache.register(2, OTHER)
    cache.store(1, digests(0, 3))
    cache.store(2, digests(0, 3))
    assert cache.ask(Clear(shards=[OTHER])) == Cleared(chunks=3)
    assert cache.lookup(digests(0, 3)) == 3
    assert cache.lookup(digests(0, 3), shards=(OTHER,)) == 0


def test_a_full_arena_makes_room_and_says_how_much(cache: Cache) -> None:
    cache.store(1, DIGESTS)
    new = b"".join(bytes([100 + i]) * 32 for i in range(4))
    assert cache.store(1, new) == 4
    assert cache.lookup(DIGESTS, "r") == 4
    assert cache.lookup(new, "s") == 4
    assert cache.store(1, digests(4, 8)) == 0
    assert cache.ask(EndSession(request="s")) == Done()
    assert cache.ask(EndSession(request="s")) == Done()
    assert cache.store(1, digests(4, 8)) == 4
    assert cache.lookup(DIGESTS, "t") == 8


def test_mp_099_a_lookup_with_windows(cache: Cache) -> None:
    """Of a windowed group what the end of the hit needs is leased; the worker then reads just that."""
    cache.register(2, OTHER)
    cache.store(1, digests(0, 5))
    cache.store(2, digests(3, 5))

    def ask(shards: list[bytes], windows: list[int]) -> int:
        found = cache.ask(
            Lookup(request="r", shards=shards, digests=digests(0, 6), windows=windows)
        )
        assert isinstance(found, Found)
        return found.chunks

    assert ask([SHARD, OTHER], [0, 2]) == 5
    assert cache.service.stats()["idle"] == 0
    assert ask([SHARD, OTHER], [2, 2]) == 5
    assert cache.service.stats()["idle"] == 3
    assert ask([SHARD, OTHER, OTHER], [0, 1, 2]) == 5
    assert ask([SHARD, OTHER, OTHER], [0, 1, 3]) == 0, "the same shard again, with other needs"
    assert ask([SHARD, OTHER], []) == 0
    assert cache.service.stats()["idle"] == 7
    load = cache.ask(PrepareRetrieve(instance=2, digests=digests(3, 5)))
    assert isinstance(load, LoadSlots)
    assert len(load.offsets) == 2
    assert cache.service.stats()["idle"] == 5
    assert cache.ask(CommitRetrieve(instance=2, ticket=load.ticket)) == Done()
    assert cache.service.stats()["idle"] == 7


def test_tenants_have_quotas(cache: Cache) -> None:
    cache.service.set_quota("a", 3 * SLOT)
    slots = cache.ask(PrepareStore(instance=1, digests=digests(0, 5), tenant="a"))
    assert isinstance(slots, StoreSlots)
    assert slots.indices == [0, 1, 2]
    assert cache.ask(CommitStore(instance=1, ticket=slots.ticket)) == Done()
    assert cache.store(1, digests(3, 8)) == 5
    assert cache.service.quotas() == {"a": (3 * SLOT, 3 * SLOT)}
    cache.service.set_quota("a", SLOT)
    cache.service.tick(cache.now)
    assert cache.service.quotas() == {"a": (SLOT, SLOT)}
    assert cache.lookup(DIGESTS) == 1
    with pytest.raises(ConfigError):
        cache.service.set_quota("a/b", 1)


def test_quotas_and_a_limit_of_pins_to_begin_with() -> None:
    cache = Cache(quotas=Quotas({"a": 0}, default=SLOT), pin_limit=0.25)
    cache.register(1)
    for tenant, chunks in (("a", 0), ("b", 1), ("", 5)):
        slots = cache.ask(PrepareStore(instance=1, digests=digests(0, 6), tenant=tenant))
        assert isinstance(slots, StoreSlots)
        assert len(slots.indices) == chunks
        if chunks:
            cache.ask(CommitStore(instance=1, ticket=slots.ticket))
    assert cache.ask(pinning(digests=DIGESTS)) == Found(chunks=2)


def test_pinned_chunks_stay_until_the_pin_ends(cache: Cache) -> None:
    cache.store(1, digests(0, 3))
    assert cache.ask(pinning(digests=DIGESTS, shards=[SHARD, SHARD], seconds=60.0)) == Found(
        chunks=3
    )
    new = b"".join(bytes([100 + i]) * 32 for i in range(8))
    assert cache.store(1, new) == 5
    assert cache.lookup(digests(0, 3)) == 3
    assert cache.ask(EndSession(request="probe")) == Done()
    stats = cache.service.stats()
    assert (stats["pins"], stats["pinned_bytes"]) == (1, 3 * SLOT)
    cache.now += 60
    cache.service.tick(cache.now)
    assert cache.service.stats()["pins"] == 0
    assert cache.ask(pinning(pin="y")) == Found(chunks=1)
    assert cache.ask(Unpin(pin="y")) == Done()
    assert cache.ask(Unpin(pin="y")) == Done()
    assert cache.service.stats()["pinned_bytes"] == 0


def test_pins_without_end_are_refused(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 1)
    cache.store(1, digests(0, 1))
    assert cache.ask(pinning()) == Found(chunks=1)
    assert cache.code(pinning(pin="another")) == "busy"


# --- workers --------------------------------------------------------------------------------------


def test_ping_tells_the_truth(cache: Cache) -> None:
    for instance, registered in ((None, False), (1, True), (2, False)):
        assert cache.ask(Ping(instance=instance)) == Pong(
            incarnation="first", registered=registered
        )
    assert cache.ask(Unregister(instance=1)) == Done()
    assert cache.ask(Unregister(instance=1)) == Done()
    assert cache.ask(Ping(instance=1)) == Pong(incarnation="first", registered=False)


@pytest.mark.parametrize("how", ["silence", "unregister", "register"])
def test_what_a_lost_worker_was_writing_is_never_seen(
    cache: Cache, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    slots = cache.ask(PrepareStore(instance=1, digests=digests(0, 3)))
    assert isinstance(slots, StoreSlots)
    if how == "silence":
        cache.ask(Ping(instance=1))
        cache.now += 120
        with caplog.at_level(logging.WARNING):
            cache.service.tick(cache.now)
        assert "worker 1 was silent for 120 s" in caplog.text
        assert cache.code(CommitStore(instance=1, ticket=slots.ticket)) == "unknown_instance"
    elif how == "unregister":
        cache.ask(Unregister(instance=1))
    cache.register(1)
    assert cache.code(CommitStore(instance=1, ticket=slots.ticket)) == "unknown_ticket"
    assert cache.lookup(digests(0, 3)) == 0
    stats = cache.service.stats()
    assert (stats["used_bytes"], stats["discarded"], stats["workers"]) == (0, 3, 1)


def test_every_request_of_a_worker_keeps_it_registered(cache: Cache) -> None:
    cache.store(1, digests(0, 1))
    for request in (
        Ping(instance=1),
        PrepareStore(instance=1, digests=b""),
        CommitStore(instance=1, ticket=77),
        AbortStore(instance=1, ticket=77),
        PrepareRetrieve(instance=1, digests=b""),
        CommitRetrieve(instance=1, ticket=77),
    ):
        cache.now += 119
        cache.service.tick(cache.now)
        cache.ask(request)
    assert cache.ask(Ping(instance=1)) == Pong(incarnation="first", registered=True)


def test_mp_092_fault_e11_a_worker_is_dropped_after_its_grace_or_when_it_stops_pinging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = Cache(liveness=Liveness(120, 600))
    for instance in (1, 2, 3):
        cache.register(instance)
    cache.ask(Ping(instance=1))
    for seconds, workers in ((119, 3), (1, 2), (300, 2), (179, 2), (1, 1)):
        cache.now += seconds
        cache.ask(PrepareStore(instance=3, digests=digests(0, 1)))  # never pings, but stores
        with caplog.at_level(logging.WARNING):
            cache.service.tick(cache.now)
        assert cache.service.stats()["workers"] == workers
    assert "worker 1 was silent for 120 s" in caplog.text
    assert "worker 2 was silent for 600 s" in caplog.text
    cache.ask(Ping(instance=3))
    cache.register(3)  # comes again: it has a grace again
    cache.now += 599
    cache.service.tick(cache.now)
    assert cache.service.stats()["workers"] == 1


def test_other_times_count_for_the_workers_that_are_there_too() -> None:
    cache = Cache(liveness=Liveness(120, 600))
    for instance in (1, 2):
        cache.register(instance)
    cache.ask(Ping(instance=1))
    for seconds, liveness, workers in (
        (50, Liveness(60, 100), 2),
        (10, Liveness(60, 100), 1),
        (40, Liveness(60, 200), 1),
        (100, Liveness(60, 200), 0),
    ):
        cache.service.change(Eviction(), liveness, Quotas())
        cache.now += seconds
        cache.service.tick(cache.now)
        assert cache.service.stats()["workers"] == workers


def test_fault_e11_workers_that_die_right_after_they_registered_leave_nothing() -> None:
    cache = Cache(liveness=Liveness(120, 600))
    for instance in range(20):
        cache.register(instance)
        slots = cache.ask(PrepareStore(instance=instance, digests=digests(0, 8)))
        assert isinstance(slots, StoreSlots)
        assert len(slots.indices) == 8
        cache.now += 600
        cache.service.tick(cache.now)
        stats = cache.service.stats()
        assert (stats["workers"], stats["used_bytes"], stats["writing"]) == (0, 0, 0)


def test_registrations_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_workers, "MAX_WORKERS", 3)
    cache = Cache()
    for instance in (1, 2, 3, 2):
        cache.register(instance)
    another = Register(instance=4, shard=SHARD, chunk_bytes=CHUNK)
    assert cache.code(another) == "busy"
    cache.ask(Unregister(instance=1))
    cache.register(4)
    assert cache.service.stats()["workers"] == 3


def test_mp_092_times_of_workers_that_cannot_be_are_refused() -> None:
    assert Liveness.of_options(0, 0) == Liveness(math.inf, math.inf)
    assert Liveness.of_options(30, 30) == Liveness(30, 30)
    for timeout, grace in (
        *((29, 600), (29.999, 600), (-1, 600), (math.nan, 600), (math.inf, math.inf)),
        *((120, 119), (120, math.inf), (120, math.nan)),
    ):
        with pytest.raises(ValueError, match="at least 30 seconds"):
            Liveness.of_options(timeout, grace)
    for reap_after, grace in ((0, 1), (2, 1), (math.nan, 1)):
        with pytest.raises(ConfigError, match="reap_after"):
            Liveness(reap_after, grace)


def test_mp_092_without_a_reaper_workers_stay() -> None:
    cache = Cache(liveness=Liveness.of_options(0, 600))
    cache.register(1)
    cache.ask(Ping(instance=1))
    cache.now += 1e9
    cache.service.tick(cache.now)
    assert cache.service.stats()["workers"] == 1


def test_reads_of_a_silent_worker_end(cache: Cache) -> None:
    cache.store(1, digests(0, 2))
    cache.ask(PrepareRetrieve(instance=1, digests=digests(0, 2)))
    cache.ask(Ping(instance=1))
    assert cache.service.stats()["idle"] == 0
    cache.now += 120
    cache.service.tick(cache.now)
    assert cache.service.stats()["idle"] == 2


def test_a_read_whose_end_was_lost_ends_by_itself(cache: Cache) -> None:
    cache.store(1, digests(0, 2))
    load = cache.ask(PrepareRetrieve(instance=1, digests=digests(0, 2)))
    assert isinstance(load, LoadSlots)
    for seconds, idle in ((90, 0), (89, 0), (1, 2)):
        cache.now += seconds
        cache.ask(Ping(instance=1))
        cache.service.tick(cache.now)
        assert cache.service.stats()["idle"] == idle
    late = CommitRetrieve(instance=1, ticket=load.ticket, damaged=[0])
    assert cache.code(late) == "unknown_ticket"
    assert cache.lookup(digests(0, 2)) == 2


def test_workers_of_a_shard_agree_on_its_chunks(cache: Cache) -> None:
    assert cache.code(Register(instance=2, shard=SHARD, chunk_bytes=CHUNK + 1)) == "bad_request"
    cache.register(2)
    assert cache.ask(Unregister(instance=2)) == Done()
    reply = cache.ask(Register(instance=1, shard=SHARD, chunk_bytes=CHUNK + 1))
    assert isinstance(reply, Registered), "its own registration it may replace"


def test_tickets_are_their_workers(cache: Cache) -> None:
    cache.register(2)
    slots = cache.ask(PrepareStore(instance=1, digests=digests(0, 1)))
    assert isinstance(slots, StoreSlots)
    assert cache.code(CommitStore(instance=2, ticket=slots.ticket)) == "unknown_ticket"
    assert cache.code(AbortStore(instance=2, ticket=slots.ticket)) == "unknown_ticket"
    assert cache.ask(AbortStore(instance=1, ticket=slots.ticket)) == Done()
    assert cache.code(AbortStore(instance=1, ticket=slots.ticket)) == "unknown_ticket"
    assert cache.code(CommitRetrieve(instance=1, ticket=0)) == "unknown_ticket"


def test_a_write_that_takes_too_long_is_refused(cache: Cache) -> None:
    slots = cache.ask(PrepareStore(instance=1, digests=digests(0, 1)))
    assert isinstance(slots, StoreSlots)
    cache.now += 600
    assert cache.code(CommitStore(instance=1, ticket=slots.ticket)) == "unknown_ticket"
    assert cache.lookup(digests(0, 1)) == 0
    assert cache.store(1, digests(0, 1)) == 1


def test_leases_end_by_themselves(cache: Cache) -> None:
    cache.store(1, digests(0, 2))
    cache.lookup(digests(0, 2))
    for seconds, idle in ((299, 0), (1, 2)):
        cache.now += seconds
        cache.service.tick(cache.now)
        assert cache.service.stats()["idle"] == idle


# --- bad requests ---------------------------------------------------------------------------------

TOO_MANY = bytes(32) * (MAX_CHUNKS + 1)


def windowed(windows: list[int]) -> Lookup:
    return Lookup(request="x", shards=[SHARD], digests=digests(0, 1), windows=windows)


def pinning(**changes: object) -> Pin:
    good = Pin(pin="x", shards=[SHARD], digests=digests(0, 1), seconds=1.0)
    return msgspec.structs.replace(good, **changes)


@pytest.mark.parametrize(
    ("code", "request_"),
    [
        ("bad_request", Register(instance=-1, shard=SHARD, chunk_bytes=1)),
        ("bad_request", Register(instance=1 << 63, shard=SHARD, chunk_bytes=1)),
        ("bad_request", Register(instance=1, shard=SHARD[1:], chunk_bytes=1)),
        ("bad_request", Register(instance=1, shard=SHARD, chunk_bytes=0)),
        ("no_space", Register(instance=1, shard=SHARD, chunk_bytes=8 * SLOT - HEADER_BYTES + 1)),
        ("no_space", Register(instance=1, shard=SHARD, chunk_bytes=1 << 62)),
        ("bad_request", Ping(instance=-1)),
        ("bad_request", Unregister(instance=1 << 64)),
        ("bad_request", Lookup(request="x" * (MAX_NAME + 1), shards=[SHARD], digests=b"")),
        ("bad_request", Lookup(request="x", shards=[], digests=b"")),
        ("bad_request", Lookup(request="x", shards=[SHARD, b""], digests=b"")),
        ("bad_request", Lookup(request="x", shards=[SHARD], digests=bytes(33))),
        ("bad_request", Lookup(request="x", shards=[SHARD], digests=TOO_MANY)),
        ("bad_request", windowed([1, 1])),
        ("bad_request", windowed([-1])),
        ("bad_request", windowed([MAX_CHUNKS + 1])),
        ("bad_request", windowed([1 << 80])),
        ("bad_request", Lookup(request="x", shards=[], digests=b"", windows=[])),
        ("bad_request", EndSession(request="x" * (MAX_NAME + 1))),
        ("bad_request", pinning(pin="x" * (MAX_NAME + 1))),
        ("bad_request", pinning(shards=[])),
        ("bad_request", pinning(shards=[SHARD, b""])),
        ("bad_request", pinning(digests=bytes(33))),
        ("bad_request", pinning(digests=TOO_MANY)),
        ("bad_request", pinning(seconds=0.0)),
        ("bad_request", pinning(seconds=-1.0)),
        ("bad_request", pinning(seconds=math.nan)),
        ("bad_request", pinning(seconds=math.inf)),
        ("bad_request", pinning(seconds=MAX_PIN_SECONDS + 1)),
        ("bad_request", Unpin(pin="x" * (MAX_NAME + 1))),
        *(
            ("bad_request", PrepareStore(instance=1, digests=b"", tenant=tenant))
            for tenant in ("a@b", "a/b", "a\\b", "a\0", "a\n", "x" * (MAX_TENANT + 1), "x" * 10**6)
        ),
        ("bad_request", Clear(shards=[SHARD, b""])),
        ("bad_request", PrepareStore(instance=1, digests=bytes(31))),
        ("bad_request", PrepareStore(instance=1, digests=TOO_MANY)),
        ("bad_request", PrepareRetrieve(instance=1, digests=bytes(31))),
        ("bad_request", PrepareRetrieve(instance=1, digests=TOO_MANY)),
        ("unknown_instance", PrepareStore(instance=5, digests=b"")),
        ("unknown_instance", PrepareRetrieve(instance=5, digests=b"")),
        ("unknown_instance", CommitStore(instance=5, ticket=1)),
        ("unknown_instance", AbortStore(instance=5, ticket=1)),
        ("unknown_instance", CommitRetrieve(instance=5, ticket=1)),
        ("unsupported", Request()),
    ],
)
def test_bad_requests_change_nothing(cache: Cache, code: str, request_: Request) -> None:
    cache.store(1, digests(0, 2))
    before = cache.service.stats()
    assert cache.code(request_) == code
    after = cache.service.stats()
    assert {**after, "refused": 0} == {**before, "refused": 0}


def test_a_chunk_as_large_as_the_arena_fits() -> None:
    cache = Cache()
    reply = cache.ask(Register(instance=1, shard=SHARD, chunk_bytes=8 * SLOT - HEADER_BYTES))
    assert isinstance(reply, Registered)
    assert cache.store(1, digests(0, 2)) == 1


def test_mp_d04_a_bug_is_answered_and_logged(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cache.service._store, "clear", broken)
    reply = cache.ask(Clear())
    assert reply == ErrorReply(
        code="internal", message="Clear: ZeroDivisionError in the server; its log has the trace"
    )
    assert "a bug" in caplog.text
    assert cache.service.stats()["failed"] == 1
    assert cache.store(1, digests(0, 1)) == 1


COPYING = {
    RegisterCache: RegisterCache(instance=1, shard=SHARD, part=ShardPart(), groups=[(piece(),)]),
    StoreBlocks: StoreBlocks(instance=1, transfer=1, digests=b"", blocks=[]),
    LoadBlocks: LoadBlocks(instance=1, transfer=1, digests=b"", blocks=[]),
    Settle: Settle(instance=1, transfers=[]),
    PutPart: PutPart(instance=1, ticket=1, index=0, start=0, data=b"x"),
    GetPart: GetPart(instance=1, ticket=1, index=0, start=0, nbytes=1),
}
"""What only a service serves that was given its arena."""


def test_every_request_of_the_contract_is_served() -> None:
    service = Cache().service
    assert {*service._methods, *service._timed, *COPYING} == set(REPLY_OF)


@pytest.mark.parametrize("request_", COPYING.values(), ids=lambda r: type(r).__name__)
def test_without_an_arena_a_service_does_not_copy(cache: Cache, request_: Request) -> None:
    assert cache.code(request_) == "unsupported"


def fields_of(kind: type[Request]) -> st.SearchStrategy[Request]:
    number = st.sampled_from([-1, 0, 1, 2, 3, 1 << 63])
    by_type = {
        "int": number,
        "int | None": st.none() | number,
        "bool": st.booleans(),
        "float": st.sampled_from([-1.0, 0.0, 1.0, 100.0, 1e9, math.nan, math.inf]),
        "str": st.sampled_from(["", "a", "b" * 600]),
        "bytes": st.sampled_from([b"", SHARD, DIGESTS, bytes(5)]),
        "list[bytes]": st.lists(st.sampled_from([SHARD, OTHER, b""]), max_size=3),
        "list[int]": st.lists(number, max_size=3),
        "ShardPart": PARTS,
        "list[tuple[SharedPiece, ...]]": GROUPS,
    }
    names = {f.name: by_type[kind.__annotations__[f.name]] for f in msgspec.structs.fields(kind)}
    return st.builds(kind, **names)


@given(
    requests=st.lists(
        st.tuples(st.one_of(*map(fields_of, REPLY_OF)), st.sampled_from([0.0, 1.0, 130.0, 700.0])),
        max_size=30,
    )
)
def test_any_sequence_of_requests_gets_typed_replies(requests: list) -> None:
    cache = Cache(slots=3)
    cache.register(1)
    for request, seconds in requests:
        cache.now += seconds
        reply = cache.ask(request)
        assert not (isinstance(reply, ErrorReply) and reply.code == "internal")
        assert (
            msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=messages.AnyReply) == reply
        )
        cache.service.tick(cache.now)
    for instance in (0, 1, 2, 3):
        cache.ask(Unregister(instance=instance))
    cache.now += 1000
    cache.ask(Clear())
    assert cache.service.stats()["used_bytes"] == 0


@pytest.mark.parametrize("option", ["write_ttl", "lease_ttl", "read_ttl"])
def test_impossible_times_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        Cache(**{option: 0.0})
