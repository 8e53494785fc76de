"""Lookups of shards that need only the end of a hit."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.transfer.serving.finding import find
from lmcache_kernels.transfer.serving.store import ChunkStore

UNIT = 512
SHARDS = [bytes([ord("a") + n]) * 32 for n in range(4)]
FULL, WINDOWED = SHARDS[:2]


def digests(count: int, first: int = 0) -> list[bytes]:
    return [(first + n).to_bytes(32, "big") for n in range(count)]


def store_of(present: dict[bytes, list[bytes]]) -> ChunkStore:
    store = ChunkStore(max(1, sum(map(len, present.values()))) * UNIT)
    for shard, some in present.items():
        slots = store.reserve(1, shard, some, UNIT, 0)
        assert len(slots.indices) == len(some)
        assert not some or store.commit(1, slots.ticket, 0)
    return store


def held_by(store: ChunkStore) -> set[tuple[bytes, bytes]]:
    return {(one.shard, one.digest) for one in store.chunks(0, 1000) if one.holders}


def test_mp_099_of_a_windowed_group_only_the_end_of_the_hit_is_held_and_read() -> None:
    """A window of 2 chunks and a hit of 5: chunks 3 and 4 of that group, nothing else of it."""
    names = digests(6)
    store = store_of({FULL: names[:5], WINDOWED: names[:5]})
    assert store.lookup("r", [FULL, WINDOWED], names, 0, [0, 2]) == 5
    needed = {(WINDOWED, names[3]), (WINDOWED, names[4])}
    assert held_by(store) == needed | {(FULL, name) for name in names[:5]}
    store.end_session("r")
    reading = store.open_read(1, WINDOWED, names[3:5], 0)
    assert len(reading.offsets) == 2
    assert held_by(store) == needed
    assert store.close_read(1, reading.ticket, [], 0)
    assert held_by(store) == set()


def test_mp_099_what_lies_before_the_window_may_be_gone() -> None:
    names = digests(6)
    store = store_of({FULL: names, WINDOWED: names[3:5]})
    assert store.lookup("r", [FULL, WINDOWED], names, 0, [0, 2]) == 5
    assert store.lookup("r", [FULL, WINDOWED], names, 0, [0, 3]) == 0
    assert store.lookup("r", [FULL, WINDOWED], names, 0) == 0
    assert store.lookup("r", [WINDOWED], names, 0, [1]) == 5
    assert held_by(store) == {(WINDOWED, names[4])}


@given(st.data())
def test_mp_099_the_hit_is_the_longest_that_fits_every_shard(data) -> None:
    """Against trying every length; with windows longer than the hit, and the same shard twice."""
    count = data.draw(st.integers(0, 12))
    names = digests(count)
    needs = data.draw(
        st.lists(
            st.tuples(st.sampled_from(SHARDS), st.integers(0, count + 2)), min_size=1, max_size=5
        )
    )
    mostly = st.lists(st.integers(0, 9).map(bool), min_size=count, max_size=count)
    present = {
        shard: [name for name, there in zip(names, data.draw(mostly), strict=True) if there]
        for shard in SHARDS
    }
    store = store_of(present)

    def needed(hit: int) -> set[tuple[bytes, bytes]]:
        return {
            (shard, names[n])
            for shard, window in needs
            for n in range(max(0, hit - window) if window else 0, hit)
        }

    there = {(shard, name) for shard, some in present.items() for name in some}
    longest = max(hit for hit in range(count + 1) if needed(hit) <= there)
    shards, windows = [s for s, _ in needs], [w for _, w in needs]
    assert store.lookup("r", shards, names, 0, windows) == longest
    assert held_by(store) == needed(longest)
    store.end_session("r")
    assert store.stats()["idle"] == len(there)


class Counting(ChunkStore):
    """Counts the looks at its table."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.looks = 0
        resident = self._table.resident

        def counting(key):
            self.looks += 1
            return resident(key)

        self._table.resident = counting


def test_no_digest_of_a_shard_is_looked_at_twice() -> None:
    """Every other chunk is missing in turn in two shards, which so never agree before the start."""
    count = 200
    names = digests(count)
    store = Counting(3 * count * UNIT)
    for shard, parity in ((SHARDS[0], 0), (SHARDS[1], 1)):
        slots = store.reserve(1, shard, names[parity::2], UNIT, 0)
        assert store.commit(1, slots.ticket, 0)
    store.looks = 0
    assert find(store._table, SHARDS[:2], names, [count, count]).count == 0
    assert store.looks <= 2 * count
    store.looks = 0
    assert find(store._table, SHARDS[:2], names, [1, 1]).count == 0
    assert store.looks <= 2 * count


def test_a_window_costs_as_much_as_it_is_long() -> None:
    """The rest of a long hit is not even looked at, whatever else is stored."""
    names = digests(500)
    store = Counting(4 * 500 * UNIT)
    others = digests(1000, first=10_000)
    random.Random(1).shuffle(others)
    for some in (names, others):
        slots = store.reserve(1, WINDOWED, some, UNIT, 0)
        assert store.commit(1, slots.ticket, 0)
    store.looks = 0
    assert store.lookup("r", [WINDOWED], names, 0, [7]) == 500
    assert store.looks == 7
