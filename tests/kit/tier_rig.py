"""A tier on an arena of its own, in which everything outside the places of a call is poison."""

from __future__ import annotations

import mmap
import random

POISON = 0xA5
GAP = 512
ARENA_BYTES = 48 << 20


def content(key, nbytes):
    """The bytes of a chunk: like no other's."""
    return random.Random(key[0] + key[1]).randbytes(nbytes)


def new_keys(count, shard=None):
    """Names that no other test has."""
    shard = shard or random.SystemRandom().randbytes(32)
    return [(shard, random.SystemRandom().randbytes(32)) for _ in range(count)]


class Rig:
    """The calls of a tier with bytes instead of places; for one thread at a time."""

    def __init__(self, tier, arena_bytes=ARENA_BYTES):
        self.tier = tier
        self.arena = memoryview(mmap.mmap(-1, arena_bytes))
        tier.attach(self.arena)

    def put(self, chunks):
        """Store what this maps keys to; which of them are there now."""
        keys = list(chunks)
        with self._places([len(chunks[key]) for key in keys]) as (places, untouched):
            for key, place in zip(keys, places, strict=True):
                place[:] = chunks[key]
            done = self.tier.put_from(keys, places)
            for key, place in zip(keys, places, strict=True):
                assert place == chunks[key]
            untouched()
        assert [type(one) for one in done] == [bool] * len(keys)
        return done

    def get(self, sizes):
        """What is there of the keys that this maps to lengths: bytes, or None."""
        keys = list(sizes)
        with self._places([sizes[key] for key in keys]) as (places, untouched):
            done = self.tier.get_into(keys, places)
            untouched()
            assert [type(one) for one in done] == [bool] * len(keys)
            return [bytes(place) if ok else None for place, ok in zip(places, done, strict=True)]

    def exists(self, keys):
        return self.tier.exists(keys)

    def close(self):
        self.tier.close()

    def _places(self, sizes):
        return _Places(self.arena, sizes)


class _Places:
    def __init__(self, arena, sizes):
        self._arena = arena
        self._sizes = sizes

    def __enter__(self):
        position = GAP
        self._places, self._gaps = [], [slice(0, GAP)]
        for size in self._sizes:
            end = position + size
            self._places.append(self._arena[position:end])
            aligned = -(-end // 512) * 512
            self._gaps.append(slice(end, aligned + GAP))
            position = aligned + GAP
        self._arena[:position] = bytes([POISON]) * position
        return self._places, self._untouched

    def _untouched(self):
        for gap in self._gaps:
            assert set(self._arena[gap]) == {POISON}, gap

    def __exit__(self, *_):
        for place in self._places:
            place.release()
