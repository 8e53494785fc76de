"""``lmcache-kernels demo``: the whole path on this machine, checked byte by byte.

Starts a cache server, builds paged caches in three layouts on the GPU (or CPU) it finds, stores
them, wipes the pages, loads them into other blocks and compares every byte.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.errors import KVTransferError
from lmcache_kernels.views import group_of

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
TIMEOUT = 60.0
ROUNDS = 3
"""Each figure is the best of this many."""


@dataclass(frozen=True)
class DemoLayout:
    """``shape``: of one layer, ``blocks`` standing for the number of blocks."""

    name: str
    axes: str
    shape: Callable[[int], tuple[int, ...]]
    layers: int


LAYOUTS = (
    DemoLayout(
        "NHD",
        "kv block token head dim",
        lambda blocks: (2, blocks, BLOCK_TOKENS, 8, 128),
        layers=16,
    ),
    DemoLayout(
        "HND, fused K|V",
        "block head token dim",
        lambda blocks: (blocks, 8, BLOCK_TOKENS, 256),
        layers=16,
    ),
    DemoLayout(
        "MLA",
        "block token dim",
        lambda blocks: (blocks, BLOCK_TOKENS, 576),
        layers=60,
    ),
)


@dataclass(frozen=True)
class Figures:
    """Bytes moved, seconds of each step, and whether every byte came back."""

    nbytes: int
    store: float
    load: float
    plain_out: float
    plain_in: float
    exact: bool


def run_demo(*, size_mb: int = 256, device: str = "auto") -> int:
    """Run the demo and print its table.

    Args:
        size_mb: payload of each layout in MiB, rounded up to whole chunks. Below 17 it has fewer
            layers, so that a chunk is no larger than that. Twice as much, at most 64 MiB more, is
            needed in /dev/shm.
        device: ``cpu``, ``cuda`` (or ``cuda:N``), or ``auto`` for a GPU if there is one.

    Returns:
        0 when every byte came back, else 1.
    """
    console = Console()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        console.print("[red]failed:[/red] torch sees no CUDA device; use --device cpu")
        return 1
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    console.print(f"device: {_device_name(device)}")
    results: list[tuple[DemoLayout, Figures]] = []
    # Room for one round of a layout: later rounds evict earlier ones and use their slots again, so
    # that the best round writes memory that was touched before, as in a server that has run a while.
    # Rounding up to whole chunks adds less than a chunk, which is not larger than the payload.
    arena_gb = (size_mb + min(size_mb, 63) + 1) / 1024
    try:
        with (
            _progress(console) as progress,
            spawn_server(size_gb=arena_gb, chunk_size=CHUNK_TOKENS) as server,
        ):
            bar = progress.add_task("", total=len(LAYOUTS) * (ROUNDS * 2 + 2))
            for layout in LAYOUTS:
                progress.update(bar, description=layout.name)
                figures = _measure(
                    layout, size_mb << 20, device, server.url, lambda: progress.advance(bar)
                )
                results.append((layout, figures))
    except KVTransferError as error:
        console.print(f"[red]failed:[/red] {error}")
        return 1
    console.print(_table(results))
    return 0 if all(figures.exact for _, figures in results) else 1


def _measure(
    layout: DemoLayout, nbytes: int, device: str, url: str, step: Callable[[], None]
) -> Figures:
    per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
    per_layer = torch.Size(layout.shape(1)).numel() * 2
    layers = min(layout.layers, nbytes // (per_layer * per_chunk))
    per_block = per_layer * layers
    chunks = -(-nbytes // (per_block * per_chunk))
    blocks = chunks * per_chunk
    # Twice the blocks and one to spare: what is loaded goes elsewhere than where it came from.
    caches = [_random(layout.shape(2 * blocks + 1), device, seed) for seed in range(layers)]
    order = torch.randperm(2 * blocks + 1, generator=torch.Generator().manual_seed(7)).tolist()
    source, target = order[:blocks], order[blocks : 2 * blocks]
    axis = layout.axes.split().index("block")
    expected = [cache.index_select(axis, _ids(source, device)) for cache in caches]
    step()

    with connect(
        url, [group_of(caches, layout.axes)], chunk_tokens=CHUNK_TOKENS, timeout=TIMEOUT
    ) as context:
        # Loading compiled kernels and touching memory for the first time is not the copy.
        context.submit_store([secrets.token_bytes(32)], [source]).result.result(TIMEOUT)
        stores, names = [], []
        for _ in range(ROUNDS):
            names = [secrets.token_bytes(32) for _ in range(chunks)]
            start = time.perf_counter()
            context.submit_store(names, [source]).result.result(TIMEOUT)
            stores.append(time.perf_counter() - start)
            step()
        for cache in caches:
            cache.zero_()
        loads, loaded = [], 0
        for _ in range(ROUNDS):
            start = time.perf_counter()
            loaded = context.submit_retrieve(names, [target]).result(TIMEOUT)
            loads.append(time.perf_counter() - start)
            step()
    exact = loaded == chunks and all(
        torch.equal(
            cache.index_select(axis, _ids(target, device)).view(torch.uint8),
            wanted.view(torch.uint8),
        )
        for cache, wanted in zip(caches, expected, strict=True)
    )
    del caches, expected
    out, into = _plain_copies(per_block * blocks, device)
    step()
    return Figures(per_block * blocks, min(stores), min(loads), out, into, exact)


def _plain_copies(nbytes: int, device: str) -> tuple[float, float]:
    """Seconds of one copy of the same bytes in one piece, out of the device and into it."""
    pinned = device != "cpu"
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for dst, src in ((host, there), (there, host)):
        best = float("inf")
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            dst.copy_(src)
            best = min(best, time.perf_counter() - start)
        seconds.append(best)
    return seconds[0], seconds[1]


def _random(shape: tuple[int, ...], device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    bits = torch.randint(
        -(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=generator
    )
    return bits.view(torch.bfloat16)  # every bit pattern, NaN among them


def _ids(blocks: list[int], device: str) -> torch.Tensor:
    return torch.tensor(blocks, device=device)


def _device_name(device: str) -> str:
    return device if device == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:30}"), BarColumn(), TimeElapsedColumn(), console=console
    )


def _table(results: list[tuple[DemoLayout, Figures]]) -> Table:
    table = Table(
        title="store, wipe, load into other blocks, compare every byte",
        caption="of copy: fraction of one plain copy of the same bytes",
    )
    for name in (
        "layout",
        "MiB",
        "store GB/s",
        "of copy",
        "load GB/s",
        "of copy",
        "bit-exact",
    ):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for layout, f in results:
        table.add_row(
            layout.name,
            f"{f.nbytes / 2**20:.0f}",
            f"{f.nbytes / f.store / 1e9:.1f}",
            f"{f.plain_out / f.store:.2f}",
            f"{f.nbytes / f.load / 1e9:.1f}",
            f"{f.plain_in / f.load:.2f}",
            "yes" if f.exact else "[red]NO[/red]",
        )
    return table
