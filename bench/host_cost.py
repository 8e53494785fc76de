"""What a prepared copy costs the host: microseconds a call, upload of the ids and launch included.

The device is drained every few calls, outside the clock, so that its queue never fills and no call
waits for it. Beside it the same is asked of Triton's ordinary launch of a kernel with 15 runtime
arguments, ids already uploaded, and of LMCache's call, ids uploaded as LMCache does it.
"""

from __future__ import annotations

import importlib
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcache_kernels.copying import prepare_copy

from . import cases
from .baselines import NotApplicable, ready
from .baselines.lmcache_ops import launcher_for
from .cases import Case
from .results import OURS, Row, title_of, with_ratios
from .timing import spread_of
from .trials import CHUNK_TOKENS, Trial
from .workload import set_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .options import Options
    from .workload import Workload

CALLS, CALLS_IN_FLIGHT, WARM_UPS = 2000, 16, 50
COUNTS = (1, 16, 64, 512)
CASE = Case(cases.LLAMA_70B_TP8, cases.KV_FIRST)

KINDS: dict[str, tuple[Callable[[list[int]], Any], Callable[[int], Any]]] = {
    "list, range": (list, range),
    "list": (list, lambda count: list(range(count))),
    "numpy": (partial(np.array, dtype=np.int64), partial(np.arange, dtype=np.int64)),
    "range": (lambda ids: range(len(ids)), range),
}
"""How a caller may hold its ids, of the cache and of the chunks. Engines have lists of blocks; chunks
are filled from the first block on."""


@dataclass(frozen=True)
class Part:
    """A function that is looked up by name on each call; ``made``: it makes the one to be timed."""

    module: str
    path: str
    made: bool = False


PARTS = {
    "ids": Part("lmcache_kernels.copying", "pack_ids"),
    "buffer": Part("lmcache_kernels.call_ring", "CallRing.take"),
    "launch": Part("lmcache_kernels.kernel_copy", "launcher", made=True),
}
"""What a call consists of: check and pack the ids; find pinned memory for them; launch. The rest goes
into moving ids there and into Python."""


def run(options: Options, device: str = "cuda:0") -> list[Row]:
    """Measure every number and kind of ids, printing each as it is done."""
    rows = []
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        drain = torch.cuda.current_stream(device).synchronize
        work = set_up(Trial(CASE, "gather", _bytes_for(max(COUNTS))), device)
        for count in COUNTS:
            for kind in KINDS:
                if options.wants(title_of(CASE.name, f"{count} ids", "plain", kind, None)):
                    rows.append(measure_call(work, count, kind, CALLS, drain))
                    print(line(rows[-1]), flush=True)
    return rows


def measure_call(
    work: Workload, count: int, kind: str, calls: int, drain: Callable[[], object]
) -> Row:
    """One row: ``count`` ids held as ``kind``."""
    of_cache, of_chunks = KINDS[kind]
    src_ids, dst_ids = of_cache(work.ids[:count]), of_chunks(count)
    ids = [int(block) for block in src_ids]
    prepared = prepare_copy(work.dst, work.src)
    ours = partial(prepared.copy, dst_ids, src_ids)
    work.poison()
    ours()
    exact = replace(work, ids=ids).is_exact()
    others, absent = _others(work, ids)
    actions: dict[str, Callable[[], object]] = {OURS: ours, **others}
    seconds = {name: spread_of(_times(act, calls, drain)) for name, act in actions.items()}
    with _parts_timed() as parts:
        watched = prepare_copy(work.dst, work.src)
        _times(partial(watched.copy, dst_ids, src_ids), calls, drain)
    return with_ratios(
        Row(
            case=CASE.name,
            variant="plain",
            direction=f"{count} ids",
            ids=kind,
            bytes=0,
            run_bytes=0,
            max_programs=None,
            bit_exact=exact,
            traffic=1,
            ceiling="",
            seconds=seconds,
            absent=absent,
            parts={name: _per_call(times, calls) for name, times in parts.items() if times},
        )
    )


def line(row: Row) -> str:
    """One row for the terminal."""
    times = "  ".join(f"{name} {s.p50 * 1e6:6.1f} us" for name, s in row.seconds.items())
    parts = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in row.parts.items())
    return f"{row.direction:8} as {row.ids:11} {times}" + (f"  ({parts})" if parts else "")


def _others(
    work: Workload, ids: list[int]
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    prepare = {"triton_launch": _triton_launch, "lmcache": _lmcache}
    return ready({name: partial(one, work, ids) for name, one in prepare.items()})


def _triton_launch(work: Workload, ids: list[int]) -> Callable[[], object]:
    if work.device == "cpu":
        raise NotApplicable("needs a CUDA device")
    from .jit_launch import launch

    table = torch.zeros(16, dtype=torch.int64, device=work.device)
    launch(table)
    return partial(launch, table)


def _lmcache(work: Workload, ids: list[int]) -> Callable[[], object]:
    if len(ids) % work.blocks_per_chunk:
        raise NotApplicable(f"moves whole objects of {CHUNK_TOKENS} tokens")
    launcher = launcher_for(work, work.chunk)
    launcher(ids)
    return partial(launcher, ids)


def _times(
    action: Callable[[], object], calls: int, drain: Callable[[], object]
) -> Sequence[float]:
    for _ in range(WARM_UPS):
        action()
    found = []
    for number in range(calls):
        if number % CALLS_IN_FLIGHT == 0:
            drain()
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    drain()
    return found


@contextmanager
def _parts_timed() -> Iterator[dict[str, list[float]]]:
    """For its length the functions of ``PARTS`` note how long each of their calls took."""
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    before = []
    for name, part in PARTS.items():
        owner: Any = importlib.import_module(part.module)
        *outer, attribute = part.path.split(".")
        for step in outer:
            owner = getattr(owner, step)
        real = getattr(owner, attribute)
        before.append((owner, attribute, real))
        watch = _noting_what_it_makes if part.made else _noting
        setattr(owner, attribute, watch(real, times[name]))
    try:
        yield times
    finally:
        for owner, attribute, real in before:
            setattr(owner, attribute, real)


def _noting_what_it_makes(real: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    return lambda *arguments, **named: _noting(real(*arguments, **named), times)


def _noting(real: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = real(*arguments, **named)
        times.append(time.perf_counter() - start)
        return result

    return timed


def _per_call(times: list[float], calls: int) -> float:
    """Median seconds of a call, each of which called the part equally often; warm-ups left out."""
    often = len(times) // (calls + WARM_UPS)
    timed = times[-calls * often :]
    return median(sum(timed[at : at + often]) for at in range(0, len(timed), often))


def _bytes_for(blocks: int) -> int:
    return blocks * CASE.block_bytes
