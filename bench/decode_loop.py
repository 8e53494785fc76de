"""How much longer a step of an engine takes while transfers fill the link, one way and both.

Two loops: a decode step, limited by memory, and a large matrix product, limited by arithmetic. Each is
timed alone, beside the library's transfers, beside plain copies and beside LMCache's staged path, in
turn, and what was copied meanwhile stands beside each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import cases
from .cases import Case
from .flows import BOTH, traffic
from .loops import GraphLoop, decode_steps, gemm_steps
from .results import Row, with_ratios
from .saturation import ALONE, time_beside
from .timing import Contender, measure
from .trials import DIRECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from .flows import Traffic
    from .loops import Steps
    from .rig import Rig
    from .saturation import Loop
    from .timing import Spread

CASE = Case(cases.LLAMA_8B, cases.KV_FIRST)
COPY = "hbm_copy"
COPY_BYTES = 2 << 30
MODES = {**{direction: (direction,) for direction in DIRECTIONS}, BOTH: DIRECTIONS}
"""Which directions are filled."""

DECODE = "decode"
GEMM = "gemm"
PARTS: dict[str, Callable[[str], Steps]] = {DECODE: decode_steps, GEMM: gemm_steps}

ROUNDS = {DECODE: 8, GEMM: 25}
"""At most: a window is many steps already. Large products heat the device, so that its clock and with it
their time change by 2 % from one window to the next; it takes more of them."""


def run(part: str, rig: Rig) -> list[Row]:
    """Measure every mode, printing each as it is done."""
    modes = [mode for mode in MODES if rig.wants(part, CASE.name, mode)]
    if not modes:
        return []
    steps = PARTS[part](rig.device)
    loop = GraphLoop(steps, rig.device)
    copy = measure([_device_copy(rig.device)], ROUNDS[part], rig.clock) if steps.nbytes else {}
    rows = []
    with traffic(rig, CASE, decoding=part == DECODE) as both:
        for mode in modes:
            rows.append(measure_beside(part, mode, loop, steps.nbytes, both, rig, copy))
            print(line(rows[-1]), flush=True)
    return rows


def measure_beside(
    part: str,
    mode: str,
    loop: Loop,
    nbytes: int,
    both: Traffic,
    rig: Rig,
    copy: dict[str, Spread],
) -> Row:
    """One row.

    Args:
        nbytes: read by a step.
        copy: the time of a copy inside the device, which shows what its memory can do.
    """
    flows = {name: [ways[way] for way in MODES[mode]] for name, ways in both.flows.items()}
    found = time_beside(loop, flows, min(rig.options.rounds, ROUNDS[part]))
    moved = dict.fromkeys(found.seconds, nbytes) if nbytes else {}
    return with_ratios(
        Row(
            part=part,
            case=CASE.name,
            variant=rig.variant,
            direction=mode,
            ids="random",
            bytes=0,
            run_bytes=both.run_bytes,
            max_programs=rig.max_programs,
            bit_exact=both.exact,
            traffic=1,
            ceiling=ALONE,
            seconds={**found.seconds, **copy},
            moved={**moved, **dict.fromkeys(copy, 2 * COPY_BYTES)},
            absent=both.absent,
            beside=found.rates,
        )
    )


def _device_copy(device: str) -> Contender:
    """Bytes read and bytes written count."""
    origin = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    to = torch.empty_like(origin)
    return Contender(COPY, lambda: to.copy_(origin), 2 * COPY_BYTES)


def line(row: Row) -> str:
    """One row for the terminal."""
    beside = "  ".join(
        f"{name} x{row.slowdown(name):.3f} at "
        + " + ".join(f"{rate / 1e9:.1f}" for rate in rates.values())
        + " GB/s"
        for name, rates in row.beside.items()
    )
    memory = ""
    if COPY in row.seconds:
        part = row.rate(ALONE) / row.rate(COPY)
        memory = f", weights read at {part:.2f} of the rate of a copy"
    exact = "" if row.bit_exact else "  NOT BIT-EXACT"
    return f"{row.title:48} alone {row.seconds[ALONE].p50 * 1e3:.2f} ms{memory}  {beside}{exact}"
