"""Until an engine can begin with layer 0: loads that come layer by layer against whole ones.

The device's time from the first copy of the load until layer 0 is there, and, for the same loads, until
everything is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from . import cases
from .cases import Case
from .moving import Transfer, finish, join
from .results import OURS, Row, with_ratios
from .timing import Contender, measure
from .trials import Trial
from .workload import set_up

if TYPE_CHECKING:
    from lmcache_kernels.transfer.moving.moves import Moved

    from .rig import Rig

PART = "layers"
FEW = (Case(cases.LLAMA_8B, cases.KV_FIRST), Case(cases.MLA_64, cases.LATENT))
SIZES_MIB = (64, 256)
WHOLE, LAST = "whole", "last_layer"


def run(rig: Rig) -> list[Row]:
    """Measure every case and size, printing each as it is done."""
    rows = []
    for case in FEW:
        for mib in SIZES_MIB:
            if rig.wants(PART, case.name, "scatter", mib):
                rows.append(measure_layers(Trial(case, "scatter", mib << 20), rig))
                print(line(rows[-1]), flush=True)
    return rows


def measure_layers(trial: Trial, rig: Rig) -> Row:
    work = set_up(trial, rig.device, rig.memory)
    mover = rig.open_mover(work)
    order = [list(range(len(work.views)))]
    transfer = Transfer.of(mover, work)

    def by_layers() -> Moved:
        return mover.scatter(transfer.moves, mover.ready(), order)

    def until_layer_0() -> None:
        moved = by_layers()
        join(mover, replace(moved, done=moved.layers[0][1]))

    try:
        work.poison()
        moved = by_layers()
        finish(moved.done)
        exact = transfer.holds(moved)
        seconds = measure(
            [
                Contender(OURS, until_layer_0, work.moved),
                Contender(LAST, lambda: join(mover, by_layers()), work.moved),
                Contender(WHOLE, transfer.run, work.moved),
            ],
            rig.options.rounds,
            rig.clock,
        )
    finally:
        mover.close()
    return with_ratios(
        Row(
            part=PART,
            case=trial.case.name,
            variant=rig.variant,
            direction="scatter",
            ids="random",
            bytes=work.moved,
            run_bytes=work.run_bytes,
            max_programs=rig.max_programs,
            bit_exact=exact,
            traffic=1,
            ceiling="",
            seconds=seconds,
        )
    )


def line(row: Row) -> str:
    """One row for the terminal."""
    times = ", ".join(
        f"{what} {row.seconds[name].p50 * 1e6:.0f} us"
        for name, what in ((OURS, "layer 0"), (LAST, "the last"), (WHOLE, "loaded whole"))
    )
    return f"{row.title:58} {times}" + ("" if row.bit_exact else "  NOT BIT-EXACT")
