"""What a store counts: each end of a store, a load and a lookup once, and nothing that was only begun."""

from __future__ import annotations

import pytest

from lmcache_kernels.transfer.serving.store import TIERS, ChunkStore

SHARD = b"s" * 32
DIGESTS = [bytes([n]) * 32 for n in range(8)]
ASKED = 1000  # bytes for a slot of 1024


class Counted:
    """A store of four slots, and which of its counters have changed."""

    def __init__(self) -> None:
        self.store = ChunkStore(4 * 1024, write_ttl=10, lease_ttl=10, read_ttl=10)
        self._seen = self._counters()

    def changed(self) -> dict[str, int]:
        now = self._counters()
        before, self._seen = self._seen, now
        return {name: count - before[name] for name, count in now.items() if count != before[name]}

    def reserve(self, first: int, last: int, now: float = 0) -> int:
        return self.store.reserve(1, SHARD, DIGESTS[first:last], ASKED, now).ticket

    def fill(self, count: int) -> None:
        assert self.store.commit(1, self.reserve(0, count), 0)
        self.changed()

    def open(self, count: int) -> int:
        return self.store.open_read(1, SHARD, DIGESTS[:count], 0).ticket

    def _counters(self) -> dict[str, int]:
        gauges = ("capacity_bytes", "used_bytes", "resident", "idle", "writing", "writes", "leases")
        return {k: v for k, v in self.store.stats().items() if k not in (*gauges, "reads")}


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_a_store_counts_when_it_can_be_found(counted: Counted) -> None:
    ticket = counted.reserve(0, 3)
    assert counted.changed() == {}
    assert counted.store.commit(1, ticket, 0)
    assert counted.changed() == {"stores": 1, "stored": 3, "stored_bytes": 3 * ASKED}
    assert not counted.store.commit(1, ticket, 0)
    assert counted.changed() == {}


def test_how_a_store_can_fail(counted: Counted) -> None:
    counted.store.abort(1, counted.reserve(0, 1), 0)
    assert counted.changed() == {"stores_aborted": 1, "discarded": 1}
    counted.reserve(0, 2)
    counted.store.drop_owner(1)
    assert counted.changed() == {"stores_dropped": 1, "discarded": 2}
    ticket = counted.reserve(0, 1)
    counted.store.clear([], 0)
    assert not counted.store.commit(1, ticket, 0)
    assert counted.changed() == {"stores_cleared": 1, "discarded": 1}
    ticket = counted.reserve(0, 1)
    assert not counted.store.commit(1, ticket, 10)
    assert counted.changed() == {"stores_expired": 1, "discarded": 1}


def test_a_store_without_room_counts_and_so_does_the_part_that_fits(counted: Counted) -> None:
    ticket = counted.reserve(0, 6)
    assert counted.changed() == {"stores_no_room": 1}
    assert counted.reserve(6, 8) == 0
    assert counted.changed() == {"stores_no_room": 1}
    counted.store.commit(1, ticket, 0)
    assert counted.changed() == {"stores": 1, "stored": 4, "stored_bytes": 4 * ASKED}


def test_what_is_evicted_counts_with_its_bytes(counted: Counted) -> None:
    counted.fill(4)
    counted.reserve(4, 6)
    assert counted.changed() == {"evicted": 2, "evicted_bytes": 2 * ASKED}


def test_a_load_counts_when_it_has_read(counted: Counted) -> None:
    counted.fill(3)
    ticket = counted.open(3)
    assert counted.changed() == {}
    assert counted.store.close_read(1, ticket, [], 0)
    assert counted.changed() == {"loads": 1, "loaded": 3, "loaded_bytes": 3 * ASKED}


def test_how_a_load_can_fail(counted: Counted) -> None:
    counted.fill(4)
    counted.store.close_read(1, counted.open(4), [], 0, failed=True)
    assert counted.changed() == {"loads_failed": 1}
    counted.open(2)
    counted.store.drop_owner(1)
    assert counted.changed() == {"loads_dropped": 1}
    counted.store.close_read(1, counted.open(4), [2, 3], 0)
    damaged = {"loads_damaged": 1, "loaded": 2, "loaded_bytes": 2 * ASKED, "damaged": 2}
    assert counted.changed() == damaged
    ticket = counted.open(4)
    assert counted.changed() == {"loads_missing": 1}
    assert not counted.store.close_read(1, ticket, [], 10)
    assert counted.changed() == {"loads_expired": 1}


def test_what_lookups_find_in_the_arena(counted: Counted) -> None:
    counted.fill(2)
    for count, hit in ((5, 2), (1, 1)):
        assert counted.store.lookup("r", [SHARD, SHARD], DIGESTS[:count], 0) == hit
        assert counted.changed() == {"asked": count, "hit": hit}


@pytest.mark.parametrize(
    ("asked", "found", "kind"),
    [(3, 3, "full"), (3, 1, "partial"), (3, 0, None), (0, 0, "empty")],
)
def test_lookups_by_what_was_answered(counted: Counted, asked, found, kind) -> None:
    counted.store.counters.answered(asked, found)
    expected = {"lookups": 1} | ({f"lookups_{kind}": 1} if kind else {})
    assert counted.changed() == expected


def test_what_tiers_do_is_no_store_and_no_load_of_a_worker(counted: Counted) -> None:
    counted.fill(2)
    store = counted.store
    got = store.reserve(TIERS, SHARD, DIGESTS[2:4], ASKED, 0)
    assert store.commit(TIERS, got.ticket, 0, without=[1])
    store.hold(TIERS - 1, [(SHARD, digest) for digest in DIGESTS[:3]], 0)
    assert len(store.reserve(TIERS, SHARD, DIGESTS[3:], ASKED, 0).indices) == 1
    store.tick(10)
    assert counted.changed() == {}
    assert store.stats()["resident"] == 3
