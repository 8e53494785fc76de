"""Chunks that are kept for a while, whoever uses them or not."""

from __future__ import annotations

import pytest

from lmcache_kernels.errors import CapacityError, ConfigError
from lmcache_kernels.transfer.serving import pins
from lmcache_kernels.transfer.serving.eviction import Eviction
from lmcache_kernels.transfer.serving.ranking import FEW
from lmcache_kernels.transfer.serving.store import ChunkStore

UNIT = 512
SHARD, OTHER = b"s" * 32, b"o" * 32


def digests(count: int, first: int = 0) -> list[bytes]:
    return [(first + n).to_bytes(32, "big") for n in range(count)]


def put(store: ChunkStore, count: int, first: int = 0, shard: bytes = SHARD, tenant="") -> int:
    slots = store.reserve(1, shard, digests(count, first), UNIT, 0, tenant)
    assert not slots.indices or store.commit(1, slots.ticket, 0)
    return len(slots.indices)


def count(store: ChunkStore, wanted: int, first: int = 0, now: float = 0) -> int:
    found = store.lookup("probe", [SHARD], digests(wanted, first), now)
    store.end_session("probe")
    return found


def pinned(store: ChunkStore) -> tuple[int, int]:
    stats = store.stats()
    return stats["pins"], stats["pinned_bytes"] // UNIT


@pytest.fixture
def store() -> ChunkStore:
    made = ChunkStore(20 * UNIT, eviction=Eviction(watermark=0.5, ratio=1.0))
    assert put(made, 8) == 8
    return made


def test_pinned_chunks_survive_pressure_watermark_and_quota(store) -> None:
    assert store.pin("p", [SHARD], digests(9), 100, 0) == 8
    assert put(store, 20, first=100) == 12
    store.make_room()
    store.set_quota("", 0)
    store.make_room()
    assert (count(store, 8), pinned(store)) == (8, (1, 8))
    assert store.stats()["used_bytes"] == 8 * UNIT
    store.unpin("p")
    store.make_room()
    assert (count(store, 8), pinned(store), store.stats()["used_bytes"]) == (0, (0, 0), 0)


def test_each_pin_ends_by_itself_in_its_own_time(store) -> None:
    assert store.pin("long", [SHARD], digests(2), 300, 0) == 2
    assert store.pin("short", [SHARD], digests(5), 10, 0) == 5
    assert store.pin("middle", [SHARD], digests(3), 100, 0) == 3
    for now, left in ((9.9, (3, 5)), (10, (2, 3)), (99, (2, 3)), (100, (1, 2)), (299, (1, 2))):
        store.tick(now)
        assert pinned(store) == left
    store.tick(300)
    assert pinned(store) == (0, 0)
    assert store.stats()["idle"] == 8


def test_a_pin_replaces_the_one_of_its_name_and_only_that(store) -> None:
    assert store.pin("p", [SHARD], digests(4), 10, 0) == 4
    assert store.pin("q", [SHARD], digests(2), 10, 0) == 2
    assert store.pin("p", [SHARD], digests(1), 100, 5) == 1
    assert pinned(store) == (2, 2)
    store.tick(10)
    assert pinned(store) == (1, 1)
    assert store.pin("p", [SHARD], digests(3, first=50), 100, 10) == 0
    assert pinned(store) == (0, 0), "a pin of nothing is none"
    store.tick(200)
    store.unpin("p")
    store.unpin("unknown")
    assert store.stats()["idle"] == 8


def test_all_pins_together_hold_a_part_of_the_capacity(store) -> None:
    """Shared chunks count once; what is beyond is not pinned, and a row of shards never half."""
    assert put(store, 4, shard=OTHER) == 4
    assert store.pin("p", [SHARD], digests(7), 100, 0) == 7
    assert store.pin("q", [SHARD, OTHER], digests(8), 100, 0) == 3
    assert pinned(store) == (2, 10)
    assert store.pin("r", [SHARD], digests(8), 100, 0) == 7
    assert store.pin("p", [SHARD], digests(8), 100, 0) == 7
    store.unpin("q")
    assert store.pin("p", [SHARD], digests(8), 100, 0) == 8
    assert pinned(store) == (2, 8)


@pytest.mark.parametrize(("limit", "kept"), [(0.0, 0), (0.25, 5), (1.0, 8)])
def test_the_part_that_pins_may_hold_is_a_setting(limit, kept) -> None:
    store = ChunkStore(20 * UNIT, pin_limit=limit)
    assert put(store, 8) == 8
    assert store.pin("p", [SHARD], digests(8), 1, 0) == kept


@pytest.mark.parametrize("limit", [-0.1, 1.1, float("nan")])
def test_a_limit_that_cannot_be_is_refused(limit) -> None:
    with pytest.raises(ConfigError, match="pin_limit"):
        ChunkStore(20 * UNIT, pin_limit=limit)


def test_a_clear_takes_pinned_chunks_and_gives_their_slots_back(store) -> None:
    """Nobody can find them any more, so nobody waits for the end of the pin."""
    assert put(store, 2, shard=OTHER) == 2
    assert store.pin("p", [SHARD], digests(8), 100, 0) == 8
    assert store.pin("q", [OTHER, OTHER], digests(2), 100, 0) == 2
    assert store.lookup("r", [SHARD], digests(1), 0) == 1
    assert store.clear([SHARD], 0) == 8
    assert count(store, 8) == 0
    assert pinned(store) == (2, 2)
    assert store.stats()["used_bytes"] == 3 * UNIT, "a lease lasts"
    assert put(store, 8) == 8
    store.unpin("p")
    assert (count(store, 8), pinned(store)) == (8, (1, 2))
    store.end_session("r")
    assert store.clear([], 0) == 10
    assert store.stats()["used_bytes"] == 0


def test_a_damaged_chunk_is_not_kept_and_the_others_are(store) -> None:
    for pin in ("p", "q"):
        assert store.pin(pin, [SHARD], digests(4), 100, 0) == 4
    again = [*digests(4), digests(2)[1]]
    read = store.open_read(1, SHARD, again, 0)
    assert store.close_read(1, read.ticket, [1, 4], 0)
    assert (count(store, 4), pinned(store)) == (1, (2, 3))
    assert store.stats()["used_bytes"] == 7 * UNIT
    store.tick(100)
    assert pinned(store) == (0, 0)
    assert store.stats()["idle"] == 7


def test_pins_are_leases_of_nobody(store) -> None:
    assert store.pin("r", [SHARD], digests(4), 100, 0) == 4
    assert store.lookup("r", [SHARD], digests(4), 0) == 4
    store.end_session("r")
    store.drop_owner(1)
    assert pinned(store) == (1, 4)


def test_pins_without_end_are_refused(store, monkeypatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 3)
    for pin in "abc":
        assert store.pin(pin, [SHARD], digests(1), 100, 0) == 1
    with pytest.raises(CapacityError, match="at most 3"):
        store.pin("d", [SHARD], digests(1), 100, 0)
    assert store.pin("a", [SHARD], digests(2), 100, 0) == 2
    store.unpin("b")
    assert store.pin("d", [SHARD], digests(1), 100, 0) == 1


def test_a_pin_that_is_renewed_for_ever_costs_no_memory(store) -> None:
    for turn in range(10_000):
        assert store.pin("p", [SHARD], digests(4), 1e6, turn) == 4
        assert store.pin(f"p {turn}", [SHARD], digests(4), 5, turn) == 4
    assert len(store._pins._ends._heap) <= 2 * 6 + FEW + 1
    assert pinned(store) == (6, 4)
