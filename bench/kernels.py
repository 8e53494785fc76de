"""Gather and scatter inside GPU memory, against a plain device copy of the same bytes.

A rate counts bytes read and bytes written. Ids are random and their upload is part of the copy; the
working set is many times the L2 cache. Every copied byte is compared before anything is timed.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.copying import prepare_copy
from lmcache_kernels.views import group_of

from .cases import CASES, Case

if TYPE_CHECKING:
    from collections.abc import Callable


def run(
    *, size_mb: int, rounds: int, max_programs: int | None, device: str = "cuda:0"
) -> list[dict[str, Any]]:
    """Measure every case in both directions; one row each, seconds as [p20, p50, p80]."""
    rows = []
    for case in CASES:
        for direction in ("gather", "scatter"):
            rows.append(_measure(case, direction, size_mb << 20, rounds, max_programs, device))
            print(_line(rows[-1]), flush=True)
    return rows


def _measure(
    case: Case,
    direction: str,
    nbytes: int,
    rounds: int,
    max_programs: int | None,
    device: str,
) -> dict[str, Any]:
    blocks = case.blocks_for(nbytes)
    moved = blocks * case.block_bytes
    caches = case.tensors(blocks, device)
    group = group_of(caches, case.axes)
    layout = ChunkLayout.of([group], blocks * case.block_tokens)
    chunk = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8, device=device)
    other = torch.empty_like(chunk)
    ((dense,),) = layout.planes_at(chunk.data_ptr(), device)
    ids = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()
    inside = range(blocks)
    pair = (dense, group.planes[0]) if direction == "gather" else (group.planes[0], dense)
    where = (inside, ids) if direction == "gather" else (ids, inside)
    prepared = prepare_copy(*pair, max_programs=max_programs)

    def copy() -> None:
        prepared.copy(*where)

    copy()
    exact = _is_exact(case, caches, chunk, ids, layout)
    times: dict[str, list[float]] = {"plain": [], "copy": []}
    for _ in range(3):
        other.copy_(chunk)
        copy()
    events = []
    for _ in range(rounds):
        events.append(("plain", *_timed(lambda: other.copy_(chunk))))
        events.append(("copy", *_timed(copy)))
    torch.cuda.current_stream().synchronize()
    for name, start, end in events:
        times[name].append(start.elapsed_time(end) / 1e3)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "case": case.name,
        "direction": direction,
        "bytes": moved,
        "run_bytes": case.run_bytes,
        "max_programs": max_programs,
        "bit_exact": exact,
        "seconds": {name: quantiles(values) for name, values in times.items()},
        "gb_s": 2 * moved / median["copy"] / 1e9,
        "plain_gb_s": 2 * moved / median["plain"] / 1e9,
        "of_plain": median["plain"] / median["copy"],
    }


def _is_exact(
    case: Case, caches: list[torch.Tensor], chunk: torch.Tensor, ids: list[int], layout: ChunkLayout
) -> bool:
    """Does the chunk hold what torch's own indexing finds in the caches?"""
    axes = case.axes.split()
    where = torch.tensor(ids, device=chunk.device)
    target = [axis for axis in ("kv", "block", "token", "head", "dim") if axis in axes]
    offset = 0
    for cache in caches:
        picked = cache.index_select(axes.index("block"), where)
        wanted = picked.permute([axes.index(axis) for axis in target]).reshape(-1)
        size = wanted.numel() * wanted.element_size()
        if not torch.equal(chunk[offset : offset + size].view(wanted.dtype), wanted):
            return False
        offset += size
    return offset == layout.nbytes


def _timed(action: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    action()
    end.record()
    return start, end


def quantiles(values: list[float]) -> list[float]:
    """[p20, p50, p80]."""
    deciles = statistics.quantiles(values, n=10)
    return [deciles[1], statistics.median(values), deciles[7]]


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:34} {row['direction']:8} run {row['run_bytes']:6} B  "
        f"{row['gb_s']:5.0f} GB/s  {row['of_plain']:.3f} of a plain copy  "
        f"exact {row['bit_exact']}"
    )
