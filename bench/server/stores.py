"""How long a server is busy with one request at most, while chunks pass through a full store.

Nobody is answered meanwhile. Beside it the same with Python's collector left alone, which then looks
at everything there is from time to time.
"""

from __future__ import annotations

import gc
import secrets
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from bench.results import OURS
from lmcache_kernels.adapters.server.collector import young_collections_only
from lmcache_kernels.transfer.messages import CommitStore, PrepareStore, Register, StoreSlots
from lmcache_kernels.transfer.serving.service import CacheService

from .rows import line, row_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bench.options import Options
    from bench.results import Row

PART = "stores"
COLLECTED = "all collections"
SHARD = bytes(32)
CHUNK_BYTES = 512
STORED = 1_000_000
CHUNKS = 512
"""Of one store."""

PASSES = 3
"""How many times as many chunks are stored as there is room for."""


def run(options: Options) -> list[Row]:
    """Measure and print the row."""
    case, variant = f"{CHUNKS} chunks", f"{STORED} stored"
    if not options.wants(f"{PART} {case} store, {variant}"):
        return []
    collected = store_all(nullcontext())
    ours = store_all(young_collections_only())
    row = row_of(
        *(PART, case, variant, "store"),
        {OURS: ours, COLLECTED: collected},
        parts={"worst": max(ours), f"worst with {COLLECTED}": max(collected)},
    )
    print(line(row), flush=True)
    return [row]


def store_all(collector: AbstractContextManager[None]) -> list[float]:
    """Seconds of every call, from an empty store on."""
    service = CacheService(
        arena_name="lmcache_kernels_bench",
        arena_bytes=STORED * 2 * CHUNK_BYTES,
        chunk_tokens=256,
        incarnation="bench",
    )
    service.handle(Register(instance=1, shard=SHARD, chunk_bytes=CHUNK_BYTES), 0.0)
    times = []
    gc.collect()  # what is left of another store would be taken apart in the middle of this one
    with collector:
        for _ in range(PASSES * STORED // CHUNKS):
            prepare = PrepareStore(instance=1, digests=secrets.token_bytes(32 * CHUNKS))
            began = time.perf_counter()
            slots = service.handle(prepare, 0.0)
            prepared = time.perf_counter()
            if not isinstance(slots, StoreSlots) or len(slots.offsets) != CHUNKS:
                raise TypeError(f"expected {CHUNKS} slots, got {slots!r:.80}")
            commit = CommitStore(instance=1, ticket=slots.ticket)
            committing = time.perf_counter()
            service.handle(commit, 0.0)
            times += [prepared - began, time.perf_counter() - committing]
    return times
