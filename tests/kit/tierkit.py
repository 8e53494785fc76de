"""A tier that does as it is told, and a service above it whose clock moves when told to."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from lmcache_kernels.errors import TierUnavailable
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES, pack_header
from lmcache_kernels.transfer.messages import (
    REPLY_OF,
    Clear,
    CommitRetrieve,
    CommitStore,
    EndSession,
    ErrorReply,
    Lookup,
    PrepareRetrieve,
    PrepareStore,
    Register,
)
from lmcache_kernels.transfer.serving.later import Later
from lmcache_kernels.transfer.serving.service import CacheService

CHUNK = 1536
SLOT = HEADER_BYTES + CHUNK
SHARD, OTHER = b"s" * 32, b"o" * 32
WAIT = 20.0


def digest(number):
    return number.to_bytes(32, "big")


def digests(start, stop):
    return b"".join(digest(number) for number in range(start, stop))


def payload(shard, number):
    """What chunk ``number`` of a shard holds: its own pattern."""
    return bytes((shard[0] + number + i * 7) % 256 for i in range(CHUNK))


class MemoryTier:
    """A dict. ``gate``: calls wait for it; ``away``: they fail; ``refused``: chunks that are not kept."""

    def __init__(self, name="memory", chunks=None):
        self.name = name
        self.chunks = {} if chunks is None else chunks
        self.gate = threading.Event()
        self.gate.set()
        self.away = False
        self.error = None
        self.refused = set()
        self.calls = []
        self.closed = False
        self.entered = threading.Event()

    def _called(self, name, keys):
        self.calls.append((name, list(keys)))
        self.entered.set()
        assert self.gate.wait(WAIT)
        if self.away:
            raise TierUnavailable(f"{self.name} is away")
        if self.error is not None:
            raise self.error

    def count(self, name):
        return sum(1 for called, _ in self.calls if called == name)

    def attach(self, arena):
        self.arena = arena

    def exists(self, keys):
        self._called("exists", keys)
        return [key in self.chunks for key in keys]

    def get_into(self, keys, places):
        self._called("get_into", keys)
        arrived = []
        for key, place in zip(keys, places, strict=True):
            data = self.chunks.get(key)
            there = data is not None and len(data) == len(place)
            place[:] = data if there else b"\xaa" * len(place)
            arrived.append(there)
        return arrived

    def put_from(self, keys, places):
        self._called("put_from", keys)
        for key, place in zip(keys, places, strict=True):
            if key not in self.refused:
                self.chunks[key] = bytes(place)
        return [key not in self.refused for key in keys]

    def remove(self, keys):
        self._called("remove", keys)
        for key in keys:
            self.chunks.pop(key, None)

    def clear(self, shards):
        self._called("clear", shards)
        for key in list(self.chunks):
            if not shards or key[0] in shards:
                del self.chunks[key]

    def stats(self):
        return {"used_bytes": sum(map(len, self.chunks.values()))}

    def close(self):
        self.closed = True


class TieredCache:
    """A service with an arena of so many slots; :meth:`ask` waits until the tiers have answered."""

    def __init__(self, *tiers, slots=8, policy="all", **options):
        self.now = time.monotonic()  # closing looks at the real clock
        self.arena = Arena.create(slots * SLOT)
        self._woken = queue.SimpleQueue()
        self.replies = {}
        self.service = CacheService(
            arena_name=self.arena.name,
            arena_bytes=self.arena.nbytes,
            chunk_tokens=256,
            incarnation="first",
            arena=self.arena,
            tiers=tiers,
            tier_store_policy=policy,
            wake=lambda: self._woken.put(None),
            **options,
        )
        self.register(1, SHARD)

    def close(self):
        self.service.close()
        self.arena.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    # --- asking -----------------------------------------------------------------------------------

    def begin(self, request, timeout=60.0):
        """The reply, or what stands for one that comes."""
        return self.service.handle(request, self.now, self.now + timeout)

    def ask(self, request, timeout=60.0):
        reply = self.begin(request, timeout)
        if isinstance(reply, Later):
            reply = self.reply(reply)
        assert isinstance(reply, (REPLY_OF[type(request)], ErrorReply))
        return reply

    def reply(self, later):
        self.until(lambda: later in self.replies)
        return self.replies.pop(later)

    def until(self, condition):
        """Serve what the tiers' threads leave to do until the condition is true."""
        end = time.monotonic() + WAIT
        self.serve()
        while not condition():
            assert time.monotonic() < end, "it did not become true"
            with contextlib.suppress(queue.Empty):  # what a tier does inside a call wakes nobody
                self._woken.get(timeout=0.02)
            self.serve()

    def serve(self):
        self.replies.update(self.service.finished(self.now))

    def pass_time(self, seconds):
        self.now += seconds
        self.service.tick(self.now)
        self.serve()

    # --- chunks -----------------------------------------------------------------------------------

    def register(self, instance, shard):
        self.ask(Register(instance=instance, shard=shard, chunk_bytes=CHUNK))

    def store(self, start, stop, instance=1, shard=SHARD):
        """Chunks [start, stop), as a worker does; how many were written."""
        slots = self.ask(PrepareStore(instance=instance, digests=digests(start, stop)))
        for index, offset in zip(slots.indices, slots.offsets, strict=True):
            self.write(offset, shard, start + index)
        if slots.indices:
            self.ask(CommitStore(instance=instance, ticket=slots.ticket))
        return len(slots.indices)

    def write(self, offset, shard, number):
        header = pack_header(shard, digest(number), CHUNK, [1])
        self.arena.view(offset, SLOT)[:] = header + payload(shard, number)

    def lookup(self, start, stop, request="probe", shards=(SHARD,), timeout=60.0):
        wanted = Lookup(request=request, shards=list(shards), digests=digests(start, stop))
        return self.ask(wanted, timeout).chunks

    def free(self, request="probe"):
        self.ask(EndSession(request=request))

    def load(self, start, stop, instance=1, shard=SHARD):
        """Read chunks [start, stop) as a worker does and check every byte; how many there were."""
        slots = self.ask(PrepareRetrieve(instance=instance, digests=digests(start, stop)))
        for index, offset in enumerate(slots.offsets):
            expected = pack_header(shard, digest(start + index), CHUNK, [1])
            expected += payload(shard, start + index)
            assert bytes(self.arena.view(offset, SLOT)) == expected
        if slots.offsets:
            self.ask(CommitRetrieve(instance=instance, ticket=slots.ticket))
        return len(slots.offsets)

    def drop_all(self):
        """Everything leaves the arena, nothing the tiers."""
        self.service._store.clear((), self.now)

    def settle(self):
        """Until everything that was stored has gone down."""

        def over():
            self.service.tick(self.now)
            return self.service.tiers_over

        self.until(over)

    def clear(self, *shards):
        return self.ask(Clear(shards=list(shards))).chunks

    def tier(self, name="memory"):
        return self.service.tier_stats()[name]

    def stats(self):
        return self.service.stats()
