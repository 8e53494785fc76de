"""What handing over a store costs the engine's thread: 512 chunks, while the device stands still.

Earlier stores are in flight, and the thread that serves them competes for the interpreter. Chunks
are small, so that many stores fit into memory; what a submit costs depends on their number.
"""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.views import group_of

from .cases import KV_FIRST, Case, Model
from .moving import TIMEOUT
from .results import OURS, Row
from .round_trip import comes_back, new_digests
from .streams import point_in
from .timing import IDLE_CYCLES, spread_of
from .trials import CHUNK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .rig import Rig

PART = "submit"
CASE = Case(Model("64 KiB chunks", layers=1, heads=1, dim=64), KV_FIRST)
CHUNKS = 512
CALLS, IN_FLIGHT = 200, 8
STALL_CYCLES = 50 * IDLE_CYCLES
"""About 50 ms: many times what the calls between two stalls take."""


def run(rig: Rig) -> list[Row]:
    """Measure and print."""
    direction = f"{CHUNKS} chunks"
    if not rig.wants(PART, CASE.name, direction):
        return []
    per_chunk = CHUNK_TOKENS // CASE.block_tokens
    blocks = CHUNKS * per_chunk
    caches = CASE.tensors(2 * blocks, rig.device)
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(7)).tolist()
    source, target = order[:blocks], order[blocks:]
    slot = HEADER_BYTES + per_chunk * CASE.block_bytes
    arena_bytes = (IN_FLIGHT + 2) * CHUNKS * slot
    with open_context(CASE, caches, arena_bytes, rig.max_programs) as context:
        exact = comes_back(context, CASE, caches, new_digests(CHUNKS), source, target)
        times = submit_times(context, source, CALLS, lambda: stall(rig.device))
    row = Row(
        part=PART,
        case=CASE.name,
        variant="plain",
        direction=direction,
        ids="random",
        bytes=0,
        run_bytes=0,
        max_programs=rig.max_programs,
        bit_exact=exact,
        traffic=1,
        ceiling="",
        seconds={OURS: spread_of(times)},
    )
    print(line(row), flush=True)
    return [row]


@contextmanager
def open_context(
    case: Case,
    caches: Sequence[torch.Tensor],
    arena_bytes: int,
    max_programs: int | None,
) -> Iterator[EngineDrivenContext]:
    """A context with a cache in this process."""
    with EmbeddedCache(arena_bytes, CHUNK_TOKENS) as cache:
        context = EngineDrivenContext(
            [group_of(caches, case.axes)],
            chunk_tokens=CHUNK_TOKENS,
            shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
            instance=secrets.randbits(63),
            port=cache,
            timeout=TIMEOUT,
            max_programs=max_programs,
        )
        try:
            yield context
        finally:
            context.close()


def submit_times(
    context: EngineDrivenContext,
    ids: Sequence[int],
    calls: int,
    stall: Callable[[], Callable[[], bool]],
) -> list[float]:
    """Seconds of at least so many submits, each made while the device stood still and stores waited.

    Args:
        stall: stops the device for a while and returns how to ask whether it still stands.

    Raises:
        RuntimeError: it hardly ever stood long enough.
    """
    times: list[float] = []
    (per_chunk,) = context.layout.blocks_per_chunk
    for _ in range(2 * -(-calls // IN_FLIGHT)):
        names = [new_digests(len(ids) // per_chunk) for _ in range(IN_FLIGHT + 1)]
        stands = stall()
        first, *others = names
        stores = [context.submit_store(first, [ids])]
        found = []
        for digests in others:
            start = time.perf_counter()
            stores.append(context.submit_store(digests, [ids]))
            found.append(time.perf_counter() - start)
        if stands():
            times += found
        for one in stores:
            one.result.result(TIMEOUT)
        if len(times) >= calls:
            return times
    raise RuntimeError("the device went on before the stores were handed over")


def stall(device: str) -> Callable[[], bool]:
    """Stop the current stream for a while; is it still stopped?"""
    if device == "cpu":
        return lambda: True
    torch.cuda._sleep(STALL_CYCLES)
    over = point_in(torch.cuda.current_stream(device))
    return lambda: not over.done()


def line(row: Row) -> str:
    """The row for the terminal."""
    ours = row.seconds[OURS]
    p99 = "" if ours.p99 is None else f"  p99 {ours.p99 * 1e6:.1f} us"
    return f"{row.title:48} p50 {ours.p50 * 1e6:.1f} us{p99}"
