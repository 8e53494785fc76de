"""Store and load through a real server process, against one pinned copy of the same bytes.

Each case is interleaved with the link in one run, so a figure is a ratio and not a mood of the
machine. Every loaded byte is compared before anything is timed.
"""

from __future__ import annotations

import secrets
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.views import group_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_kernels.transfer.context import EngineDrivenContext

CHUNK_TOKENS = 256
TIMEOUT = 120.0


@dataclass(frozen=True)
class Case:
    """One layout of one model: ``shape`` of a layer, B standing for the number of blocks."""

    name: str
    axes: str
    shape: tuple[int | str, ...]
    layers: int
    block_tokens: int = 16


CASES = (
    Case("Llama-3-8B [2,B,N,H,D]", "kv block token head dim", (2, "B", 16, 8, 128), 32),
    Case("Llama-3-8B [B,2,N,H,D]", "block kv token head dim", ("B", 2, 16, 8, 128), 32),
    Case("Llama-3-8B HND [2,B,H,N,D]", "kv block head token dim", (2, "B", 8, 16, 128), 32),
    Case("Llama-3-8B HND [B,2,H,N,D]", "block kv head token dim", ("B", 2, 8, 16, 128), 32),
    Case("Llama-3-8B fused NHD [B,N,H,2D]", "block token head dim", ("B", 16, 8, 256), 32),
    Case("Llama-3-8B fused HND [B,H,N,2D]", "block head token dim", ("B", 8, 16, 256), 32),
    Case("Llama-3-70B TP8 [2,B,N,H,D]", "kv block token head dim", (2, "B", 16, 1, 128), 80),
    Case("DeepSeek-V3 MLA [B,64,576]", "block token dim", ("B", 64, 576), 61, 64),
)


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
    element = 2
    axes = case.axes.split()
    per_block = element * case.layers
    for extent in case.shape:
        per_block *= extent if isinstance(extent, int) else 1
    per_chunk = CHUNK_TOKENS // case.block_tokens
    chunks = -(-nbytes // (per_block * per_chunk))
    blocks = chunks * per_chunk
    moved = per_block * blocks
    shape = [2 * blocks + 1 if extent == "B" else int(extent) for extent in case.shape]
    caches = [
        torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
        for _ in range(case.layers)
    ]
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
            times["load"].append(_seconds(lambda names=digests: load(context, names)))
            digests = store(context)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "case": case.name,
        "bytes": moved,
        "chunks": chunks,
        "max_programs": max_programs,
        "bit_exact": exact,
        "seconds": {name: _quantiles(values) for name, values in times.items()},
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


def _quantiles(values: list[float]) -> list[float]:
    deciles = statistics.quantiles(values, n=10)
    return [deciles[1], statistics.median(values), deciles[7]]


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:34} {row['bytes'] / 1e6:6.0f} MB  store {row['store_gb_s']:5.1f} GB/s "
        f"({row['store_of_link']:.2f} of link)  load {row['load_gb_s']:5.1f} GB/s "
        f"({row['load_of_link']:.2f} of link)  exact {row['bit_exact']}"
    )
