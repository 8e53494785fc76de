"""Which path a transfer takes: a pure function of its shape and of what this machine was seen to do."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

PATHS = ("staged", "direct", "batch")

DISTURBING_SECONDS = {True: 100e-6, False: 200e-6}
"""A path whose kernels hold multiprocessors while the link works may do so for this long, beside
decoding and beside anything else: one or two thousandths of the time if it happens ten times a second.
Longer, it slows decoding several times (H200: kernels on pinned memory 1.2x to 8x, 30 November
2026)."""

DISTURBING = {"direct"}
QUICKER = 1.1
"""Such a path is worth it only where the best other takes so many times as long."""


@dataclass(frozen=True, slots=True)
class Job:
    """Attributes:
    storing: from the cache to host memory; False: back.
    run_bytes: of one dense run.
    runs: how many there are.
    decoding: the engine decodes meanwhile.
    """

    storing: bool
    run_bytes: int
    runs: int
    decoding: bool = False


class Sample(msgspec.Struct, frozen=True):
    """How long a transfer took from the call until it was done."""

    path: str
    storing: bool
    run_bytes: int
    runs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Attributes:
    path: a name in :data:`PATHS`.
    why: one line.
    """

    path: str
    why: str


class Planner:
    """Chooses by interpolating between measured transfers, in the logarithms of everything.

    Args:
        samples: at every crossing of some run sizes and some counts, as far as they were measured;
            None where nothing is known of the machine.
    """

    def __init__(self, samples: Sequence[Sample] | None) -> None:
        tables: dict[tuple[str, bool], dict[int, dict[int, float]]] = {}
        for one in samples or ():
            of_path = tables.setdefault((one.path, one.storing), {})
            of_path.setdefault(one.run_bytes, {})[one.runs] = one.seconds
        self._tables = tables

    def choose(self, job: Job, possible: Sequence[str]) -> Choice:
        """The best of the possible paths ("staged" is always one)."""
        expected = self.expected(job, possible)
        if "staged" not in expected:
            return Choice("staged", "staged: this machine is not calibrated")
        best = min(expected, key=lambda path: expected[path])
        times = ", ".join(f"{path} {seconds * 1e6:.0f} us" for path, seconds in expected.items())
        way = "store" if job.storing else "load"
        return Choice(best, f"{best}: {way} of {job.runs} x {job.run_bytes} B, expected {times}")

    def expected(self, job: Job, possible: Sequence[str]) -> dict[str, float]:
        """Expected seconds of the paths that may be taken."""
        seconds = {path: self.seconds(path, job) for path in possible}
        known = {path: time for path, time in seconds.items() if time is not None}
        return allowed(known, decoding=job.decoding)

    def seconds(self, path: str, job: Job) -> float | None:
        """How long the path is expected to take; None if it was never measured."""
        table = self._tables.get((path, job.storing))
        if not table:
            return None
        by_run = {run: _between(counts, job.runs) for run, counts in table.items()}
        return _between(by_run, job.run_bytes)


def allowed(seconds: dict[str, float], *, decoding: bool) -> dict[str, float]:
    """Those of some paths that may be taken, given how long each of them takes.

    Args:
        decoding: the engine decodes meanwhile.
    """
    others = [time for path, time in seconds.items() if path not in DISTURBING]
    most = min([DISTURBING_SECONDS[decoding], *(time / QUICKER for time in others)])
    return {path: time for path, time in seconds.items() if path not in DISTURBING or time <= most}


def _between(points: dict[int, float], at: int) -> float:
    """The value at a place between measured ones; above the last it grows as the place does."""
    places = sorted(points)
    if at <= places[0]:
        return points[places[0]]
    if at >= places[-1]:
        return points[places[-1]] * at / places[-1]
    upper = bisect_right(places, at)
    low, high = places[upper - 1], places[upper]
    part = (log(at) - log(low)) / (log(high) - log(low))
    return exp((1 - part) * log(points[low]) + part * log(points[high]))
