"""What a lookup costs the server, by how many chunks it names and how many are stored.

Server time: from the frames of the request to the frames of its reply and a note of it, without the
socket. Beside it
stands what the client pays to name the chunks: hashing their tokens. Needs no GPU.
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.results import OURS
from lmcache_kernels.adapters.messaging import wire
from lmcache_kernels.transfer.keys import ChunkChain, root_digest
from lmcache_kernels.transfer.messages import (
    CommitStore,
    Found,
    Lookup,
    PrepareStore,
    Register,
    StoreSlots,
)
from lmcache_kernels.transfer.serving.request_log import RequestLog
from lmcache_kernels.transfer.serving.service import CacheService

from .rows import line, row_of

if TYPE_CHECKING:
    from bench.options import Options
    from bench.results import Row

PART = "lookup"
HASHING = "hashing"
SHARD = bytes(32)
CHUNK_BYTES = 512
CHUNK_TOKENS = 256
STORED = (1_000, 10_000, 100_000, 1_000_000)
NAMED = (64, 512)
LOOKUPS = 20
"""Of one round, each of other chunks."""

SESSIONS = 20
"""Requests that hold what they found; the oldest lets go when another comes."""


@dataclass(frozen=True)
class Server:
    """A service with so many chunks, of which any that follow each other are a prefix."""

    service: CacheService
    digests: list[bytes]
    log: RequestLog = field(default_factory=RequestLog)

    @classmethod
    def with_chunks(cls, stored: int) -> Server:
        """All stored a thousand at a time, as long prompts are."""
        service = CacheService(
            arena_name="lmcache_kernels_bench",
            arena_bytes=2 * (stored + 1) * CHUNK_BYTES,
            chunk_tokens=CHUNK_TOKENS,
            incarnation="bench",
        )
        service.handle(Register(instance=1, shard=SHARD, chunk_bytes=CHUNK_BYTES), 0.0)
        digests = [secrets.token_bytes(32) for _ in range(stored)]
        for first in range(0, stored, 1000):
            some = b"".join(digests[first : first + 1000])
            slots = service.handle(PrepareStore(instance=1, digests=some), 0.0)
            if not isinstance(slots, StoreSlots):
                raise TypeError(f"expected slots, got {slots!r}")
            service.handle(CommitStore(instance=1, ticket=slots.ticket), 0.0)
        return cls(service, digests)

    def lookup(self, named: int, turn: int) -> float:
        """Seconds of one that finds all that it names."""
        first = random.randrange(len(self.digests) - named + 1)
        some = b"".join(self.digests[first : first + named])
        asked = Lookup(request=f"r{turn % SESSIONS}", shards=[SHARD], digests=some)
        frames = wire.request_frames(turn, "bench", 0.0, wire.encode_body(asked))
        began = time.perf_counter()
        _, request = wire.decode_request(frames)
        reply = self.service.handle(request, 1.0)
        wire.reply_frames(turn, wire.encode_body(reply))
        self.log.record(request, reply, began, time.perf_counter())
        seconds = time.perf_counter() - began
        if reply != Found(chunks=named):
            raise ValueError(f"expected {named} chunks found, got {reply!r}")
        return seconds


def run(options: Options) -> list[Row]:
    """Measure every number of named chunks in servers of every size, in turn, and print the rows."""
    wanted = [
        (named, stored)
        for named in NAMED
        for stored in STORED
        if options.wants(f"{PART} {named} chunks lookup, {stored} stored")
    ]
    servers = {stored: Server.with_chunks(stored) for stored in {stored for _, stored in wanted}}
    rows = []
    for named in NAMED:
        some = {stored: servers[stored] for count, stored in wanted if count == named}
        rows += measure(some, named, options.rounds) if some else []
    for row in rows:
        print(line(row), flush=True)
    return rows


def measure(servers: dict[int, Server], named: int, rounds: int) -> list[Row]:
    """A row for each server; round by round all of them, and the hashing."""
    hashing: list[float] = []
    ours: dict[int, list[float]] = {stored: [] for stored in servers}
    for turn in range(-1, rounds):
        for stored, server in servers.items():
            times = [server.lookup(named, (turn + 1) * LOOKUPS + n) for n in range(LOOKUPS)]
            ours[stored] += times if turn >= 0 else []
        seconds = hash_tokens(named)
        hashing += [seconds] if turn >= 0 else []
    return [
        row_of(
            *(PART, f"{named} chunks", f"{stored} stored", "lookup"),
            {OURS: times, HASHING: hashing},
        )
        for stored, times in ours.items()
    ]


def hash_tokens(chunks: int) -> float:
    """Seconds that a client takes to name so many chunks."""
    tokens = list(range(chunks * CHUNK_TOKENS))
    began = time.perf_counter()
    ChunkChain(root_digest(model="m", chunk_tokens=CHUNK_TOKENS), CHUNK_TOKENS).extend(tokens)
    return time.perf_counter() - began
