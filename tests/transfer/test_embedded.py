"""The cache in one process: finished futures, typed errors, nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tierkit import MemoryTier

from lmcache_kernels.errors import CapacityError, Closed, RemoteError, TierUnavailable
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES, pack_header
from lmcache_kernels.transfer.messages import (
    Clear,
    Cleared,
    CommitStore,
    Done,
    EndSession,
    Found,
    Hello,
    Lookup,
    Ping,
    PrepareRetrieve,
    PrepareStore,
    Register,
    Registered,
    StoreSlots,
    Welcome,
)
from lmcache_kernels.transfer.serving.tickets import READ_TTL

if TYPE_CHECKING:
    from pathlib import Path

    from lmcache_kernels.transfer.messages import Reply, Request
    from lmcache_kernels.transfer.port import CachePort
    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey

SHARD = b"s" * 32
CHUNK = 512
SLOT = HEADER_BYTES + CHUNK


def ask(cache: CachePort, request: Request) -> Reply:
    future = cache.request(request, 1.0)
    assert future.done()
    return future.result(0)


def test_store_and_find(tmp_path: Path) -> None:
    with EmbeddedCache(8 * SLOT, 64, tmp_path) as cache:
        assert cache.chunk_tokens == 64
        assert cache.incarnation is not None
        assert len(cache.incarnation) == 32
        welcome = ask(cache, Hello(protocol=1))
        assert isinstance(welcome, Welcome)
        assert (welcome.incarnation, welcome.chunk_tokens) == (cache.incarnation, 64)
        registered = ask(cache, Register(instance=7, shard=SHARD, chunk_bytes=CHUNK))
        assert isinstance(registered, Registered)
        arena = Arena.attach(registered.arena_name, registered.arena_bytes, tmp_path)
        slots = ask(cache, PrepareStore(instance=7, digests=bytes(32)))
        assert isinstance(slots, StoreSlots)
        arena.view(slots.offsets[0] + HEADER_BYTES, CHUNK)[:] = b"x" * CHUNK
        assert ask(cache, CommitStore(instance=7, ticket=slots.ticket)) == Done()
        assert ask(cache, Lookup(request="r", shards=[SHARD], digests=bytes(32))) == Found(chunks=1)
        assert ask(cache, EndSession(request="r")) == Done()
        assert cache.stats()["resident"] == 1
        arena.close()
    assert os.listdir(tmp_path) == []


def test_error_replies_become_exceptions(tmp_path: Path) -> None:
    with EmbeddedCache(8 * SLOT, directory=tmp_path) as cache:
        future = cache.request(PrepareStore(instance=1, digests=b""), 1.0)
        error = future.exception(0)
        assert isinstance(error, RemoteError)
        assert error.code == "unknown_instance"
        assert "register again" in str(error)


def test_after_close_everything_fails_at_once(tmp_path: Path) -> None:
    cache = EmbeddedCache(8 * SLOT, directory=tmp_path)
    cache.close()
    cache.close()
    assert cache.incarnation is None
    assert isinstance(cache.request(Ping(), 1.0).exception(0), Closed)
    assert os.listdir(tmp_path) == []


def test_every_cache_is_its_own(tmp_path: Path) -> None:
    with EmbeddedCache(SLOT, directory=tmp_path) as a, EmbeddedCache(SLOT, directory=tmp_path) as b:
        assert a.incarnation != b.incarnation
        assert len(os.listdir(tmp_path)) == 2


def test_a_cache_larger_than_its_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="need"):
        EmbeddedCache(1 << 60, directory=tmp_path)
    assert os.listdir(tmp_path) == []


def test_threads_share_a_cache(tmp_path: Path) -> None:
    """Each chunk is written by exactly one of the threads that all want to write it."""
    threads, chunks = 8, 40
    written: list[int] = []

    def worker(instance: int) -> None:
        ask(cache, Register(instance=instance, shard=SHARD, chunk_bytes=CHUNK))
        for index in range(chunks):
            slots = ask(cache, PrepareStore(instance=instance, digests=bytes([index]) * 32))
            assert isinstance(slots, StoreSlots)
            if slots.indices:
                ask(cache, CommitStore(instance=instance, ticket=slots.ticket))
                written.append(index)

    with EmbeddedCache(chunks * SLOT, directory=tmp_path) as cache:
        running = [threading.Thread(target=worker, args=(i,)) for i in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(30)
        assert sorted(written) == list(range(chunks))
        assert cache.stats()["resident"] == chunks


def test_a_silent_worker_stays_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedCache(4 * SLOT, directory=tmp_path) as cache:
        ask(cache, Register(instance=1, shard=SHARD, chunk_bytes=CHUNK))
        monkeypatch.setattr("time.monotonic", lambda: 1e9)
        assert isinstance(ask(cache, PrepareStore(instance=1, digests=b"")), StoreSlots)


def test_a_read_that_nobody_ends_does_not_pin_chunks_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker ever counts as lost here, so nothing but the time ends what it forgot."""
    with EmbeddedCache(SLOT, directory=tmp_path) as cache:
        ask(cache, Register(instance=1, shard=SHARD, chunk_bytes=CHUNK))
        slots = ask(cache, PrepareStore(instance=1, digests=bytes(32)))
        assert isinstance(slots, StoreSlots)
        ask(cache, CommitStore(instance=1, ticket=slots.ticket))
        ask(cache, PrepareRetrieve(instance=1, digests=bytes(32)))
        other = PrepareStore(instance=1, digests=b"x" * 32)
        assert ask(cache, other) == StoreSlots(ticket=0, indices=[], offsets=[])
        later = time.monotonic() + READ_TTL
        monkeypatch.setattr("time.monotonic", lambda: later)
        slots = ask(cache, other)
        assert isinstance(slots, StoreSlots)
        assert slots.indices == [0]


def test_nothing_is_found_after_a_clear(tmp_path: Path) -> None:
    with EmbeddedCache(2 * SLOT, directory=tmp_path) as cache:
        ask(cache, Register(instance=1, shard=SHARD, chunk_bytes=CHUNK))
        slots = ask(cache, PrepareStore(instance=1, digests=bytes(32)))
        assert isinstance(slots, StoreSlots)
        ask(cache, CommitStore(instance=1, ticket=slots.ticket))
        find = Lookup(request="r", shards=[SHARD], digests=bytes(32))
        assert ask(cache, find) == Found(chunks=1)
        assert ask(cache, Clear(shards=[SHARD])) == Cleared(chunks=1)
        assert ask(cache, find) == Found(chunks=0)


def test_a_cache_smaller_than_a_chunk_says_so(tmp_path: Path) -> None:
    with EmbeddedCache(SLOT - 1, directory=tmp_path) as cache:
        future = cache.request(Register(instance=7, shard=SHARD, chunk_bytes=CHUNK), 1.0)
        error = future.exception(0)
        assert isinstance(error, CapacityError)
        assert f"one chunk takes {SLOT} bytes, the arena has {SLOT - 1}" in str(error)
        assert "server" not in str(error)


# --- tiers below it -------------------------------------------------------------------------------


def stored(cache: EmbeddedCache, number: int) -> None:
    """A chunk, header and all, as a worker stores it."""
    digest = number.to_bytes(32, "big")
    ask(cache, Register(instance=1, shard=SHARD, chunk_bytes=CHUNK))
    slots = ask(cache, PrepareStore(instance=1, digests=digest))
    assert isinstance(slots, StoreSlots)
    header = pack_header(SHARD, digest, CHUNK, [1])
    cache._arena.view(slots.offsets[0], SLOT)[:] = header + b"\x07" * CHUNK
    ask(cache, CommitStore(instance=1, ticket=slots.ticket))


def test_a_cache_with_a_tier_finds_what_another_one_stored(tmp_path: Path) -> None:
    shared: dict[ChunkKey, bytes] = {}
    tiers = MemoryTier(chunks=shared), MemoryTier(chunks=shared)
    with EmbeddedCache(8 * SLOT, 64, tmp_path, tiers=tiers[:1]) as one:
        stored(one, 5)
    assert len(shared) == 1  # closing has waited for it
    with EmbeddedCache(8 * SLOT, 64, tmp_path, tiers=tiers[1:]) as two:
        ask(two, Register(instance=1, shard=SHARD, chunk_bytes=CHUNK))
        lookup = Lookup(request="r", shards=[SHARD], digests=(5).to_bytes(32, "big"))
        assert two.request(lookup, 20.0).result(30.0) == Found(chunks=1)


def test_a_tier_that_hangs_does_not_delay_the_answer_beyond_its_deadline(tmp_path: Path) -> None:
    tier = MemoryTier()
    with EmbeddedCache(8 * SLOT, 64, tmp_path, tiers=[tier]) as cache:
        ask(cache, Register(instance=1, shard=SHARD, chunk_bytes=CHUNK))
        tier.gate.clear()
        lookup = Lookup(request="r", shards=[SHARD], digests=bytes(32))
        assert cache.request(lookup, 0.2).result(30.0) == Found(chunks=0)
        tier.gate.set()


def test_mp_102_periodic_work_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is answered all the same."""
    tier = MemoryTier()
    with EmbeddedCache(8 * SLOT, 64, tmp_path, tiers=[tier]) as cache:
        ask(cache, Register(instance=1, shard=SHARD, chunk_bytes=CHUNK))

        def fails(now: float) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(cache._service, "tick", fails)
        tier.gate.clear()
        lookup = Lookup(request="r", shards=[SHARD], digests=bytes(32))
        for _ in range(3):
            assert cache.request(lookup, 0.2).result(30.0) == Found(chunks=0)
        tier.gate.set()


def test_a_tier_that_refuses_the_arena_leaves_nothing_behind(tmp_path: Path) -> None:
    class Refusing(MemoryTier):
        def attach(self, arena: memoryview) -> None:
            raise TierUnavailable("no")

    with pytest.raises(TierUnavailable):
        EmbeddedCache(8 * SLOT, 64, tmp_path, tiers=[Refusing()])
    assert list(tmp_path.iterdir()) == []
