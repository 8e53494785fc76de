"""Both directions without a pause, for a while: what the link carries when transfers follow each other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .flows import BOTH, PLAIN, Traffic, traffic
from .link import line
from .results import Row, with_ratios
from .saturation import Window, time_beside
from .timing import Spread
from .two_way import FEW

if TYPE_CHECKING:
    from .cases import Case
    from .rig import Rig

PART = "sustained"
SECONDS, ROUNDS = 0.15, 15
"""Of one look: some thirty transfers of 256 MiB a direction; and looks, at most."""

NBYTES = 1 << 30


def run(rig: Rig) -> list[Row]:
    """Measure every case, printing each as it is done."""
    rows = []
    for case in FEW:
        if rig.wants(PART, case.name, BOTH):
            with traffic(rig, case, decoding=False) as both:
                rows.append(measure_sustained(case, both, rig))
            print(line(rows[-1]), flush=True)
    return rows


class Rest:
    """A loop that does nothing for a while."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds

    def window(self) -> Window:
        began = time.perf_counter()
        time.sleep(self._seconds)
        return Window(self._seconds, began, time.perf_counter())


def measure_sustained(case: Case, both: Traffic, rig: Rig, seconds: float = SECONDS) -> Row:
    """One row: what both directions carried in a second, as the time of 1 GiB."""
    flows = {name: list(ways.values()) for name, ways in both.flows.items()}
    found = time_beside(Rest(seconds), flows, min(rig.options.rounds, ROUNDS))
    times = {name: NBYTES / sum(rates.values()) for name, rates in found.rates.items()}
    return with_ratios(
        Row(
            part=PART,
            case=case.name,
            variant=rig.variant,
            direction=BOTH,
            ids="random",
            bytes=NBYTES,
            run_bytes=both.run_bytes,
            max_programs=rig.max_programs,
            bit_exact=both.exact,
            traffic=1,
            ceiling=PLAIN,
            seconds={name: Spread(value, value, value) for name, value in times.items()},
            absent=both.absent,
        )
    )
