"""A server process under the load of many workers: mixed lookups, loads, stores and ends of sessions.

Prompts of 512 chunks, of which some are frequent; there are several times as many chunks as the arena
has room for, so that something is evicted for whatever is stored. What is loaded is verified. Beside the
times stand those of one worker alone at the same server.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.results import OURS
from bench.workers.process import SHARD, TIMEOUT, together
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.transfer.asking import ask
from lmcache_kernels.transfer.messages import (
    DIGEST_BYTES,
    AbortStore,
    CommitStore,
    Done,
    Found,
    Lookup,
    PrepareStore,
    Register,
    Registered,
    StoreSlots,
)

from .load_window import Load, Window, watch
from .lookups import HASHING, hash_tokens
from .rows import line, row_of

if TYPE_CHECKING:
    from bench.options import Options
    from bench.results import Row
    from lmcache_kernels.adapters.server.spawn import ServerProcess

PART = "load"
ALONE = "one worker"
OTHERS = "the other workers"
FLAT = 1.05
"""How many times what it was a server's own memory may become during the load."""

HASHED = 50
"""Lookups that hash their tokens first."""


def run(options: Options) -> list[Row]:
    """Measure and print every kind of request."""
    if not options.wants(f"{PART} {Load().workers} workers"):
        return []
    rows = measure(Load(), options.seconds)
    for row in rows:
        print(line(row), flush=True)
        if row.counts:
            print("  " + ", ".join(f"{name} {count}" for name, count in row.counts.items()))
        for failure in row.failures:
            print(f"  FAILED: {failure}", flush=True)
    return rows


def measure(load: Load, seconds: float) -> list[Row]:
    """The rows: all requests, every kind of them, pings beside, and lookups that hash first."""
    with (
        spawn_server(size_gb=load.arena_gb) as server,
        CacheClient(server.url, instance_id=0) as client,
    ):
        client.wait_ready(TIMEOUT)
        few = max(1.0, seconds / 6)
        # With chunks that nobody looks for, so that something is evicted from the first store on.
        ticket, _ = reserve_all(load, server, client)
        ask(client, CommitStore(instance=0, ticket=ticket), Done, TIMEOUT)
        alone = watch(replace(load, workers=1), server, client, warm_up=few / 4, seconds=few)
        busy = watch(load, server, client, warm_up=2 * few, seconds=seconds)
        ticket, held = reserve_all(load, server, client)
        ask(client, AbortStore(instance=0, ticket=ticket), Done, TIMEOUT)
        both = hashing_and_lookups(load, client)
    case, variant = f"{load.workers} workers", "plain"
    counts = _counts(alone, busy, held)
    rows = [
        row_of(
            *(PART, case, variant, "every request"),
            {OURS: busy.per_request(), ALONE: alone.per_request()},
            parts={"server's processor": busy.cpu / len(busy.requests())},
            bit_exact=not counts["wrong chunks"],
            failures=failures_of(counts) + alone.total.errors + busy.total.errors,
            counts=counts,
        )
    ]
    for kind in sorted(busy.timed.calls):
        reports = {OURS: busy.timed, OTHERS: busy.others, ALONE: alone.timed}
        times = {
            name: [one for _, one in seen.calls.get(kind, ())] for name, seen in reports.items()
        }
        enough = {name: some for name, some in times.items() if len(some) > 1}
        if OURS in enough:
            rows.append(row_of(PART, case, variant, kind, enough))
    return [*rows, row_of(PART, "an idle server", variant, "hashing and lookup", both)]


def reserve_all(load: Load, server: ServerProcess, client: CacheClient) -> tuple[int, int]:
    """A store of as many new chunks as the arena has slots: its ticket, and how many slots it does not get.

    Those are leased, read or written by somebody.
    """
    slots = server.arena_bytes // load.slot_bytes
    register = Register(instance=0, shard=SHARD, chunk_bytes=load.chunk_bytes)
    ask(client, register, Registered, TIMEOUT)
    prepare = PrepareStore(instance=0, digests=secrets.token_bytes(DIGEST_BYTES * slots))
    got = ask(client, prepare, StoreSlots, TIMEOUT)
    return got.ticket, slots - len(got.offsets)


def hashing_and_lookups(load: Load, client: CacheClient) -> dict[str, list[float]]:
    """Seconds of hashing the tokens of a prompt and looking its chunks up, and of the hashing alone."""
    digests = secrets.token_bytes(DIGEST_BYTES * load.chunks)
    ticket = ask(client, PrepareStore(instance=0, digests=digests), StoreSlots, TIMEOUT).ticket
    ask(client, CommitStore(instance=0, ticket=ticket), Done, TIMEOUT)
    both, hashing = [], []
    for number in range(HASHED):
        seconds = hash_tokens(load.chunks)
        began = time.perf_counter()
        lookup = Lookup(request=f"hashed {number}", shards=[SHARD], digests=digests)
        found = ask(client, lookup, Found, TIMEOUT)
        both.append(seconds + time.perf_counter() - began)
        if found.chunks != load.chunks:
            raise ValueError(f"expected {load.chunks} chunks found, got {found.chunks}")
        hashing.append(hash_tokens(load.chunks))
    return {OURS: both, HASHING: hashing}


def _counts(alone: Window, busy: Window, held: int) -> dict[str, int]:
    total = together([alone.total, busy.total])
    return {
        "chunks loaded": total.loaded,
        "chunks stored": total.stored,
        "wrong chunks": total.wrong,
        "failed calls": total.failed,
        "slots held at the end": held,
        "bytes of the server at first": busy.memory[0],
        "bytes of the server at most": max(busy.memory),
    }


def failures_of(counts: dict[str, int]) -> list[str]:
    """Which of the counts a sound run does not have."""
    found = [
        f"{name}: expected 0, got {counts[name]}"
        for name in ("wrong chunks", "failed calls", "slots held at the end")
        if counts[name]
    ]
    first, most = (counts[f"bytes of the server at {when}"] for when in ("first", "most"))
    if most > FLAT * first:
        found.append(f"the server's own memory grew from {first} to {most} bytes")
    return found
