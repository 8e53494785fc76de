"""Whole chunks between a cache and pinned memory, against one plain copy of 256 MiB.

Every layout both ways, with checksums. A payload of 8 MiB is one chunk of fewer tokens, for a chunk
of 256 tokens is larger for most models. Beside the device's time of ours stands what the host sees:
how long the call takes, and how long until everything is done.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

from . import baselines, cases
from .cases import CASES, Case
from .moving import Transfer, finish
from .plain_link import CEILING
from .results import OURS, Row, with_ratios
from .timing import Contender, measure
from .trials import CHUNK_TOKENS, DIRECTIONS, Trial
from .workload import set_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .rig import Rig

PART = "link"
LARGE_MIB, SMALL_MIB = 64, 8
FEW = (
    Case(cases.LLAMA_8B, cases.KV_FIRST),
    Case(cases.LLAMA_8B, cases.KV_FIRST_HND),
    Case(cases.MLA_64, cases.LATENT),
)
"""That are also measured at the size a person chooses."""


def link_trials(rig: Rig) -> Iterator[Trial]:
    sizes = [(LARGE_MIB, CASES), (SMALL_MIB, CASES), (rig.options.size_mb, FEW)]
    for mib, some in sizes:
        for case in some:
            tokens = CHUNK_TOKENS
            if mib == SMALL_MIB:
                tokens = case.blocks_for(mib << 20) * case.block_tokens
            for direction in DIRECTIONS:
                if rig.wants(PART, case.name, direction, mib):
                    yield Trial(case, direction, mib << 20, chunk_tokens=tokens)


def run(rig: Rig) -> list[Row]:
    """Measure every trial, printing each as it is done."""
    rows = []
    for trial in link_trials(rig):
        rows.append(measure_link(trial, rig))
        print(line(rows[-1]), flush=True)
    return rows


def measure_link(trial: Trial, rig: Rig) -> Row:
    work = set_up(trial, rig.device, rig.memory)
    mover = rig.open_mover(work)
    try:
        ours = Transfer.of(mover, work)
        work.poison()
        exact = ours.is_exact()
        others, absent = baselines.enter(work, baselines.TO_HOST)
        contenders = [
            Contender(OURS, ours.run, work.moved),
            rig.link.contender(work.gathers),
            *others,
        ]
        seconds = measure(contenders, rig.options.rounds, rig.clock)
        parts = _host_seconds(ours, rig)
    finally:
        mover.close()
    return with_ratios(
        Row(
            part=PART,
            case=trial.case.name,
            variant=rig.variant,
            direction=trial.direction,
            ids=trial.ids,
            bytes=work.moved,
            run_bytes=work.run_bytes,
            max_programs=rig.max_programs,
            bit_exact=exact,
            traffic=1,
            ceiling=CEILING,
            seconds=seconds,
            moved={c.name: c.moved for c in contenders if c.moved != work.moved},
            absent=absent,
            parts=parts,
            path=ours.path(),
        )
    )


def _host_seconds(ours: Transfer, rig: Rig) -> dict[str, float]:
    """Medians by the host's clock: of the call, and from the call until it is done.

    So for ours, and for a plain copy of as many bytes.
    """
    called, done, plain = [], [], []
    for _ in range(rig.options.rounds):
        rig.drain()
        start = time.perf_counter()
        moved = ours.queue(ours.mover.ready())
        called.append(time.perf_counter() - start)
        finish(moved.done)
        done.append(time.perf_counter() - start)
        start = time.perf_counter()
        rig.link.copy(ours.work.gathers, ours.work.moved)
        rig.drain()
        plain.append(time.perf_counter() - start)
    return {
        "call": median(called),
        "call_to_done": median(done),
        "link_call_to_done": median(plain),
    }


def line(row: Row) -> str:
    """One row for the terminal: rates as parts of the link's."""
    others = "  ".join(
        f"{name} {row.of_ceiling(name):.2f}"
        for name in row.seconds
        if name not in (OURS, row.ceiling)
    )
    path = f"  {row.path}" if row.path else ""
    host = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in row.parts.items())
    exact = "" if row.bit_exact else "  NOT BIT-EXACT"
    return (
        f"{row.title:58} {row.gb_s(OURS):5.1f} GB/s  {row.of_ceiling(OURS):.3f} of the link  "
        f"{others}{path}" + (f"  (us: {host})" if host else "") + exact
    )
