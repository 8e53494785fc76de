"""What tenants may use, and whose chunks go when it is too much."""

from __future__ import annotations

import gc
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.messages import MAX_TENANT
from lmcache_kernels.transfer.serving.accounts import Account
from lmcache_kernels.transfer.serving.eviction import POLICIES, Eviction
from lmcache_kernels.transfer.serving.quotas import Quotas
from lmcache_kernels.transfer.serving.ranking import FEW
from lmcache_kernels.transfer.serving.store import ChunkStore

UNIT = 512
SHARD = b"s" * 32
EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))


def digests(count: int, first: int = 0) -> list[bytes]:
    return [(first + n).to_bytes(32, "big") for n in range(count)]


class Cache:
    """A store of slots of one size; tenants have names, and chunks numbers."""

    def __init__(self, slots: int, quotas: dict[str | None, int] | None = None, **options) -> None:
        named = {t: n * UNIT for t, n in (quotas or {}).items() if t is not None}
        default = (quotas or {}).get(None)
        self.store = ChunkStore(
            slots * UNIT,
            quotas=Quotas(named, None if default is None else default * UNIT),
            **options,
        )

    def put(self, tenant: str, count: int, first: int = 0) -> int:
        some = digests(count, first)
        slots = self.store.reserve(1, SHARD, some, UNIT, 0, tenant)
        assert not slots.indices or self.store.commit(1, slots.ticket, 0)
        assert slots.indices == list(range(len(slots.indices))), "a prefix of what is new"
        return len(slots.indices)

    def count(self, count: int, first: int = 0) -> int:
        """How many of these are there, without a touch that would make them younger."""
        table = self.store._table
        return sum(table.resident((SHARD, d)) is not None for d in digests(count, first))

    def used(self, tenant: str) -> int:
        return self.store.quotas()[tenant].used_bytes // UNIT


@EVERY_POLICY
def test_a_tenant_at_its_quota_makes_room_among_its_own_chunks(policy) -> None:
    cache = Cache(100, {"a": 10}, eviction=Eviction(policy))
    assert cache.put("b", 20, first=1000) == 20
    assert cache.put("", 20, first=2000) == 20
    assert cache.put("a", 8) == 8
    assert cache.put("a", 8, first=100) == 8
    assert (cache.used("a"), cache.count(8), cache.count(8, 100)) == (10, 2, 8)
    assert cache.count(20, 1000) + cache.count(20, 2000) == 40
    assert cache.store.stats()["used_bytes"] == 50 * UNIT


def test_what_does_not_fit_into_a_quota_is_left_out_from_the_end() -> None:
    cache = Cache(100, {"a": 10})
    assert cache.put("a", 25) == 10
    assert cache.count(10) == 10
    assert cache.store.lookup("r", [SHARD], digests(10), 0) == 10
    assert cache.put("a", 5, first=100) == 0, "all it has is leased"
    assert cache.put("b", 5, first=100) == 5
    assert cache.used("a") == 10


def test_the_tail_of_a_prefix_never_evicts_its_head_within_a_quota() -> None:
    cache = Cache(100, {"a": 4})
    assert cache.put("a", 6) == 4
    assert cache.put("a", 8) == 0
    assert cache.count(4) == 4


def test_a_chunk_larger_than_what_can_go_evicts_nothing() -> None:
    cache = Cache(100, {"a": 4})
    assert cache.put("a", 4) == 4
    assert cache.store.lookup("r", [SHARD], digests(3), 0) == 3
    assert cache.store.reserve(1, SHARD, digests(1, 50), 2 * UNIT, 0, "a").indices == []
    assert cache.count(4) == 4
    assert cache.store.reserve(1, SHARD, digests(1, 50), UNIT, 0, "a").indices == [0]


def test_a_quota_of_nothing_stores_nothing() -> None:
    cache = Cache(100, {"a": 0, None: 0})
    assert cache.put("a", 3) == cache.put("other", 3) == 0
    assert cache.put("", 3) == 3, "who has no name has no default either"
    cache.store.set_quota("", 0)
    cache.store.make_room()
    assert cache.store.stats()["used_bytes"] == 0
    assert cache.put("", 3) == 0
    assert not cache.store._table.accounts._accounts


@EVERY_POLICY
def test_when_the_arena_is_full_the_pool_with_the_most_idle_bytes_gives(policy) -> None:
    """Not the one that asks, and not the one that was used least recently."""
    cache = Cache(30, {"a": 20, "b": 20}, eviction=Eviction(policy))
    assert cache.put("b", 8, first=1000) == 8
    assert cache.put("", 10, first=2000) == 10
    assert cache.put("a", 12) == 12
    assert cache.put("b", 2, first=1100) == 2
    assert (cache.used("a"), cache.used("b"), cache.count(10, 2000)) == (10, 10, 10)
    assert cache.put("a", 1, first=100) == 1
    assert (cache.used("a"), cache.used("b"), cache.count(10, 2000)) == (11, 10, 9), "of equals"
    assert cache.put("b", 1, first=1200) == 1
    assert (cache.used("a"), cache.used("b"), cache.count(10, 2000)) == (10, 11, 9)


def test_chunks_in_use_do_not_count_for_who_has_to_give() -> None:
    cache = Cache(10, {"a": 10, "b": 10})
    assert cache.put("a", 6) == 6
    assert cache.put("b", 4, first=100) == 4
    assert cache.store.lookup("r", [SHARD], digests(5), 0) == 5
    assert cache.put("", 2, first=200) == 2
    assert (cache.used("a"), cache.used("b")) == (6, 2)
    cache.store.end_session("r")
    assert cache.put("", 2, first=210) == 2
    assert (cache.used("a"), cache.used("b")) == (4, 2)


def test_a_chunk_belongs_to_who_stored_it() -> None:
    cache = Cache(10, {"a": 4, "b": 4})
    assert cache.put("a", 4) == 4
    assert cache.put("b", 4) == 0, "they are there already"
    assert (cache.used("a"), cache.used("b")) == (4, 0)


@EVERY_POLICY
def test_a_lowered_quota_is_kept_from_the_next_tick_on(policy) -> None:
    cache = Cache(100, {"a": 50}, eviction=Eviction(policy))
    assert cache.put("a", 40) == 40
    assert cache.put("b", 40, first=1000) == 40
    cache.store.set_quota("a", 10 * UNIT)
    assert cache.used("a") == 40
    cache.store.make_room()
    assert (cache.used("a"), cache.count(10), cache.count(40, 1000)) == (10, 10, 40)
    cache.store.set_quota("a", 90 * UNIT)
    cache.store.make_room()
    assert cache.put("a", 20, first=100) == 20


def test_what_is_in_use_goes_when_it_is_not_any_more() -> None:
    cache = Cache(100, {"a": 50})
    assert cache.put("a", 40) == 40
    assert cache.store.lookup("r", [SHARD], digests(30), 0) == 30
    cache.store.set_quota("a", 10 * UNIT)
    for _ in range(3):
        cache.store.make_room()
        assert cache.used("a") == 30
    assert cache.put("a", 1, first=100) == 0
    cache.store.end_session("r")
    cache.store.make_room()
    assert (cache.used("a"), cache.count(40)) == (10, 10)


def test_a_tick_evicts_a_bounded_number_and_no_tenant_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr("lmcache_kernels.transfer.serving.chunk_table.MOST_EVICTED", 7)
    cache = Cache(100)
    for number, tenant in enumerate("abcdefghij"):
        assert cache.put(tenant, 5, first=100 * number) == 5
    cache.store.set_quota(None, UNIT)
    before = 50
    for _ in range(40):
        cache.store.make_room()
        after = cache.store.stats()["resident"]
        assert before - after <= 7
        before = after
    assert before == 10
    assert [cache.used(tenant) for tenant in "abcdefghij"] == [1] * 10


@EVERY_POLICY
def test_a_quota_also_counts_what_was_there_before_it(policy) -> None:
    """In the order in which it would have gone; and so does what comes back when the quota ends."""
    cache = Cache(40, eviction=Eviction(policy))
    for first in (0, 100):
        assert cache.put("a", 5, first) == 5
    assert cache.put("b", 20, first=1000) == 20
    cache.store.set_quota("a", 8 * UNIT)
    cache.store.make_room()
    assert (cache.count(5), cache.count(5, 100), cache.count(20, 1000)) == (3, 5, 20)
    assert [cache.count(1, n) for n in range(5)] == [1, 1, 1, 0, 0], "the end of a prefix first"
    cache.store.set_quota("a", None)
    assert cache.store.quotas() == {}
    assert cache.put("c", 37, first=2000) == 37
    assert (cache.count(5), cache.count(5, 100)) == (0, 3)
    assert cache.count(20, 1000) == 0


def test_a_default_moves_every_tenant_but_the_named_ones() -> None:
    cache = Cache(100, {"named": 50})
    for number, tenant in enumerate(["", "named", "x", "y"]):
        assert cache.put(tenant, 10, first=100 * number) == 10
    assert cache.store.quotas() == {"named": (50 * UNIT, 10 * UNIT)}
    cache.store.set_quota(None, 4 * UNIT)
    cache.store.make_room()
    assert [cache.count(10, 100 * n) for n in range(4)] == [10, 10, 4, 4]
    assert cache.store.quotas() == {
        "named": (50 * UNIT, 10 * UNIT),
        "x": (4 * UNIT, 4 * UNIT),
        "y": (4 * UNIT, 4 * UNIT),
    }
    cache.store.set_quota("x", 6 * UNIT)
    cache.store.set_quota(None, None)
    assert cache.put("y", 10, first=500) == 10
    assert cache.put("x", 10, first=600) == 6
    assert {*cache.store.quotas()} == {"named", "x"}


def test_a_quota_for_chunks_that_are_being_written_or_read_without_being_listed() -> None:
    """They take room as all others, until the last user is done."""
    cache = Cache(100, {"a": 4})
    assert cache.put("a", 2) == 2
    slots = cache.store.reserve(1, SHARD, digests(2, 10), UNIT, 0, "a")
    read = cache.store.open_read(1, SHARD, digests(2), 0)
    cache.store.clear([], 0)
    assert cache.used("a") == 4
    assert cache.put("a", 1, first=20) == 0
    assert cache.store.close_read(1, read.ticket, [], 0)
    assert cache.used("a") == 2
    assert cache.store.abort(1, slots.ticket, 0)
    assert cache.used("a") == 0
    assert cache.put("a", 5, first=20) == 4


@pytest.mark.parametrize("default", [None, 3])
def test_tenants_that_come_and_go_leave_nothing_behind(default, full) -> None:
    """With and without a quota of their own, each evicted by those that come after it."""
    tenants = 100_000 if full else 10_000
    cache = Cache(64, {None: default} if default is not None else None, eviction=Eviction("s3fifo"))
    for number in range(tenants):
        assert cache.put(f"salt {number}", 2, first=2 * number) == 2
        if number % 1000 == 0:
            cache.store.set_quota(f"salt {number}", UNIT)
            cache.store.make_room()
            cache.store.set_quota(f"salt {number}", None)
    accounts = cache.store._table.accounts
    assert len(accounts._accounts) <= 64
    assert len(accounts._changed) + len(accounts._ranking) <= 2 * 65
    assert len(accounts._ranking._heap) <= 2 * 65 + FEW + 1
    cache.store.make_room()
    assert not accounts._over
    assert not accounts.quotas.tenants
    gc.collect()
    known = {id(account) for account in accounts._accounts.values()}
    alive = [one for one in gc.get_objects() if type(one) is Account]
    assert {id(one) for one in alive if one.tenant.startswith("salt")} == known
    cache.store.clear([], 0)
    assert not accounts._accounts
    assert accounts._limited == 0


def test_quotas_that_cannot_be_are_refused_and_change_nothing() -> None:
    good = [None, *("a", "ä" * MAX_TENANT, "with spaces", "")]
    bad = ["a@b", "a/b", "a\\b", "a\0", "a\n", "\x7f", "x" * (MAX_TENANT + 1), "\ud800"]
    store = ChunkStore(10 * UNIT)
    for tenant, nbytes in itertools.product(good, (0, 1, 1 << 70)):
        store.set_quota(tenant, nbytes)
    before = store.quotas()
    for tenant in bad:
        with pytest.raises(ConfigError, match="tenant of at most"):
            store.set_quota(tenant, 1)
        with pytest.raises(ConfigError, match="tenant of at most"):
            Quotas({tenant: 1})
    for tenant, nbytes in itertools.product(good, (-1, 1.5, True, "1")):
        with pytest.raises(ConfigError, match="expected >= 0 bytes"):
            store.set_quota(tenant, nbytes)
    assert store.quotas() == before


@given(
    st.dictionaries(st.sampled_from(["", "a", "b"]), st.integers(0, 9)),
    st.none() | st.integers(0, 9),
)
def test_a_quota_is_the_tenants_own_or_the_default(named, default) -> None:
    quotas = Quotas(named, default)
    for tenant in ("", "a", "b", "c"):
        assert quotas.of(tenant) == named.get(tenant, default if tenant else None)
        assert quotas.changed(tenant, 5).of(tenant) == 5
        assert quotas.changed(tenant, None).of(tenant) == (default if tenant else None)
        assert quotas.changed(None, 7).of("c") == 7


def test_tenants_that_nobody_has_named_are_told_of_together() -> None:
    """A salt may be a secret, and there may be any number of them."""
    cache = Cache(64, {None: 4})
    for number in range(3):
        assert cache.put(f"secret {number}", 2, first=2 * number) == 2
    told = cache.store.named_quotas()
    assert told == {"*": (4 * UNIT, 6 * UNIT)}
    cache.store.set_quota("secret 1", 3 * UNIT)
    told = cache.store.named_quotas()
    assert told == {"secret 1": (3 * UNIT, 2 * UNIT), "*": (4 * UNIT, 4 * UNIT)}
