"""The chunk store: two state machines and the situations that matter most, one by one."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_kernels.errors import ConfigError, LocalProtocolError
from lmcache_kernels.transfer.serving.eviction import POLICIES, Eviction
from lmcache_kernels.transfer.serving.store import ChunkStore
from lmcache_kernels.transfer.serving.tickets import NO_TICKET, Reading

SHARD, OTHER = b"s" * 32, b"o" * 32
DIGESTS = [bytes([i]) * 32 for i in range(8)]
UNIT = 512
OWNERS = st.sampled_from([1, 2])
SHARDS = st.sampled_from([SHARD, OTHER])
REQUESTS = st.sampled_from(["r1", "r2", "r3"])
CHOICES = st.lists(st.sampled_from(DIGESTS), max_size=6)
ASKED = st.sampled_from([[SHARD], [OTHER], [SHARD, OTHER]])
CLEARED = st.sampled_from([[], [SHARD], [OTHER], [SHARD, OTHER]])
PREFIXES = st.integers(0, len(DIGESTS)).map(lambda n: DIGESTS[:n])
TENANTS = st.sampled_from(["", "a", "b"])
PINS = st.sampled_from(["p1", "p2"])


@dataclass(eq=False)
class Entry:
    key: tuple[bytes, bytes]
    tenant: str = ""
    resident: bool = False
    released: int = 0


@dataclass
class Model:
    """Exact for slots of one size: everything is found by scanning."""

    slots: int
    listed: dict[tuple[bytes, bytes], Entry] = field(default_factory=dict)
    unlisted: list[Entry] = field(default_factory=list)
    leases: dict[str, tuple[float, list[Entry]]] = field(default_factory=dict)
    writes: dict[int, tuple[int, float, list[Entry]]] = field(default_factory=dict)
    reads: dict[int, tuple[int, float, list[Entry]]] = field(default_factory=dict)
    pins: dict[str, tuple[float, list[Entry]]] = field(default_factory=dict)
    quotas: dict[str | None, int] = field(default_factory=dict)
    tenants: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    clock: itertools.count = field(default_factory=itertools.count)

    def held(self, entry: Entry) -> bool:
        users = (*self.leases.values(), *self.reads.values(), *self.pins.values())
        return any(entry is other for *_, entries in users for other in entries)

    def written(self, entry: Entry) -> bool:
        return any(entry is other for *_, entries in self.writes.values() for other in entries)

    def idle(self) -> list[Entry]:
        return [e for e in self.listed.values() if e.resident and not self.held(e)]

    def slots_of(self, tenant: str | None = None) -> int:
        """Taken, by one tenant or all."""
        gone = [e for e in self.unlisted if self.held(e) or self.written(e)]
        return sum(tenant in (None, entry.tenant) for entry in (*self.listed.values(), *gone))

    def quota(self, tenant: str) -> float:
        default = self.quotas.get(None, math.inf) if tenant else math.inf
        return self.quotas.get(tenant, default)

    def pool(self, tenant: str) -> str:
        return "" if self.quota(tenant) == math.inf else tenant

    def unlist(self, entry: Entry) -> None:
        if self.listed.get(entry.key) is entry:
            del self.listed[entry.key]
            self.unlisted.append(entry)
        for _, entries in self.pins.values():
            entries[:] = [other for other in entries if other is not entry]

    def released(self, entries: list[Entry]) -> None:
        for entry in reversed(entries):
            entry.released = next(self.clock)

    def expire(self, now: float) -> None:
        late = [request for request, (deadline, _) in self.leases.items() if deadline <= now]
        for entries in [self.leases.pop(request)[1] for request in late]:
            self.released([e for e in entries if not self.held(e)])
        for ticket, (_, deadline, _) in list(self.reads.items()):
            if deadline <= now:
                self.end_read(ticket)
        for ticket, (_, deadline, _) in list(self.writes.items()):
            if deadline <= now:
                self.discard(ticket)
        for pin, (deadline, _) in sorted(self.pins.items(), key=lambda pin: pin[1][0]):
            if deadline <= now:
                self.unpin(pin)

    def end_read(self, ticket: int) -> None:
        entries = self.reads.pop(ticket)[2]
        self.released([e for e in entries if not self.held(e)])

    def unpin(self, pin: str) -> None:
        _, entries = self.pins.pop(pin, (0, []))
        self.released([e for e in entries if not self.held(e)])

    def discard(self, ticket: int) -> None:
        for entry in self.writes.pop(ticket)[2]:
            if self.listed.get(entry.key) is entry:
                del self.listed[entry.key]

    def resident(self, key: tuple[bytes, bytes]) -> Entry | None:
        entry = self.listed.get(key)
        return entry if entry and entry.resident else None

    def find(self, shards: list[bytes], digests: list[bytes], windows: list[int]) -> list[Entry]:
        """What is needed of the longest hit: every length is tried."""
        for count in range(len(digests), -1, -1):
            needs = [
                (shard, digests[index])
                for index in range(count)
                for shard, window in zip(shards, windows, strict=True)
                if not window or index >= count - window
            ]
            if all(self.resident(key) for key in needs):
                self.hit = count
                return [self.listed[key] for key in needs]
        raise AssertionError("the empty hit always fits")

    def reserve(
        self, keys: list[tuple[bytes, bytes]], tenant: str
    ) -> tuple[list[int], list[Entry]]:
        present = [e for key in keys if (e := self.resident(key))]
        indices, staged = [], []
        for index, key in enumerate(keys):
            if key in self.listed:
                continue
            if not self.make_room(tenant, present):
                break
            if not self.slots_of(tenant):
                self.tenants.pop(tenant, None)
            self.tenants[tenant] = None
            self.listed[key] = Entry(key, tenant)
            staged.append(self.listed[key])
            indices.append(index)
        self.released([e for e in present if not self.held(e)])
        return indices, staged

    def make_room(self, tenant: str, spared: list[Entry]) -> bool:
        """One slot within the quota of the tenant and within all there are."""
        while (room := self.quota(tenant) - self.slots_of(tenant)) < 1:
            own = [e for e in self.idle() if e.tenant == tenant and e not in spared]
            if room + len(own) < 1:
                return False
            self.evict(own)
        if self.slots_of() == self.slots:
            pools: dict[str, list[Entry]] = {}
            for entry in [e for e in self.idle() if e not in spared]:
                pools.setdefault(self.pool(entry.tenant), []).append(entry)
            if not pools:
                return False
            self.evict(min(pools.items(), key=lambda pool: (-len(pool[1]), pool[0]))[1])
        return True

    def evict(self, among: list[Entry]) -> None:
        del self.listed[min(among, key=lambda e: e.released).key]

    def set_quota(self, tenant: str | None, slots: int | None) -> None:
        before = {name: self.pool(name) for name in self.tenants}
        self.quotas.pop(tenant, None)
        if slots is not None:
            self.quotas[tenant] = slots
        for name in [name for name in self.tenants if self.slots_of(name)]:
            if self.pool(name) != before[name]:  # the order in its new pool is as it was
                idle = [e for e in self.idle() if e.tenant == name]
                self.released(sorted(idle, key=lambda e: -e.released))

    def trim(self) -> None:
        for tenant in self.tenants:
            idle = [e for e in self.idle() if e.tenant == tenant]
            above = self.slots_of(tenant) - self.quota(tenant)
            for entry in sorted(idle, key=lambda e: e.released)[: max(0, min(len(idle), above))]:
                self.evict([entry])


class ExactMachine(RuleBasedStateMachine):
    """Every answer equals the model's; slots of one size, time jumps, two owners, three tenants."""

    SLOTS = 6
    PINNED = 3

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = ChunkStore(
            self.SLOTS * UNIT,
            write_ttl=10,
            lease_ttl=10,
            read_ttl=5,
            pin_limit=self.PINNED / self.SLOTS,
        )
        self.model = Model(self.SLOTS)

    @rule(
        owner=OWNERS,
        shard=SHARDS,
        digests=st.one_of(CHOICES, PREFIXES),
        tenant=TENANTS,
        publish=st.booleans(),
    )
    def reserve(self, owner, shard, digests, tenant, publish) -> None:
        got = self.store.reserve(owner, shard, digests, UNIT, self.now, tenant)
        indices, staged = self.model.reserve([(shard, d) for d in digests], tenant)
        assert got.indices == indices
        assert len(set(got.offsets)) == len(indices)
        assert (got.ticket == NO_TICKET) == (not indices)
        if indices:
            self.model.writes[got.ticket] = (owner, self.now + 10, staged)
        if publish:
            self.finish(owner, got.ticket, publish)

    @rule(owner=OWNERS, data=st.data(), publish=st.booleans())
    def end_write(self, owner, data, publish) -> None:
        self.finish(owner, data.draw(st.sampled_from([0, 10**6, *self.model.writes])), publish)

    def finish(self, owner, ticket, publish) -> None:
        known = ticket in self.model.writes and self.model.writes[ticket][0] == owner
        if not publish:
            assert self.store.abort(owner, ticket, self.now) is known
            if known:
                self.model.discard(ticket)
            return
        entries = self.model.writes.pop(ticket)[2] if known else []
        published = [e for e in entries if self.model.listed.get(e.key) is e]
        assert self.store.commit(owner, ticket, self.now) is bool(published)
        for entry in published:
            entry.resident = True
        self.model.released(published)

    @rule(
        request=REQUESTS,
        shards=ASKED,
        d=st.one_of(PREFIXES, CHOICES),
        windows=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def lookup(self, request, shards, d, windows) -> None:
        windows = [] if windows is None else list(windows[: len(shards)])
        found = self.model.find(shards, d, windows or [0] * len(shards))
        assert self.store.lookup(request, shards, d, self.now, windows) == self.model.hit
        _, previous = self.model.leases.pop(request, (0, []))
        if found:
            self.model.leases[request] = (self.now + 10, found)
        self.model.released([e for e in previous if not self.model.held(e)])

    @rule(pin=PINS, shards=ASKED, d=PREFIXES, seconds=st.sampled_from([1, 5, 50]))
    def pin(self, pin, shards, d, seconds) -> None:
        self.model.unpin(pin)
        found = iter(self.model.find(shards, d, [0] * len(shards)))
        pinned = {id(e) for _, entries in self.model.pins.values() for e in entries}
        kept: list[Entry] = []
        while row := list(itertools.islice(found, len(shards))):
            pinned |= {id(entry) for entry in row}
            if len(pinned) > self.PINNED:
                break
            kept += row
        assert self.store.pin(pin, shards, d, seconds, self.now) == len(kept) // len(shards)
        if kept:
            self.model.pins[pin] = (self.now + seconds, kept)

    @rule(pin=PINS)
    def unpin(self, pin) -> None:
        self.store.unpin(pin)
        self.model.unpin(pin)

    @rule(
        tenant=st.sampled_from(["a", "b", None]),
        slots=st.none() | st.integers(0, SLOTS),
        now=st.booleans(),
    )
    def set_quota(self, tenant, slots, now) -> None:
        self.store.set_quota(tenant, None if slots is None else slots * UNIT)
        self.model.set_quota(tenant, slots)
        if now:
            self.store.make_room()
            self.model.trim()

    @rule(request=REQUESTS)
    def end_session(self, request) -> None:
        self.store.end_session(request)
        _, entries = self.model.leases.pop(request, (0, []))
        self.model.released([e for e in entries if not self.model.held(e)])

    @rule(owner=OWNERS, shard=SHARDS, digests=st.one_of(CHOICES, PREFIXES))
    def open_read(self, owner, shard, digests) -> None:
        entries = [self.model.resident((shard, d)) for d in digests]
        entries = list(itertools.takewhile(lambda e: e is not None, entries))
        got = self.store.open_read(owner, shard, digests, self.now)
        assert len(got.offsets) == len(entries)
        assert (got.ticket == NO_TICKET) == (not entries)
        if entries:
            self.model.reads[got.ticket] = (owner, self.now + 5, entries)

    @rule(owner=OWNERS, data=st.data())
    def close_read(self, owner, data) -> None:
        ticket = data.draw(st.sampled_from([0, 10**6, *self.model.reads]))
        if ticket not in self.model.reads or self.model.reads[ticket][0] != owner:
            assert self.store.close_read(owner, ticket, [], self.now) is False
            return
        count = len(self.model.reads[ticket][2])
        with pytest.raises(LocalProtocolError, match="damaged"):
            self.store.close_read(owner, ticket, [count], self.now)
        damaged = data.draw(st.lists(st.integers(0, count - 1), max_size=2))
        assert self.store.close_read(owner, ticket, damaged, self.now) is True
        for index in damaged:
            self.model.unlist(self.model.reads[ticket][2][index])
        self.model.end_read(ticket)

    @rule(owner=OWNERS)
    def drop_owner(self, owner) -> None:
        self.store.drop_owner(owner)
        for ticket in [t for t, w in self.model.writes.items() if w[0] == owner]:
            self.model.discard(ticket)
        for ticket in [t for t, r in self.model.reads.items() if r[0] == owner]:
            self.model.end_read(ticket)

    @rule(shards=CLEARED)
    def clear(self, shards) -> None:
        listed = [e for e in self.model.listed.values() if not shards or e.key[0] in shards]
        assert self.store.clear(shards, self.now) == sum(e.resident for e in listed)
        for entry in listed:
            self.model.unlist(entry)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 10.0, 1e6]))
    def time_passes(self, seconds) -> None:
        self.now += seconds
        self.model.expire(self.now)
        self.store.tick(self.now)

    @invariant()
    def numbers_agree(self) -> None:
        stats = self.store.stats()
        assert stats["used_bytes"] == self.model.slots_of() * UNIT
        assert stats["resident"] == sum(e.resident for e in self.model.listed.values())
        assert stats["idle"] == len(self.model.idle())
        assert stats["writing"] == sum(len(entries) for *_, entries in self.model.writes.values())
        assert stats["leases"] == len(self.model.leases)
        assert stats["reads"] == len(self.model.reads)
        assert stats["pins"] == len(self.model.pins)
        pinned = {id(e) for _, entries in self.model.pins.values() for e in entries}
        assert stats["pinned_bytes"] == len(pinned) * UNIT
        named = {name for name in self.model.quotas if name is not None}
        limited = {t for t in "ab" if t in named or self.model.quota(t) < math.inf}
        assert self.store.quotas() == {
            tenant: (self.model.quota(tenant) * UNIT, self.model.slots_of(tenant) * UNIT)
            for tenant in limited
            if tenant in named or self.model.slots_of(tenant)
        }


TestExactMachine = ExactMachine.TestCase
TestExactMachine.settings = settings(stateful_step_count=50)


class MemoryMachine(RuleBasedStateMachine):
    """Slots of several sizes over pretended memory: what is found was committed and is still there."""

    CAPACITY = 16 * UNIT

    @initialize(
        units=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        policy=st.sampled_from(sorted(POLICIES)),
        watermark=st.sampled_from([0.5, 1.0]),
    )
    def start(self, units, policy, watermark) -> None:
        self.now, self.watermark = 0.0, watermark
        self.store = ChunkStore(
            self.CAPACITY,
            write_ttl=10,
            lease_ttl=10,
            read_ttl=10,
            eviction=Eviction(policy, watermark, ratio=0.25),
        )
        self.size = {SHARD: units[0] * UNIT - 7, OTHER: units[1] * UNIT}
        self.memory: dict[int, tuple[bytes, bytes]] = {}  # offset -> whose committed bytes
        self.writes: dict[int, tuple[int, float, list]] = {}
        self.doomed: set[int] = set()  # tickets whose chunks were cleared meanwhile
        self.reads: dict[int, tuple[int, float, list]] = {}
        self.leases: dict[str, tuple[float, list]] = {}
        self.pins: dict[str, tuple[float, list]] = {}

    def kept(self) -> set:
        """Keys that are leased or pinned."""
        return {key for _, keys in (*self.leases.values(), *self.pins.values()) for key in keys}

    def unlisted(self, gone) -> None:
        """Nobody finds these any more."""
        for _, keys in (*self.leases.values(), *self.pins.values()):
            keys[:] = [key for key in keys if not gone(key)]

    def span(self, offset, key):
        return offset, offset + self.size[key[0]]

    def guarded(self) -> list[tuple[int, int]]:
        pairs = [p for *_, p in (*self.writes.values(), *self.reads.values())]
        return [self.span(offset, key) for items in pairs for offset, key in items]

    @rule(owner=OWNERS, shard=SHARDS, digests=st.one_of(CHOICES, PREFIXES), tenant=TENANTS)
    def reserve(self, owner, shard, digests, tenant) -> None:
        before = self.store.quotas().get(tenant)
        got = self.store.reserve(owner, shard, digests, self.size[shard], self.now, tenant)
        after = self.store.quotas().get(tenant)
        if after is not None:
            assert after.used_bytes <= max(after.quota_bytes, before.used_bytes if before else 0)
        assert got.indices == sorted(set(got.indices))
        pairs = [(o, (shard, digests[i])) for i, o in zip(got.indices, got.offsets, strict=True)]
        leased = self.kept()
        for offset, key in pairs:
            low, high = self.span(offset, key)
            assert low >= 0
            assert high <= self.CAPACITY
            assert all(high <= a or b <= low for a, b in self.guarded())
            assert key not in leased
            for other in [
                o for o, k in self.memory.items() if low < self.span(o, k)[1] and o < high
            ]:
                assert self.memory.pop(other) not in leased
        spans = sorted(self.span(*pair) for pair in pairs)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        if pairs:
            self.writes[got.ticket] = (owner, self.now + 10, pairs)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), publish=st.booleans())
    def end_write(self, data, publish) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.writes)))
        owner, _, pairs = self.writes.pop(ticket)
        if not publish:
            assert self.store.abort(owner, ticket, self.now)
        elif self.store.commit(owner, ticket, self.now):
            assert ticket not in self.doomed
            new = {key for _, key in pairs}
            self.memory = {o: k for o, k in self.memory.items() if k not in new} | dict(pairs)
        else:
            assert ticket in self.doomed

    @rule(request=REQUESTS, shards=st.sampled_from([[SHARD], [OTHER, SHARD]]), digests=PREFIXES)
    def lookup(self, request, shards, digests) -> None:
        count = self.store.lookup(request, shards, digests, self.now)
        keys = [(shard, digest) for digest in digests[:count] for shard in shards]
        assert set(keys) <= set(self.memory.values())
        self.leases[request] = (self.now + 10, keys)

    @rule(request=REQUESTS)
    def end_session(self, request) -> None:
        self.store.end_session(request)
        self.leases.pop(request, None)

    @rule(pin=PINS, shards=ASKED, digests=PREFIXES, end=st.booleans())
    def pin(self, pin, shards, digests, end) -> None:
        count = self.store.pin(pin, shards, digests, 5, self.now)
        keys = [(shard, digest) for digest in digests[:count] for shard in shards]
        assert set(keys) <= set(self.memory.values())
        self.pins[pin] = (self.now + 5, keys)
        assert self.store.stats()["pinned_bytes"] <= self.CAPACITY / 2
        if end:
            self.store.unpin(pin)
            del self.pins[pin]

    @rule(
        tenant=st.sampled_from(["", "a", "b", None]),
        units=st.none() | st.integers(0, 16),
    )
    def set_quota(self, tenant, units) -> None:
        self.store.set_quota(tenant, None if units is None else units * UNIT)

    @rule(owner=OWNERS, shard=SHARDS, digests=PREFIXES)
    def open_read(self, owner, shard, digests) -> None:
        got = self.store.open_read(owner, shard, digests, self.now)
        pairs = [(o, (shard, d)) for o, d in zip(got.offsets, digests, strict=False)]
        for offset, key in pairs:
            assert self.memory.get(offset) == key
        leased = self.kept()
        held = list(itertools.takewhile(lambda d: (shard, d) in leased, digests))
        assert len(got.offsets) >= len(held)
        if pairs:
            self.reads[got.ticket] = (owner, self.now + 10, pairs)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def close_read(self, data) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.reads)))
        owner, _, pairs = self.reads.pop(ticket)
        damaged = data.draw(st.sets(st.integers(0, len(pairs) - 1), max_size=1))
        assert self.store.close_read(owner, ticket, damaged, self.now)
        for offset, key in (pairs[i] for i in damaged):
            if self.memory.get(offset) == key:
                del self.memory[offset]
            if key not in self.memory.values():
                self.unlisted(lambda other, key=key: other == key)

    @rule(owner=OWNERS)
    def drop_owner(self, owner) -> None:
        self.store.drop_owner(owner)
        self.writes = {t: w for t, w in self.writes.items() if w[0] != owner}
        self.reads = {t: r for t, r in self.reads.items() if r[0] != owner}

    @rule(shards=CLEARED)
    def clear(self, shards) -> None:
        self.store.clear(shards, self.now)
        gone = shards or [SHARD, OTHER]
        self.memory = {o: key for o, key in self.memory.items() if key[0] not in gone}
        self.unlisted(lambda key: key[0] in gone)
        self.doomed |= {t for t, (*_, pairs) in self.writes.items() if pairs[0][1][0] in gone}

    @rule()
    def make_room(self) -> None:
        before, quotas = self.store.stats(), self.store.quotas().values()
        self.store.make_room()
        after = self.store.stats()
        freed = before["used_bytes"] - after["used_bytes"]
        above = sum(max(0, used - quota) for quota, used in quotas)
        due = self.watermark < 1 and before["used_bytes"] >= self.watermark * self.CAPACITY
        assert due or above or not freed
        assert not due or above or freed >= self.CAPACITY // 4 or not after["idle"]
        if above and not self.kept() and not self.guarded():
            assert all(used <= quota for quota, used in self.store.quotas().values())

    @rule(seconds=st.sampled_from([0.0, 3.0, 10.0, 1e6]))
    def time_passes(self, seconds) -> None:
        self.now += seconds
        late = {t: w for t, w in self.writes.items() if w[1] <= self.now}
        for ticket, (owner, _, _) in late.items():
            assert not self.store.commit(owner, ticket, self.now)
            del self.writes[ticket]
        late_reads = {t: r for t, r in self.reads.items() if r[1] <= self.now}
        for ticket, (owner, *_) in late_reads.items():
            assert not self.store.close_read(owner, ticket, [0], self.now)
            del self.reads[ticket]
        self.leases = {r: lease for r, lease in self.leases.items() if lease[0] > self.now}
        self.pins = {p: pin for p, pin in self.pins.items() if pin[0] > self.now}


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(stateful_step_count=50)


# --- one by one -----------------------------------------------------------------------------------


def filled(count: int, slots: int | None = None, **options: float) -> ChunkStore:
    """A store of ``slots`` slots with the first ``count`` digests committed."""
    store = ChunkStore((slots or count) * UNIT, **options)
    put(store, DIGESTS[:count])
    return store


def put(store: ChunkStore, digests: list[bytes], shard: bytes = SHARD, now: float = 0.0) -> int:
    slots = store.reserve(1, shard, digests, UNIT, now)
    assert not slots.indices or store.commit(1, slots.ticket, now)
    return len(slots.indices)


def present(store: ChunkStore, digests: list[bytes], now: float = 0.0) -> int:
    count = store.lookup("probe", [SHARD], digests, now)
    store.end_session("probe")
    return count


def test_a_chunk_is_invisible_until_committed() -> None:
    store = ChunkStore(4 * UNIT)
    slots = store.reserve(1, SHARD, DIGESTS[:2], UNIT, 0)
    assert present(store, DIGESTS[:2]) == 0
    assert store.open_read(1, SHARD, DIGESTS[:2], 0).offsets == []
    assert store.commit(1, slots.ticket, 0)
    assert present(store, DIGESTS[:2]) == 2


def test_mp_097_two_writers_of_the_same_chunks_make_one_copy() -> None:
    store = ChunkStore(8 * UNIT)
    first = store.reserve(1, SHARD, DIGESTS[:4], UNIT, 0)
    second = store.reserve(2, SHARD, DIGESTS[:4], UNIT, 0)
    assert (second.ticket, second.indices) == (NO_TICKET, [])
    assert store.commit(1, first.ticket, 0)
    assert store.reserve(2, SHARD, DIGESTS[:4], UNIT, 0).indices == []
    assert store.stats()["used_bytes"] == 4 * UNIT


def test_the_same_digest_twice_in_a_call_gets_one_slot() -> None:
    store = ChunkStore(8 * UNIT)
    assert store.reserve(1, SHARD, [DIGESTS[0]] * 3, UNIT, 0).indices == [0]


def test_mp_d33_fault_d05_a_dropped_writer_publishes_nothing() -> None:
    store = ChunkStore(4 * UNIT)
    slots = store.reserve(1, SHARD, DIGESTS[:2], UNIT, 0)
    store.drop_owner(1)
    assert present(store, DIGESTS[:2]) == 0
    assert not store.commit(1, slots.ticket, 0)
    assert present(store, DIGESTS[:2]) == 0
    assert store.stats()["used_bytes"] == 0
    assert store.counters.discarded == 2


def test_an_expired_writer_is_taken_over_and_cannot_publish() -> None:
    store = ChunkStore(4 * UNIT, write_ttl=600)
    late = store.reserve(1, SHARD, DIGESTS[:2], UNIT, 0)
    assert store.reserve(2, SHARD, DIGESTS[:2], UNIT, 599.9).indices == []
    fresh = store.reserve(2, SHARD, DIGESTS[:2], UNIT, 600)
    assert fresh.indices == [0, 1]
    assert not store.commit(1, late.ticket, 600)
    assert present(store, DIGESTS[:2], 600) == 0
    assert store.commit(2, fresh.ticket, 601)
    assert present(store, DIGESTS[:2], 601) == 2


def test_a_ticket_is_its_owners() -> None:
    store = filled(2, 4)
    write = store.reserve(1, SHARD, DIGESTS[2:4], UNIT, 0)
    assert not store.commit(2, write.ticket, 0)
    assert not store.abort(2, write.ticket, 0)
    assert store.commit(1, write.ticket, 0)
    assert not store.commit(1, write.ticket, 0)
    read = store.open_read(1, SHARD, DIGESTS[:1], 0)
    assert not store.close_read(2, read.ticket, [0], 0)
    assert store.close_read(1, read.ticket, [], 0)
    assert not store.close_read(1, read.ticket, [0], 0)
    assert present(store, DIGESTS[:4]) == 4


def test_a_full_idle_store_makes_room_on_demand() -> None:
    store = filled(8)
    new = [bytes([100 + i]) * 32 for i in range(4)]
    assert put(store, new) == 4
    assert present(store, new) == 4
    assert present(store, DIGESTS) == 4, "the end of the old prefix goes first"
    assert store.stats()["evicted"] == 4


def test_mp_095_only_leased_chunks_left_is_answered_with_how_many_fit() -> None:
    store = filled(6, 8)
    assert store.lookup("r", [SHARD], DIGESTS[:6], 0) == 6
    new = [bytes([100 + i]) * 32 for i in range(4)]
    assert store.reserve(1, SHARD, new, UNIT, 0).indices == [0, 1]
    assert store.reserve(1, SHARD, new, UNIT, 0).indices == []
    assert present(store, DIGESTS[:6]) == 6


def test_the_tail_of_a_prefix_never_evicts_its_head() -> None:
    store = filled(4)
    assert put(store, DIGESTS[:6]) == 0
    assert present(store, DIGESTS[:6]) == 4


def test_mp_084_lookup_stops_where_any_shard_lacks_a_chunk() -> None:
    store = ChunkStore(16 * UNIT)
    put(store, DIGESTS[:4])
    put(store, [DIGESTS[0], DIGESTS[2]], OTHER)
    assert store.lookup("r", [SHARD, OTHER], DIGESTS[:4], 0) == 1
    assert store.stats()["idle"] == 4, "only what was reported is leased"
    with pytest.raises(LocalProtocolError, match="at least one shard"):
        store.lookup("r", [], DIGESTS, 0)


def test_mp_089_d35_ending_a_session_twice_leaves_the_leases_of_others() -> None:
    store = filled(2)
    store.lookup("a", [SHARD], DIGESTS[:2], 0)
    store.lookup("b", [SHARD], DIGESTS[:2], 0)
    for _ in range(3):
        store.end_session("a")
    assert put(store, DIGESTS[4:6]) == 0
    store.end_session("b")
    assert put(store, DIGESTS[4:6]) == 2


def test_mp_d37_fault_d04_a_second_lookup_replaces_the_first_and_renews_the_lease() -> None:
    store = filled(3, lease_ttl=300)
    store.lookup("a", [SHARD], DIGESTS[:3], 0)
    store.lookup("a", [SHARD], DIGESTS[:1], 200)
    assert store.stats()["idle"] == 2
    store.tick(499)
    assert store.stats()["leases"] == 1
    store.tick(500)
    assert store.stats() | {"leases": 0, "idle": 3} == store.stats()


def test_prefixes_in_use_outlive_those_that_are_not() -> None:
    store = ChunkStore(4 * UNIT)
    put(store, DIGESTS[:2])
    put(store, DIGESTS[4:6])
    assert present(store, DIGESTS[:2]) == 2
    assert put(store, [DIGESTS[7]]) == 1
    assert present(store, DIGESTS[:2]) == 2
    assert present(store, DIGESTS[4:6]) == 1


def test_damaged_chunks_vanish_at_once_and_free_their_slot_with_the_last_reader() -> None:
    store = filled(2)
    first = store.open_read(1, SHARD, DIGESTS[:2], 0)
    second = store.open_read(2, SHARD, DIGESTS[:2], 0)
    assert store.close_read(1, first.ticket, [0, 0], 0)
    assert present(store, DIGESTS[:2]) == 0
    assert put(store, DIGESTS[:1]) == 0, "somebody still reads the slot"
    assert store.close_read(2, second.ticket, [0], 0)
    assert put(store, DIGESTS[:1]) == 1
    assert present(store, DIGESTS[:2]) == 2
    assert store.counters.damaged == 1


def test_a_chunk_stored_anew_is_not_hurt_by_a_report_on_its_predecessor() -> None:
    store = filled(1, 2)
    first = store.open_read(1, SHARD, DIGESTS[:1], 0)
    second = store.open_read(2, SHARD, DIGESTS[:1], 0)
    store.close_read(1, first.ticket, [0], 0)
    assert put(store, DIGESTS[:1]) == 1
    store.close_read(2, second.ticket, [0], 0)
    assert present(store, DIGESTS[:1]) == 1
    assert store.stats()["used_bytes"] == UNIT


def test_nothing_old_is_found_after_a_clear() -> None:
    """Idle, leased, read and half-written chunks alike; slots in use stay whole until let go."""
    store = filled(4, 8)
    assert store.lookup("r", [SHARD], DIGESTS[:1], 0) == 1
    read = store.open_read(1, SHARD, DIGESTS[1:2], 0)
    write = store.reserve(1, SHARD, DIGESTS[4:6], UNIT, 0)
    assert store.clear([], 0) == 4, "what was being written was not found before either"
    assert all(present(store, [digest]) == 0 for digest in DIGESTS)
    assert store.open_read(1, SHARD, DIGESTS[:1], 0) == Reading(NO_TICKET, [])
    assert store.stats()["used_bytes"] == 4 * UNIT
    assert not store.commit(1, write.ticket, 0)
    assert store.close_read(1, read.ticket, [0], 0)
    assert store.lookup("r", [SHARD], DIGESTS[:1], 0) == 0
    assert all(present(store, [digest]) == 0 for digest in DIGESTS)
    assert store.stats()["used_bytes"] == 0
    counters = store.counters
    assert (counters.cleared, counters.stored, counters.discarded) == (4, 4, 2)
    assert counters.damaged == 0, "it was cleared before it was reported"
    assert store.clear([], 0) == 0


@pytest.mark.parametrize("ending", ["commit", "abort", "drop", "expire"])
def test_a_cleared_chunk_is_written_anew_beside_its_old_writer(ending: str) -> None:
    """The old writer may still be at it: its slot is nobody else's, and its end hurts nobody."""
    store = ChunkStore(3 * UNIT, write_ttl=600)
    old = store.reserve(1, SHARD, DIGESTS[:2], UNIT, 0)
    assert store.clear([SHARD], 0) == 0
    new = store.reserve(2, SHARD, DIGESTS[:2], UNIT, 500)
    assert new.indices == [0], "two of three slots are still written into"
    assert not {*new.offsets} & {*old.offsets}
    assert store.commit(2, new.ticket, 500)
    if ending == "commit":
        assert not store.commit(1, old.ticket, 500)
    elif ending == "abort":
        assert store.abort(1, old.ticket, 500)
    elif ending == "drop":
        store.drop_owner(1)
    else:
        store.tick(600)
    assert present(store, DIGESTS[:2], 600) == 1
    assert store.stats() | {"used_bytes": UNIT, "discarded": 2, "writing": 0} == store.stats()
    assert put(store, DIGESTS[1:3], now=600) == 2


def test_a_clear_of_one_shard_leaves_the_others() -> None:
    store = filled(2, 8)
    put(store, DIGESTS[:2], OTHER)
    write = store.reserve(1, OTHER, DIGESTS[2:3], UNIT, 0)
    store.lookup("r", [SHARD, OTHER], DIGESTS[:1], 0)
    assert store.clear([SHARD, b"unknown" * 4], 0) == 2
    assert store.commit(1, write.ticket, 0)
    assert store.lookup("r", [OTHER], DIGESTS[:3], 0) == 3
    assert present(store, DIGESTS[:2]) == 0


def test_reads_of_a_dropped_owner_end() -> None:
    store = filled(2)
    read = store.open_read(1, SHARD, DIGESTS[:2], 0)
    assert put(store, DIGESTS[4:6]) == 0
    store.drop_owner(1)
    assert not store.close_read(1, read.ticket, [], 0)
    assert put(store, DIGESTS[4:6]) == 2


def test_a_read_that_nobody_ends_ends_by_itself() -> None:
    """Its slots go to others then, and its late report is about nothing that is still there."""
    store = filled(2, read_ttl=180)
    late = store.open_read(1, SHARD, DIGESTS[:2], 0)
    other = store.open_read(2, SHARD, DIGESTS[:1], 100)
    assert put(store, DIGESTS[4:6], now=179.9) == 0
    assert put(store, DIGESTS[4:6], now=180) == 1, "another still reads the first"
    assert not store.close_read(1, late.ticket, [0], 180)
    assert present(store, DIGESTS[:1], 180) == 1
    assert store.close_read(2, other.ticket, [], 279.9)
    assert store.stats() | {"reads": 0, "idle": 2} == store.stats()


def test_counters() -> None:
    store = filled(3, 4)
    store.lookup("r", [SHARD], DIGESTS[:5], 0)
    read = store.open_read(1, SHARD, DIGESTS[:2], 0)
    store.close_read(1, read.ticket, [1], 0)
    stats = store.stats()
    expected = {"asked": 5, "hit": 3, "stored": 3, "loaded": 1, "damaged": 1}
    assert expected.items() <= stats.items()
    assert (stats["resident"], stats["capacity_bytes"]) == (2, 4 * UNIT)


def test_fits_is_about_the_empty_store() -> None:
    store = filled(2)
    assert store.fits(2 * UNIT)
    assert not store.fits(2 * UNIT + 1)


@pytest.mark.parametrize(
    "options", [{"write_ttl": 0}, {"read_ttl": 0}, {"lease_ttl": -1}, {"lease_ttl": "nan"}]
)
def test_impossible_times_are_refused(options: dict) -> None:
    values = {name: float(value) for name, value in options.items()}
    with pytest.raises(ConfigError, match=next(iter(values))):
        ChunkStore(UNIT, **values)


def test_what_has_gone_keeps_nothing_that_has_gone() -> None:
    """Chunks lead to those behind them; once evicted they must not."""
    store = filled(8)
    present(store, DIGESTS)
    table = store._table
    old = [table.resident((SHARD, digest)) for digest in DIGESTS]
    assert [one.follower for one in old] == [*old[1:], None]
    assert put(store, [bytes([100 + i]) * 32 for i in range(4)]) == 4
    assert [one.follower for one in old[4:]] == [None] * 4
    assert present(store, DIGESTS) == 4
    new = [table.resident((SHARD, digest)) for digest in DIGESTS[:4]]
    assert put(store, DIGESTS[4:6]) == 2, "two others go, and these come back in other slots"
    assert present(store, DIGESTS) == 6
    assert new == old[:4]


def test_prefixes_that_part_are_each_found() -> None:
    store = ChunkStore(16 * UNIT)
    stem, left, right = DIGESTS[:3], DIGESTS[3:5], DIGESTS[5:8]
    put(store, stem + left)
    put(store, stem + right)
    for _ in range(3):
        assert present(store, stem + left) == 5
        assert present(store, stem + right) == 6
        assert present(store, stem + left + right) == 8
        assert present(store, stem + right[::-1]) == 6
        assert present(store, [*stem, b"\xff" * 32]) == 3
