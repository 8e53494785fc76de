"""How often the planner picks the best path: transfers of many shapes, every path measured in turn.

The planner sees the machine's calibration only, made at the start of the run; the shapes lie at and
between the calibrated ones.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.moving import calibration
from lmcache_kernels.transfer.moving.planner import Job, Planner, allowed

from .results import Row, with_ratios
from .timing import Spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .options import Options

RUN_BYTES = (256, 512, 1024, 3072, 4096, 12 << 10, 16 << 10, 48 << 10, 64 << 10, 192 << 10, 1 << 20)
COUNTS = (16, 24, 64, 192, 512, 1536, 4096, 8192)
BEST, CHOSEN = "best", "ours"
WITHIN = 0.05


def run(options: Options, device: str = "cuda:0") -> list[Row]:
    """Measure every shape, then print how far from the best the choices are."""
    planner = Planner(calibration.calibrate(device).samples)
    rows: list[Row] = []
    for run_bytes, runs in shapes():
        if options.wants(f"{runs} x {run_bytes} B"):
            rows += rows_of(planner, device, run_bytes, runs, options.rounds)
    good = sum(row.rate(CHOSEN) >= (1 - WITHIN) * row.rate(BEST) for row in rows)
    print(f"within {WITHIN:.0%} of the best path: {good} of {len(rows)} = {good / len(rows):.3f}")
    return rows


def shapes() -> Iterator[tuple[int, int]]:
    for run_bytes in RUN_BYTES:
        for count in COUNTS:
            if run_bytes * count <= calibration.MOST_BYTES:
                yield run_bytes, count


def rows_of(planner: Planner, device: str, run_bytes: int, runs: int, rounds: int) -> Iterator[Row]:
    with closing(calibration.Probe(device, run_bytes, runs)) as probe:
        samples = list(probe.measure(rounds))
        exact = probe.is_exact()
    for storing in (True, False):
        seconds = {one.path: one.seconds for one in samples if one.storing == storing}
        # What disturbs an engine for longer, or for too little, is no choice, as it was measured here.
        fair = allowed(seconds, decoding=False)
        best = min(fair, key=lambda path: fair[path])
        choice = planner.choose(Job(storing, run_bytes, runs), list(seconds))
        entries = {CHOSEN: seconds[choice.path], BEST: seconds[best], **seconds}
        row = with_ratios(
            Row(
                part="planner",
                case=f"{runs} x {run_bytes} B",
                variant=choice.path,
                direction="gather" if storing else "scatter",
                ids="random",
                bytes=runs * run_bytes,
                run_bytes=run_bytes,
                max_programs=None,
                bit_exact=exact,
                traffic=1,
                ceiling=BEST,
                seconds={name: Spread(value, value, value) for name, value in entries.items()},
            )
        )
        print(f"{row.case:20} {row.direction:8} {choice.why}; measured best {best}", flush=True)
        yield row
