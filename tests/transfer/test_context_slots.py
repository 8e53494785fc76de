"""Slots that are taken and given back again and again, in every way that a transfer can end."""

from __future__ import annotations

import os
import random
import secrets
from contextlib import suppress

import pytest
from cachekit import BY_NAME, make_cache
from held_mover import HeldMover

from lmcache_kernels.errors import LocalProtocolError, RemoteError
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import (
    AbortStore,
    Clear,
    CommitRetrieve,
    CommitStore,
    PrepareRetrieve,
    PrepareStore,
    Register,
)
from lmcache_kernels.transfer.serving.slots import SlotAllocator
from lmcache_kernels.views import group_of

PAYLOAD = 512
SLOTS = 40
WAIT = 30.0


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_fault_b09_ten_thousand_stores_and_aborts_share_no_slot_and_leak_nothing():
    """No slot is given out twice, what is given back comes again, memory does not grow."""
    chance = random.Random(9)
    with EmbeddedCache(SLOTS * (HEADER_BYTES + PAYLOAD), chunk_tokens=8) as cache:

        def ask(message):
            return cache.request(message, 1.0).result(0)

        ask(Register(instance=1, shard=b"s" * 32, chunk_bytes=PAYLOAD))
        writing, reading, seen = {}, {}, set()
        known = [secrets.token_bytes(32) for _ in range(60)]
        before = 0
        for turn in range(10_000):
            if turn == 2000:
                before = resident_bytes()
            action = chance.random()
            some = b"".join(chance.sample(known, chance.randrange(1, 5)))
            if action < 0.5:
                slots = ask(PrepareStore(instance=1, digests=some))
                if slots.indices:
                    writing[slots.ticket] = slots.offsets
                    taken = [offset for held in writing.values() for offset in held]
                    assert len(taken) == len(set(taken))
                    read = {offset for held in reading.values() for offset in held}
                    assert read.isdisjoint(slots.offsets)
                    seen.update(slots.offsets)
            elif action < 0.65:
                held = ask(PrepareRetrieve(instance=1, digests=some))
                if held.offsets:
                    reading[held.ticket] = held.offsets
            elif action < 0.8 and reading:
                ticket = chance.choice(list(reading))
                count = len(reading.pop(ticket))
                damaged = [n for n in range(count) if chance.random() < 0.2]
                ask(CommitRetrieve(instance=1, ticket=ticket, damaged=damaged))
            elif action < 0.99 and writing:
                ticket = chance.choice(list(writing))
                del writing[ticket]
                how = CommitStore if chance.random() < 0.5 else AbortStore
                with suppress(RemoteError):  # it was cleared meanwhile
                    ask(how(instance=1, ticket=ticket))
                with pytest.raises(RemoteError, match="unknown_ticket"):
                    ask(AbortStore(instance=1, ticket=ticket))
            elif action >= 0.99:
                ask(Clear())
        assert resident_bytes() < 1.05 * before
        assert len(seen) == SLOTS
        for ticket in writing:
            ask(AbortStore(instance=1, ticket=ticket))
        for ticket in reading:
            ask(CommitRetrieve(instance=1, ticket=ticket))
        ask(Clear())
        assert cache.stats()["used_bytes"] == 0
        whole = ask(
            PrepareStore(instance=1, digests=b"".join(secrets.token_bytes(32) for _ in range(60)))
        )
        assert sorted(whole.offsets) == [n * (HEADER_BYTES + PAYLOAD) for n in range(SLOTS)]


def test_fault_b09_giving_a_slot_back_twice_is_an_error():
    slots = SlotAllocator(4096)
    offset = slots.allocate(512)
    slots.free(offset)
    with pytest.raises(LocalProtocolError):
        slots.free(offset)


def test_fault_b09_a_context_whose_transfers_fail_at_random_leaks_no_slot():
    chance = random.Random(3)
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=16)
    movers = []

    def mover(groups, layout):
        movers.append(HeldMover(groups, layout))
        return movers[0]

    def sometimes(direction):
        if chance.random() < 0.4:
            raise RuntimeError("no such luck")

    with EmbeddedCache(1 << 15, chunk_tokens=8) as server:
        context = EngineDrivenContext(
            [group_of(cache.tensors, cache.axes)],
            chunk_tokens=8,
            shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
            instance=secrets.randbits(63),
            port=server,
            mover=mover,
        )
        movers[0].before = sometimes
        digests = [secrets.token_bytes(32) for _ in range(12)]
        for _ in range(300):
            some = chance.sample(digests, 2)
            if chance.random() < 0.6:
                result = context.submit_store(some, [[0, 1, 2, 3]]).result
            else:
                result = context.submit_retrieve(some, [[8, 9, 10, 11]])
            if chance.random() < 0.3:
                context.flush_inflight_stores(WAIT)
            error = result.exception(WAIT)
            assert error is None or "luck" in str(error) or "stopped" in str(error)
        stats = server.stats()
        assert (stats["writing"], stats["reads"]) == (0, 0)
        assert stats["used_bytes"] == stats["resident"] * (context.layout.nbytes + HEADER_BYTES)
        context.close()
