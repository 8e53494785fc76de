"""Store and load through a real server process, against one pinned copy of the same bytes.

Each case is interleaved with the link in one run, so a figure is a ratio and not a mood of the
machine. Every loaded byte is compared before anything is timed.
"""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.views import group_of

from .cases import CASES, Case
from .results import OURS, Row, with_ratios
from .timing import spread_of
from .trials import CHUNK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_kernels.transfer.context import EngineDrivenContext

    from .options import Options

TIMEOUT = 120.0


def run(options: Options, device: str = "cuda:0") -> list[Row]:
    """Measure every case both ways, printing each as it is done."""
    rows = []
    with spawn_server(size_gb=5 * options.size_mb / 1024, chunk_size=CHUNK_TOKENS) as server:
        for case in CASES:
            if options.wants(case.name):
                rows += _measure(case, options, device, server.url)
                print(_line(rows[-2]), _line(rows[-1]), sep="\n", flush=True)
    return rows


def _measure(case: Case, options: Options, device: str, url: str) -> list[Row]:
    axes = case.axes.split()
    blocks = case.blocks_for(options.size_mb << 20, CHUNK_TOKENS // case.block_tokens)
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
        max_programs=options.max_programs,
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
        for _ in range(options.rounds):
            times["link_out"].append(_seconds(lambda: host.copy_(there)))
            times["store"].append(_seconds(lambda: store(context)))
            times["link_in"].append(_seconds(lambda: there.copy_(host)))
            times["load"].append(_seconds(partial(load, context, digests)))
            digests = store(context)
    return [
        with_ratios(
            Row(
                case=case.name,
                variant="plain",
                direction=direction,
                ids="random",
                bytes=moved,
                run_bytes=0,
                max_programs=options.max_programs,
                bit_exact=exact,
                traffic=1,
                ceiling="link",
                seconds={OURS: spread_of(times[direction]), "link": spread_of(times[link])},
            )
        )
        for direction, link in (("store", "link_out"), ("load", "link_in"))
    ]


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start


def _line(row: Row) -> str:
    return (
        f"{row.title:48} {row.gb_s(OURS):5.1f} GB/s  {row.of_ceiling(OURS):.2f} of the link  "
        f"exact {row.bit_exact}"
    )
