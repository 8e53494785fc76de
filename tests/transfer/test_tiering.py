"""Tiers below the arena: what goes down, what comes up again, and what happens when one is away."""

from __future__ import annotations

import contextlib

import pytest
from tierkit import CHUNK, OTHER, SHARD, SLOT, MemoryTier, TieredCache, digest, digests, payload

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.memory.slot_header import pack_header
from lmcache_kernels.transfer.messages import (
    CommitRetrieve,
    EndSession,
    Found,
    Lookup,
    PrepareRetrieve,
    PrepareStore,
)
from lmcache_kernels.transfer.serving.later import Later
from lmcache_kernels.transfer.serving.service import CacheService
from lmcache_kernels.transfer.tiering import loading, writing_back


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def tier():
    return MemoryTier()


@pytest.fixture
def cache(opened, tier):
    return opened.enter_context(TieredCache(tier))


def stored_below(tier, start, stop, shard=SHARD):
    """Put chunks into a tier as another server does."""
    for number in range(start, stop):
        header = pack_header(shard, digest(number), CHUNK, [1])
        tier.chunks[shard, digest(number)] = header + payload(shard, number)


# --- going down and coming up ---------------------------------------------------------------------


def test_what_is_stored_goes_down_and_comes_up_again(cache, tier):
    assert cache.store(0, 5) == 5
    cache.settle()
    assert len(tier.chunks) == 5
    assert all(len(data) == SLOT for data in tier.chunks.values())
    cache.drop_all()
    assert cache.lookup(0, 6) == 5
    assert cache.load(0, 5) == 5
    stats = cache.tier()
    assert (stats["stores_chunks"], stats["loads_chunks"], stats["gained"]) == (5, 5, 5)
    assert stats["stores_nbytes"] == stats["loads_nbytes"] == stats["used_bytes"] == 5 * SLOT
    assert (stats["asked"], stats["hit"]) == (6, 5)


def test_what_the_arena_has_is_not_asked_for(cache, tier):
    cache.store(0, 5)
    cache.settle()
    assert cache.lookup(0, 5) == 5
    assert tier.count("exists") == 0
    assert cache.lookup(0, 6) == 5
    assert tier.calls[-1] == ("exists", [(SHARD, digest(5))])


def test_each_chunk_that_is_found_counts_once_for_where_it_was(cache, tier):
    """The arena has chunks 0 and 3, the tier the others; a prefix needs them all."""
    stored_below(tier, 1, 3)
    stored_below(tier, 4, 6)
    cache.store(0, 1)
    cache.store(3, 4)
    cache.settle()
    assert cache.lookup(0, 7) == 6
    stats = cache.stats()
    assert (stats["asked"], stats["hit"], cache.tier()["gained"]) == (7, 2, 4)
    assert (stats["lookups"], stats["lookups_partial"], stats["stored"]) == (1, 1, 2)
    assert cache.lookup(0, 6) == 6
    stats = cache.stats()
    assert (stats["asked"], stats["hit"], cache.tier()["gained"]) == (13, 8, 4)
    assert (stats["lookups"], stats["lookups_full"]) == (2, 1)


def test_two_servers_that_share_a_tier_find_each_others_chunks(opened):
    shared = {}
    one = opened.enter_context(TieredCache(MemoryTier(chunks=shared)))
    two = opened.enter_context(TieredCache(MemoryTier(chunks=shared)))
    one.store(0, 4)
    one.settle()
    assert two.lookup(0, 4) == 4
    assert two.load(0, 4) == 4


def test_only_a_whole_prefix_is_loaded(cache, tier):
    stored_below(tier, 0, 3)
    stored_below(tier, 4, 6)
    assert cache.lookup(0, 6) == 3
    assert cache.stats()["resident"] == 3


def test_a_chunk_counts_if_every_shard_has_it_wherever_it_is(opened, tier):
    cache = opened.enter_context(TieredCache(tier, slots=16))
    cache.register(2, OTHER)
    cache.store(0, 2)
    stored_below(tier, 2, 6, SHARD)
    stored_below(tier, 0, 5, OTHER)
    assert cache.lookup(0, 6, shards=(SHARD, OTHER)) == 5
    assert cache.load(0, 5) == 5
    assert cache.load(0, 5, instance=2, shard=OTHER) == 5


def test_a_shard_that_nobody_is_registered_for_is_not_loaded(cache, tier):
    """How large its chunks are is not known."""
    stored_below(tier, 0, 2, OTHER)
    assert cache.lookup(0, 2, shards=(OTHER,)) == 0
    assert tier.calls == []


def test_more_than_there_is_room_for_is_found_as_far_as_it_goes(cache, tier):
    stored_below(tier, 0, 20)
    assert cache.lookup(0, 20) == 8
    assert cache.load(0, 8) == 8
    assert cache.lookup(0, 20, request="another") == 8
    cache.free()
    cache.free("another")
    assert cache.stats()["idle"] == 8
    assert cache.stats()["leases"] == 0


def test_loads_go_in_batches_and_several_at_a_time(monkeypatch, opened, tier):
    monkeypatch.setattr(loading, "BATCH_BYTES", 2 * SLOT)
    cache = opened.enter_context(TieredCache(tier, slots=64))
    stored_below(tier, 0, 33)
    assert cache.lookup(0, 40) == 33
    assert tier.count("get_into") == 17
    assert all(len(keys) <= 2 for name, keys in tier.calls if name == "get_into")
    assert cache.load(0, 33) == 33


def test_two_lookups_of_one_prefix_load_it_once(cache, tier):
    stored_below(tier, 0, 4)
    tier.gate.clear()
    first = cache.begin(Lookup(request="a", shards=[SHARD], digests=digests(0, 4)))
    assert tier.entered.wait(20)
    tier.entered.clear()
    tier.gate.set()
    cache.until(lambda: tier.count("exists") == 1 and cache.stats()["writing"] == 4)
    second = cache.begin(Lookup(request="b", shards=[SHARD], digests=digests(0, 4)))
    assert isinstance(first, Later)
    assert cache.reply(first) == Found(chunks=4)
    if isinstance(second, Later):
        second = cache.reply(second)
    assert second == Found(chunks=4)
    assert sum(len(keys) for name, keys in tier.calls if name == "get_into") == 4
    cache.free("a")
    assert cache.load(0, 4) == 4
    cache.free("b")
    assert cache.stats()["leases"] == 0


def test_chunks_found_in_a_lower_tier_are_kept_in_the_upper_one(opened):
    upper, lower = MemoryTier("upper"), MemoryTier("lower")
    cache = opened.enter_context(TieredCache(upper, lower))
    stored_below(lower, 0, 3)
    assert cache.lookup(0, 3) == 3
    cache.settle()
    assert upper.chunks == lower.chunks
    assert lower.count("put_from") == 0
    assert (cache.tier("upper")["gained"], cache.tier("lower")["gained"]) == (0, 3)


def test_tiers_of_one_kind_are_told_apart(opened):
    cache = opened.enter_context(TieredCache(MemoryTier(), MemoryTier()))
    assert list(cache.service.tier_stats()) == ["memory", "memory-2"]


# --- windows and tenants --------------------------------------------------------------------------


def look(cache, start, stop, **options):
    wanted = Lookup(request="probe", digests=digests(start, stop), **options)
    return cache.ask(wanted).chunks


def test_of_a_shard_with_a_window_only_the_end_of_the_hit_comes_up(opened, tier):
    cache = opened.enter_context(TieredCache(tier, slots=32))
    cache.register(2, OTHER)
    stored_below(tier, 0, 6, SHARD)
    stored_below(tier, 0, 5, OTHER)
    assert look(cache, 0, 8, shards=[SHARD, OTHER], windows=[0, 2]) == 5
    assert cache.stats()["resident"] == 5 + 2
    assert cache.load(3, 5, instance=2, shard=OTHER) == 2
    assert cache.load(0, 5) == 5


def test_a_window_that_nobody_has_whole_makes_the_hit_shorter(opened, tier):
    cache = opened.enter_context(TieredCache(tier, slots=32))
    cache.register(2, OTHER)
    stored_below(tier, 0, 6, SHARD)
    stored_below(tier, 1, 3, OTHER)
    stored_below(tier, 4, 6, OTHER)
    assert look(cache, 0, 6, shards=[SHARD, OTHER], windows=[0, 3]) == 0
    assert look(cache, 0, 6, shards=[SHARD, OTHER], windows=[0, 2]) == 6
    cache.free()
    cache.drop_all()
    tier.chunks.pop((OTHER, digest(5)))
    assert look(cache, 0, 6, shards=[SHARD, OTHER], windows=[0, 2]) == 3


def test_what_comes_up_is_charged_to_the_tenant(opened, tier):
    cache = opened.enter_context(TieredCache(tier, slots=32))
    cache.service.set_quota("t", 3 * SLOT)
    stored_below(tier, 0, 6)
    assert look(cache, 0, 6, shards=[SHARD], tenant="t") == 3
    assert cache.service.quotas()["t"].used_bytes == 3 * SLOT
    cache.free()
    assert look(cache, 0, 6, shards=[SHARD]) == 6


# --- what goes down -------------------------------------------------------------------------------


def test_policy_none_writes_nothing(opened, tier):
    cache = opened.enter_context(TieredCache(tier, policy="none"))
    cache.store(0, 3)
    cache.settle()
    assert tier.chunks == {}


def test_policy_found_writes_what_somebody_has_found_once(opened, tier):
    cache = opened.enter_context(TieredCache(tier, policy="found"))
    cache.store(0, 5)
    cache.settle()
    assert tier.chunks == {}
    for _ in range(3):
        assert cache.lookup(0, 3) == 3
    cache.settle()
    assert set(tier.chunks) == {(SHARD, digest(number)) for number in range(3)}
    assert sum(len(keys) for name, keys in tier.calls if name == "put_from") == 3


def test_unknown_policies_and_tiers_without_an_arena_are_refused(tier):
    with pytest.raises(ConfigError, match="all, found, none"):
        TieredCache(tier, policy="some")
    with pytest.raises(ConfigError, match="arena"):
        CacheService(
            arena_name="a", arena_bytes=SLOT, chunk_tokens=1, incarnation="i", tiers=[tier]
        )


def test_chunks_that_wait_to_go_down_can_be_evicted(cache, tier):
    tier.gate.clear()
    cache.store(0, 2)
    assert tier.entered.wait(20)
    for first in range(2, 32, 2):
        assert cache.store(first, first + 2) == 2
    tier.gate.set()
    cache.settle()
    stats = cache.tier()
    assert stats["stores_chunks"] + stats["skipped"] == 32
    assert stats["skipped"] > 0
    assert all(
        data
        == pack_header(SHARD, key[1], CHUNK, [1]) + payload(SHARD, int.from_bytes(key[1], "big"))
        for key, data in tier.chunks.items()
    )


def test_what_waits_is_bounded(monkeypatch, opened, tier):
    monkeypatch.setattr(writing_back, "MOST_WAITING", 5)
    cache = opened.enter_context(TieredCache(tier, slots=64))
    tier.gate.clear()
    for number in range(20):
        cache.store(number, number + 1)
    assert cache.stats()["waiting_stores"] == 5
    tier.gate.set()
    cache.settle()
    assert cache.tier()["skipped"] == 13  # two were under way


def test_a_slot_that_does_not_hold_its_chunk_does_not_go_down(cache, tier):
    slots = cache.ask(PrepareStore(instance=1, digests=digests(0, 2)))
    cache.write(slots.offsets[0], SHARD, 0)
    cache.write(slots.offsets[1], SHARD, 7)  # another chunk than it was reserved for
    cache.service._store.commit(1, slots.ticket, cache.now)
    cache.settle()
    assert set(tier.chunks) == {(SHARD, digest(0))}


def test_chunks_that_a_tier_refuses_are_counted_and_the_others_kept(cache, tier):
    tier.refused = {(SHARD, digest(1))}
    cache.store(0, 3)
    cache.settle()
    assert set(tier.chunks) == {(SHARD, digest(0)), (SHARD, digest(2))}
    assert (cache.tier()["stores_chunks"], cache.tier()["stores_failed"]) == (2, 1)
    assert cache.tier()["away"] == 0


# --- tiers that fail ------------------------------------------------------------------------------


def test_a_tier_that_is_away_is_a_miss_and_is_left_alone_for_a_while(cache, tier, caplog):
    stored_below(tier, 0, 3)
    tier.away = True
    assert cache.lookup(0, 3) == 0
    for _ in range(5):
        assert cache.lookup(0, 3) == 0
    assert tier.count("exists") == 1
    assert cache.tier()["away"] == 1
    tier.away = False
    cache.pass_time(1.0)
    assert cache.lookup(0, 3) == 3
    assert cache.tier()["away"] == 0
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split(":")[0] for line in said] == [
        "tier memory is away, its chunks count as missing",
        "tier memory is back",
    ]


def test_a_tier_that_fails_while_it_is_read_leaves_what_had_arrived(monkeypatch, opened, tier):
    monkeypatch.setattr(loading, "BATCH_BYTES", SLOT)
    monkeypatch.setattr(loading, "FETCHES_OF_A_JOB", 1)
    cache = opened.enter_context(TieredCache(tier))
    stored_below(tier, 0, 6)
    real = tier.get_into

    def get_into(keys, places):
        if tier.count("get_into") == 3:
            tier.away = True
        return real(keys, places)

    tier.get_into = get_into
    assert cache.lookup(0, 6) == 3
    assert cache.load(0, 3) == 3
    assert cache.stats()["writing"] == 0


def test_the_other_tier_helps_out(opened):
    upper, lower = MemoryTier("upper"), MemoryTier("lower")
    cache = opened.enter_context(TieredCache(upper, lower))
    cache.store(0, 3)
    cache.settle()
    cache.drop_all()
    upper.away = True
    assert cache.lookup(0, 3) == 3
    assert cache.load(0, 3) == 3


@pytest.mark.parametrize("call", ["exists", "get_into", "put_from"])
def test_a_tier_that_raises_what_it_must_not_is_one_that_is_away(cache, tier, call, caplog):
    stored_below(tier, 0, 2)

    def broken(keys, *places):
        raise ZeroDivisionError

    setattr(tier, call, broken)
    cache.store(2, 3)
    assert cache.lookup(0, 2) in (0, 2)
    cache.settle()
    assert cache.stats()["writing"] == 0
    assert any("of its own" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("call", ["exists", "get_into", "put_from"])
def test_a_tier_with_too_few_answers_is_one_that_is_away(cache, tier, call):
    stored_below(tier, 0, 2)
    setattr(tier, call, lambda keys, *places: [])
    cache.store(2, 3)
    assert cache.lookup(0, 2) in (0, 2)
    cache.settle()
    assert cache.tier()["failures"] >= 1
    assert cache.stats()["writing"] == 0


def test_a_chunk_that_claims_to_be_another_is_not_found(cache, tier):
    stored_below(tier, 0, 3)
    tier.chunks[SHARD, digest(1)] = tier.chunks[SHARD, digest(2)]
    assert cache.lookup(0, 3) == 1
    assert cache.load(0, 1) == 1


def test_a_chunk_of_another_length_is_not_found(cache, tier):
    stored_below(tier, 0, 3)
    tier.chunks[SHARD, digest(1)] += b"more"
    assert cache.lookup(0, 3) == 1


def test_a_damaged_chunk_is_forgotten_below_too(cache, tier):
    """Else it would come up again each time."""
    stored_below(tier, 0, 3)
    assert cache.lookup(0, 3) == 3
    reading = cache.ask(PrepareRetrieve(instance=1, digests=digests(0, 3)))
    cache.ask(CommitRetrieve(instance=1, ticket=reading.ticket, damaged=[1]))
    cache.free()
    cache.until(lambda: (SHARD, digest(1)) not in tier.chunks)
    assert cache.lookup(0, 3) == 1


# --- time -----------------------------------------------------------------------------------------


def test_a_tier_that_takes_too_long_is_answered_for_before_the_deadline(cache, tier):
    cache.store(0, 1)
    cache.settle()
    stored_below(tier, 1, 3)
    tier.gate.clear()
    later = cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(0, 3)), timeout=2.0)
    assert isinstance(later, Later)
    assert cache.service.next_due() == pytest.approx(cache.now + 1.8)
    cache.pass_time(1.7)
    assert cache.replies == {}
    cache.pass_time(0.1)
    assert cache.replies.pop(later) == Found(chunks=1)
    assert cache.stats()["waiting_lookups"] == 0
    tier.gate.set()


def test_what_arrives_after_the_answer_is_there_for_the_next(cache, tier):
    stored_below(tier, 0, 2)
    tier.gate.clear()
    cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(0, 2)), timeout=2.0)
    assert tier.entered.wait(20)
    tier.gate.set()
    cache.until(lambda: tier.count("get_into") == 1)
    cache.pass_time(1.9)
    cache.until(lambda: cache.stats()["resident"] == 2)
    assert cache.stats()["writing"] == 0
    assert cache.lookup(0, 2) == 2


def test_mp_090_ending_a_session_cancels_its_lookup(cache, tier):
    """What waits for a tier is forgotten, and what still arrives belongs to nobody."""
    stored_below(tier, 0, 2)
    tier.gate.clear()
    later = cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(0, 2)))
    cache.ask(EndSession(request="r"))
    assert cache.reply(later) == Found(chunks=0)
    assert cache.stats()["waiting_lookups"] == 0
    tier.gate.set()
    cache.until(lambda: cache.tier()["asked"] == 2)
    assert cache.stats()["leases"] == 0


def test_a_second_lookup_of_a_request_replaces_the_first(cache, tier):
    stored_below(tier, 0, 2)
    tier.gate.clear()
    first = cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(0, 2)))
    second = cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(0, 1)))
    assert cache.reply(first) == Found(chunks=0)
    tier.gate.set()
    assert cache.reply(second) == Found(chunks=1)


def test_mp_102_replies_are_given_though_lookups_cannot_be_expired(
    monkeypatch, cache, tier, caplog
):
    """What is due is due, whatever else fails at that moment."""
    stored_below(tier, 0, 2)

    def fails(now):
        raise ZeroDivisionError

    monkeypatch.setattr(cache.service._tiers, "expire", fails)
    assert cache.lookup(0, 2) == 2
    assert "ZeroDivisionError" in caplog.text


def test_a_call_that_never_comes_back_makes_the_tier_one_that_is_away(cache, tier):
    stored_below(tier, 0, 2)
    tier.gate.clear()
    cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(0, 2)), timeout=2.0)
    assert tier.entered.wait(20)
    cache.pass_time(31.0)
    assert cache.lookup(0, 2, timeout=2.0) == 0
    assert tier.count("exists") == 1
    tier.gate.set()


def test_lookups_that_wait_are_bounded(monkeypatch, cache, tier):
    monkeypatch.setattr(loading, "MOST_JOBS", 2)
    tier.gate.clear()
    asked = [
        cache.begin(Lookup(request=f"r{number}", shards=[SHARD], digests=digests(0, 2)))
        for number in range(3)
    ]
    assert [isinstance(one, Later) for one in asked] == [True, True, False]
    tier.gate.set()


# --- clearing -------------------------------------------------------------------------------------


def test_clear_reaches_the_tiers(cache, tier):
    cache.register(2, OTHER)
    cache.store(0, 3)
    cache.store(0, 3, instance=2, shard=OTHER)
    cache.settle()
    assert cache.clear(SHARD) == 3
    assert cache.lookup(0, 3) == 0
    cache.until(lambda: len(tier.chunks) == 3)
    assert cache.lookup(0, 3, shards=(OTHER,)) == 3


def test_what_was_cleared_does_not_come_up_while_the_tier_is_away(cache, tier):
    cache.store(0, 3)
    cache.settle()
    tier.away = True
    cache.clear()
    cache.until(lambda: cache.tier()["away"] == 1)
    cache.pass_time(1.0)
    cache.until(lambda: tier.count("clear") == 2)
    tier.away = False
    assert cache.lookup(0, 3) == 0
    assert len(tier.chunks) == 3
    cache.pass_time(2.0)
    cache.until(lambda: tier.chunks == {})
    cache.store(0, 2)
    cache.settle()
    cache.drop_all()
    assert cache.lookup(0, 3) == 2


def test_what_was_being_written_when_it_was_cleared_does_not_stay(cache, tier):
    tier.gate.clear()
    cache.store(0, 2)
    assert tier.entered.wait(20)
    cache.clear()
    cache.store(0, 1)
    tier.gate.set()
    cache.settle()
    cache.until(lambda: len(tier.chunks) <= 1)
    cache.drop_all()
    assert cache.lookup(0, 2) <= 1


def test_what_is_cleared_while_tiers_are_asked_does_not_come_up(cache, tier):
    """Neither what they had said before, nor what is behind it."""
    stored_below(tier, 0, 4)
    tier.gate.clear()
    later = cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(0, 4)))
    assert tier.entered.wait(20)
    tier.away = True  # so that the clear does not get through
    cache.clear(SHARD)
    assert cache.reply(later) == Found(chunks=0)
    tier.away = False
    tier.gate.set()
    assert cache.lookup(0, 4) == 0
    cache.settle()
    assert cache.stats()["resident"] == 0


def test_what_is_cleared_while_it_is_loaded_does_not_come_up(monkeypatch, opened, tier):
    monkeypatch.setattr(loading, "BATCH_BYTES", SLOT)
    cache = opened.enter_context(TieredCache(tier, slots=16))
    stored_below(tier, 0, 8)
    real, loads = tier.get_into, []

    def get_into(keys, places):
        loads.append(keys)
        tier.gate.clear()
        return real(keys, places)

    tier.get_into = get_into
    cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(0, 8)))
    cache.until(lambda: tier.count("get_into") == 2)
    assert cache.clear() == 0
    tier.gate.set()
    tier.get_into = real
    cache.settle()
    cache.until(lambda: cache.stats()["writing"] == 0)
    assert len(loads) == 2
    assert cache.stats()["resident"] == 0
    assert cache.lookup(0, 8) == 0


def test_clears_of_a_tier_that_is_away_do_not_pile_up(cache, tier):
    tier.away = True
    cache.lookup(0, 1)
    for _ in range(100):
        cache.clear(SHARD)
        cache.clear()
    assert len(cache.service._tiers._levels[0].clears) <= 3
    for number in range(300):
        cache.clear(number.to_bytes(32, "big"))
    assert len(cache.service._tiers._levels[0].clears) <= 70


# --- one that hangs -------------------------------------------------------------------------------


def test_a_tier_that_hangs_keeps_nobody_from_the_others(monkeypatch, opened):
    monkeypatch.setattr(loading, "BATCH_BYTES", SLOT)
    upper, lower = MemoryTier("upper"), MemoryTier("lower")
    cache = opened.enter_context(TieredCache(upper, lower, slots=64, policy="none"))
    stored_below(upper, 0, 20)
    stored_below(lower, 0, 40)
    real, hanging = upper.get_into, [True]

    def hang(keys, places):
        if hanging:
            upper.gate.clear()
        return real(keys, places)

    upper.get_into = hang
    for number in range(10):
        name = f"hangs {number}"
        cache.begin(Lookup(request=name, shards=[SHARD], digests=digests(2 * number, 20)))
    cache.until(lambda: upper.count("get_into") == 2)
    cache.pass_time(31.0)
    assert cache.lookup(20, 40) == 20  # the other tier's
    cache.free()
    assert cache.tier("upper")["away"] == 1
    assert cache.lookup(0, 4) == 4  # what hangs there comes from the other
    assert cache.load(0, 4) == 4
    hanging.clear()
    upper.gate.set()
    cache.until(lambda: cache.stats()["writing"] == 0)
    cache.until(lambda: cache.tier("upper")["away"] == 0)
    for number in range(10):
        cache.free(f"hangs {number}")
    cache.free()
    assert cache.stats()["idle"] == cache.stats()["resident"]


def test_a_lookup_without_a_deadline_does_not_wait_for_ever(cache, tier):
    stored_below(tier, 0, 2)
    tier.gate.clear()
    later = cache.begin(
        Lookup(request="r", shards=[SHARD], digests=digests(0, 2)), timeout=float("inf")
    )
    cache.pass_time(31.0)
    assert cache.replies.pop(later) == Found(chunks=0)
    tier.gate.set()


def test_a_slot_that_a_hanging_tier_may_still_write_is_nobody_elses(opened, tier):
    """However long it hangs."""
    cache = opened.enter_context(TieredCache(tier, slots=4))
    stored_below(tier, 100, 102)
    real = tier.get_into

    def hang(keys, places):
        tier.gate.clear()
        return real(keys, places)

    tier.get_into = hang
    cache.begin(Lookup(request="r", shards=[SHARD], digests=digests(100, 102)))
    cache.until(lambda: tier.count("get_into") == 1)
    cache.pass_time(100_000.0)
    cache.register(1, SHARD)
    assert cache.store(0, 4) == 2  # the others are being written
    tier.get_into = real
    tier.gate.set()
    cache.until(lambda: cache.stats()["writing"] == 0)
    assert cache.load(0, 2) == 2


# --- ending ---------------------------------------------------------------------------------------


def test_closing_waits_for_what_is_under_way_and_closes_the_tier(tier):
    with TieredCache(tier) as cache:
        cache.store(0, 3)
    assert len(tier.chunks) == 3
    assert _soon(lambda: tier.closed)


def test_closing_does_not_wait_for_ever(tier):
    cache = TieredCache(tier)
    tier.gate.clear()
    cache.store(0, 3)
    cache.service.close(timeout=0.1)
    cache.arena.close()
    tier.gate.set()
    assert _soon(lambda: tier.closed)


def _soon(condition):
    import threading
    import time

    pause, end = threading.Event(), time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        pause.wait(0.005)
    return condition()
