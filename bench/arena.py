"""How soon host memory for chunks can be used: an arena against one ``cudaHostAlloc`` of as many bytes.

The arena is made, mapped a second time as a worker does, and registered in the background; it is
usable when a first copy from the GPU has gone through it, and later it is registered in full. Both
take fresh memory in every round, and take turns in being first: a machine whose memory was never
touched before is slower then.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.transfer.memory.arena import SHM_DIRECTORY, Arena
from lmcache_kernels.transfer.memory.memory_room import tightest_room
from lmcache_kernels.transfer.memory.numa import node_of
from lmcache_kernels.transfer.memory.pinning import PinnedRegion
from lmcache_kernels.transfer.moving.cuda_host import host_runtime

from .options import Options
from .results import OURS, Row, with_ratios
from .timing import spread_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_kernels.transfer.memory.pinning import HostRegistry

HOST_ALLOC = "cudaHostAlloc"
MOST_BYTES = 32 << 30
MOST_ROUNDS = 5
"""Of 32 GiB: half a minute each."""

COPY_BYTES = 256 << 20
WARM_UP_BYTES = 1 << 30
TIMEOUT = 600.0


@dataclass(frozen=True)
class Ready:
    """One round of one contender: seconds from the start, and where they went."""

    usable: float
    registered: float
    exact: bool
    parts: dict[str, float]


def run(options: Options, device: str = "cuda:0") -> list[Row]:
    """Measure and print both rows."""
    nbytes = size_of(options)
    with torch.cuda.device(device):
        sample = torch.randint(256, (min(COPY_BYTES, nbytes),), dtype=torch.uint8, device=device)
        rows = measure(
            nbytes,
            min(options.rounds, MOST_ROUNDS),
            partial(arena_ready, sample=sample, node=node_of(_pci_address(device))),
            partial(host_alloc_ready, sample=sample),
        )
    for row in rows:
        print(line(row), flush=True)
    return [row for row in rows if options.wants(row.title)]


def size_of(options: Options) -> int:
    """Bytes of the arena: what was asked for; 32 GiB by default, or half of what there is."""
    if options.size_mb != Options().size_mb:
        return options.size_mb << 20
    half = tightest_room(SHM_DIRECTORY).free // 2
    return min(MOST_BYTES, half - half % (1 << 20))


def measure(
    nbytes: int, rounds: int, ours: Callable[[int], Ready], theirs: Callable[[int], Ready]
) -> list[Row]:
    """Both rows; before the clock counts everyone had one turn, with less memory."""
    contenders = {OURS: ours, HOST_ALLOC: theirs}
    found: dict[str, list[Ready]] = {name: [] for name in contenders}
    for turn in range(-1, rounds):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            ready = contenders[name](nbytes if turn >= 0 else min(nbytes, WARM_UP_BYTES))
            if turn >= 0:
                found[name].append(ready)
    return [
        with_ratios(
            Row(
                case="arena",
                variant="plain",
                direction=direction,
                ids="random",
                bytes=nbytes,
                run_bytes=0,
                max_programs=None,
                bit_exact=all(ready.exact for rounds in found.values() for ready in rounds),
                traffic=1,
                ceiling="",
                seconds={
                    name: spread_of([getattr(ready, direction) for ready in rounds])
                    for name, rounds in found.items()
                },
                parts={
                    part: statistics.median(ready.parts[part] for ready in found[OURS])
                    for part in found[OURS][0].parts
                },
            )
        )
        for direction in ("usable", "registered")
    ]


def arena_ready(
    nbytes: int,
    sample: torch.Tensor,
    *,
    node: int | None = None,
    registry: HostRegistry | None = None,
) -> Ready:
    start = time.perf_counter()
    arena = Arena.create(nbytes, numa_node=node)
    created = time.perf_counter()
    attached = Arena.attach(arena.name, nbytes)
    region = PinnedRegion(attached.address, nbytes, registry)
    try:
        region.wait_for(attached.address, sample.numel(), TIMEOUT)
        first = time.perf_counter()
        _copy(sample, attached.address)
        usable = time.perf_counter()
        pinned = region.wait_for(attached.address, nbytes, TIMEOUT)
        registered = time.perf_counter()
        _copy(sample, attached.address)
        copied = time.perf_counter()
        exact = _holds(sample, attached.address)
    finally:
        region.close()
        attached.close()
        arena.close()
    if not pinned:
        raise MemoryError(f"an arena of {nbytes} bytes could not be registered")
    return Ready(
        usable - start,
        registered - start,
        exact,
        {
            "create": created - start,
            "first_pieces": first - created,
            "first_copy": usable - first,
            "all_pieces": registered - created,
            "copy_then": copied - registered,
        },
    )


def host_alloc_ready(nbytes: int, sample: torch.Tensor) -> Ready:
    runtime, address = host_runtime(), ctypes.c_void_p()
    start = time.perf_counter()
    code = runtime.cudaHostAlloc(ctypes.byref(address), nbytes, 0)
    allocated = time.perf_counter()
    if code or not address.value:
        raise MemoryError(f"cudaHostAlloc of {nbytes} bytes: CUDA error {code}")
    try:
        _copy(sample, address.value)
        usable = time.perf_counter()
        exact = _holds(sample, address.value)
    finally:
        runtime.cudaFreeHost(address)
    return Ready(usable - start, allocated - start, exact, {})


def line(row: Row) -> str:
    """One row for the terminal."""
    ours, theirs = (row.seconds[name].p50 for name in (OURS, HOST_ALLOC))
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in row.parts.items())
    return (
        f"{row.title:28} {ours:7.3f} s  {HOST_ALLOC} {theirs:7.3f} s  {row.ratios[HOST_ALLOC]:.2f} "
        f"times as fast  ({parts})  exact {row.bit_exact}"
    )


def _copy(sample: torch.Tensor, address: int) -> None:
    _host(address, sample.numel()).copy_(sample, non_blocking=True)
    if sample.is_cuda:
        torch.cuda.current_stream().synchronize()


def _holds(sample: torch.Tensor, address: int) -> bool:
    return torch.equal(_host(address, sample.numel()), sample.cpu())


def _host(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _pci_address(device: str) -> str:
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
