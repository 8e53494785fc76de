"""A worker without a GPU or an engine: it writes and checks whole slots in the arena that it attaches."""

from __future__ import annotations

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES, pack_header
from lmcache_kernels.transfer.messages import (
    Clear,
    CommitRetrieve,
    CommitStore,
    EndSession,
    Lookup,
    PrepareRetrieve,
    PrepareStore,
    Register,
)

CHUNK = 32 * 1024
SLOT = HEADER_BYTES + CHUNK
WAIT = 20.0


def digest(number):
    return number.to_bytes(32, "big")


def digests(start, stop):
    return b"".join(digest(number) for number in range(start, stop))


def content(shard, number):
    """The whole slot of chunk ``number``: header, and a payload that is like no other's."""
    seed = (number * 2654435761 + shard[0]) % (1 << 32)
    payload = seed.to_bytes(4, "big") * (CHUNK // 4)
    return pack_header(shard, digest(number), CHUNK, [seed]) + payload


class RawWorker:
    """Stores, looks up and loads chunks by number, and checks every byte."""

    def __init__(self, url, shard=b"r" * 32, instance=1):
        self.shard = shard
        self.instance = instance
        self.client = CacheClient(url)
        self.client.wait_ready(WAIT)
        registered = self.ask(Register(instance=instance, shard=shard, chunk_bytes=CHUNK))
        self.arena = Arena.attach(registered.arena_name, registered.arena_bytes)

    def ask(self, request):
        return self.client.request(request, WAIT).result(2 * WAIT)

    def ask_until_gone(self):
        """Raises what a request to a server raises that has ended."""
        for _ in range(1000):
            self.ask(EndSession(request="nobody"))

    def store(self, start, stop):
        """How many were written."""
        wanted = PrepareStore(instance=self.instance, digests=digests(start, stop))
        slots = self.ask(wanted)
        for index, offset in zip(slots.indices, slots.offsets, strict=True):
            self.arena.view(offset, SLOT)[:] = content(self.shard, start + index)
        if slots.indices:
            self.ask(CommitStore(instance=self.instance, ticket=slots.ticket))
        return len(slots.indices)

    def lookup(self, start, stop, request="r"):
        """How many are there."""
        wanted = Lookup(request=request, shards=[self.shard], digests=digests(start, stop))
        return self.ask(wanted).chunks

    def load(self, start, stop):
        """How many there were, each of them right."""
        wanted = PrepareRetrieve(instance=self.instance, digests=digests(start, stop))
        slots = self.ask(wanted)
        for index, offset in enumerate(slots.offsets):
            assert bytes(self.arena.view(offset, SLOT)) == content(self.shard, start + index)
        if slots.offsets:
            self.ask(CommitRetrieve(instance=self.instance, ticket=slots.ticket))
        return len(slots.offsets)

    def free(self, request="r"):
        self.ask(EndSession(request=request))

    def clear(self):
        return self.ask(Clear(shards=[self.shard])).chunks

    def close(self):
        self.client.close()
        self.arena.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
