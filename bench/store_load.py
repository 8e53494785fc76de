"""Store and load through a real server process, against one pinned copy of the same bytes.

Each case is interleaved with the link in one run, so a figure is a ratio and not a mood of the
machine. Every loaded byte is compared before anything is timed.
"""

from __future__ import annotations

import secrets
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.views import group_of

from .cases import CASES, Case
from .kernels import quantiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_kernels.transfer.context import EngineDrivenContext

CHUNK_TOKENS = 256
TIMEOUT = 120.0


def run(
    *, size_mb: int, rounds: int, max_programs: int | None, device: str = "cuda:0"
) -> list[dict[str, Any]]:
    """Measure every case; one row each, seconds as [p20, p50, p80]."""
    rows = []
    with spawn_server(size_gb=5 * size_mb / 1024, chunk_size=CHUNK_TOKENS) as server:
        for case in CASES:
            rows.append(_measure(case, size_mb << 20, rounds, device, server.url, max_programs))
            print(_line(rows[-1]), flush=True)
    return rows


def _measure(
    case: Case, nbytes: int, rounds: int, device: str, url: str, max_programs: int | None
) -> dict[str, Any]:
    axes = case.axes.split()
    blocks = case.blocks_for(nbytes, CHUNK_TOKENS // case.block_tokens)
    chunks = blocks * case.block_tokens // CHUNK_TOKENS
    moved = blocks * case.block_bytes
    caches = case.tensors(2 * blocks + 1, device)
    order = torch.randperm(2 * blocks + 1, generator=torch.Generator().manual_seed(7)).tolist()
    source, target = order[:blocks], order[blocks : 2 * blocks]
    host = torch.ones(moved, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(moved, dtype=torch.uint8, device=device)

    def store(context: EngineDrivenContext) -> list[bytes]:
        digests = [secrets.token_bytes(32) for _ in range(chunks)]
        stored = context.submit_store(digests, [source]).result.result(TIMEOUT)
        if stored != chunks:
            raise RuntimeError(f"stored {stored} of {chunks} chunks")
        return digests

    def load(context: EngineDrivenContext, digests: list[bytes]) -> None:
        loaded = context.submit_retrieve(digests, [target]).result(TIMEOUT)
        if loaded != chunks:
            raise RuntimeError(f"loaded {loaded} of {chunks} chunks")

    with connect(
        url,
        [group_of(caches, case.axes)],
        chunk_tokens=CHUNK_TOKENS,
        timeout=TIMEOUT,
        max_programs=max_programs,
    ) as context:
        digests = store(context)
        load(context, digests)
        axis = axes.index("block")
        there_ids = torch.tensor(target, device=device)
        here_ids = torch.tensor(source, device=device)
        exact = all(
            torch.equal(c.index_select(axis, there_ids), c.index_select(axis, here_ids))
            for c in caches
        )
        times: dict[str, list[float]] = {"store": [], "load": [], "link_out": [], "link_in": []}
        for _ in range(rounds):
            times["link_out"].append(_seconds(lambda: host.copy_(there)))
            times["store"].append(_seconds(lambda: store(context)))
            times["link_in"].append(_seconds(lambda: there.copy_(host)))
            times["load"].append(_seconds(partial(load, context, digests)))
            digests = store(context)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "case": case.name,
        "bytes": moved,
        "chunks": chunks,
        "max_programs": max_programs,
        "bit_exact": exact,
        "seconds": {name: quantiles(values) for name, values in times.items()},
        "store_gb_s": moved / median["store"] / 1e9,
        "load_gb_s": moved / median["load"] / 1e9,
        "link_out_gb_s": moved / median["link_out"] / 1e9,
        "link_in_gb_s": moved / median["link_in"] / 1e9,
        "store_of_link": median["link_out"] / median["store"],
        "load_of_link": median["link_in"] / median["load"],
    }


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:34} {row['bytes'] / 1e6:6.0f} MB  store {row['store_gb_s']:5.1f} GB/s "
        f"({row['store_of_link']:.2f} of link)  load {row['load_gb_s']:5.1f} GB/s "
        f"({row['load_of_link']:.2f} of link)  exact {row['bit_exact']}"
    )
