"""Tile shapes against each other: where the constants of ``copy_config`` come from, and new ones.

Ours is what ``choose_config`` picks; the contenders are other tiles, named by KiB and warps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.copy_config import MAX_GRID, choose_config, tile_of
from lmcache_kernels.copy_plan import CopyPlan
from lmcache_kernels.ids import pack_ids
from lmcache_kernels.kernel_copy import KernelCopy

from . import cases
from .cases import Case
from .kernels import CEILING, row_of
from .results import OURS
from .timing import Contender, DeviceClock, measure
from .trials import DIRECTIONS, Trial
from .workload import set_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmcache_kernels.copy_config import CopyConfig
    from lmcache_kernels.copy_plan import Side

    from .options import Options
    from .results import Row
    from .timing import Clock
    from .workload import Workload

FREE = [(2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (16, 4)]
BOUNDED = [(16, 4), (32, 8), (64, 8), (64, 16), (128, 16)]
"""KiB and warps of the tiles that are tried where the grid is free, and where it is bounded."""


def sweep_trials(size_mb: int) -> Iterator[Trial]:
    few = [
        Case(cases.LLAMA_8B, cases.KV_FIRST),
        Case(cases.LLAMA_8B, cases.KV_FIRST_HND),
        Case(cases.LLAMA_8B, cases.FUSED_HND),
        Case(cases.LLAMA_70B_TP8, cases.KV_FIRST),
        Case(cases.MLA_64, cases.LATENT),
        Case(cases.MLA_16, cases.LATENT),
    ]
    for case in few:
        for direction in DIRECTIONS:
            for variant in ("plain", "checksum"):
                for max_programs in (None, 16, 32):
                    yield Trial(
                        case, direction, size_mb << 20, variant=variant, max_programs=max_programs
                    )


def run(options: Options, device: str = "cuda:0") -> list[Row]:
    """Measure every trial, printing the best tiles of each as it is done."""
    rows = []
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        clock = DeviceClock([device])
        for trial in sweep_trials(options.size_mb):
            if options.wants(trial.title):
                rows.append(measure_tiles(set_up(trial, device), options.rounds, clock))
                print(best(rows[-1]), flush=True)
    return rows


def measure_tiles(work: Workload, rounds: int, clock: Clock) -> Row:
    trial = work.trial
    chunk_side: Side | None = None if trial.variant == "plain" else "dst" if work.gathers else "src"
    plan = CopyPlan.of([[(work.dst, work.src)]], chunk_side)
    coalesced = plan.legs[0].dst
    tiles = {OURS: choose_config(coalesced, plan.unit, trial.max_programs)}
    for kib, warps in FREE if trial.max_programs is None else BOUNDED:
        tiles[f"{kib}K_w{warps}"] = tile_of(
            coalesced, plan.unit, kib << 10, warps, trial.max_programs or MAX_GRID
        )
    copies = {name: _copy(work, plan, config) for name, config in tiles.items()}
    work.poison()
    copies[OURS]()
    exact = work.is_exact()
    contenders = [Contender(name, copy, work.moved) for name, copy in copies.items()]
    other = torch.empty_like(work.chunk)
    contenders.append(Contender(CEILING, partial(other.copy_, work.chunk), work.moved))
    return row_of(work, contenders, measure(contenders, rounds, clock), exact, {})


def _copy(work: Workload, plan: CopyPlan, config: CopyConfig) -> Callable[[], None]:
    copy = KernelCopy(plan, work.device, max_programs=None, max_launch_bytes=1 << 40, config=config)
    ids = [
        (
            pack_ids(work.dst_ids, work.dst.num_blocks, "dst_ids", True),
            pack_ids(work.src_ids, work.src.num_blocks, "src_ids", False),
        )
    ]
    sums = None
    if plan.chunk_side is not None:
        shape = (work.chunks.outer_blocks, plan.rows)
        sums = torch.zeros(shape, dtype=torch.int64, device=work.device)
    return lambda: copy.copy(ids, sums)


def best(row: Row, count: int = 4) -> str:
    """The fastest tiles of one row."""
    found = sorted(
        ((row.of_ceiling(name), name) for name in row.seconds if name != row.ceiling), reverse=True
    )
    return f"{row.title:62} " + "  ".join(f"{part:.3f} {name}" for part, name in found[:count])
