"""Gather and scatter inside GPU memory, against a plain device copy of the same bytes and peers.

A rate counts bytes read and bytes written. The upload of the ids is part of every copy. Each
contender's bytes are compared before anything is timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmcache_kernels.copying import PreparedCopy, prepare_copy
from lmcache_kernels.fingerprint import fingerprint, unsigned

from . import baselines
from .results import OURS, Row, with_ratios
from .timing import Contender, DeviceClock, HostClock, measure
from .trials import trials
from .workload import set_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .options import Options
    from .timing import Clock, Spread
    from .trials import Trial
    from .workload import Workload


CEILING = "plain"


def _plain_copy(work: Workload) -> Callable[[], None]:
    prepared = prepare_copy(work.dst, work.src, max_programs=work.trial.max_programs)
    return lambda: prepared.copy(work.dst_ids, work.src_ids)


class ChecksumCopy:
    """The copy that also computes the fingerprints of its chunks."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._prepared = PreparedCopy(
            [[(work.dst, work.src)]],
            chunk_side="dst" if work.gathers else "src",
            max_programs=work.trial.max_programs,
        )
        chunks = len(work.ids) // work.blocks_per_chunk
        self._sums = torch.zeros((chunks, work.dst.rows), dtype=torch.int64, device=work.device)

    def __call__(self) -> None:
        self._sums.zero_()
        self._prepared.copy(self._work.dst_ids, self._work.src_ids, sums=self._sums)

    def is_exact(self) -> bool:
        """Are those of the last call what the host finds in the chunks?"""
        chunks = self._work.chunk.cpu().view(len(self._sums), -1).numpy()
        found = [unsigned(row) for row in self._sums.tolist()]
        return found == [fingerprint(chunk.data) for chunk in chunks]


OURS_BY_VARIANT: dict[str, Callable[[Workload], Callable[[], None]]] = {
    "plain": _plain_copy,
    "checksum": ChecksumCopy,
}
"""The library's copies that a trial can name as its ``variant``: each gives what to time."""

UNCHANGED = "ours_plain"
"""Beside another variant the plain one is timed too, so that one row tells what it costs."""


def run(options: Options, device: str = "cuda:0") -> list[Row]:
    """Measure every trial of the registry, printing each as it is done."""
    chosen = [trial for trial in trials(options.size_mb) if options.wants(trial.title)]
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        return run_trials(chosen, options.rounds, device, DeviceClock([device]))


def run_on_host(chosen: Iterable[Trial], rounds: int) -> list[Row]:
    """The same in host memory: for trying the benchmark out, not for figures."""
    return run_trials(chosen, rounds, "cpu", HostClock())


def run_trials(chosen: Iterable[Trial], rounds: int, device: str, clock: Clock) -> list[Row]:
    rows = []
    for trial in chosen:
        torch.manual_seed(7)
        rows.append(_measure(set_up(trial, device), rounds, clock))
        print(line(rows[-1]), flush=True)
        for name, reason in rows[-1].absent.items():
            print(f"    without {name}: {reason}", flush=True)
    return rows


def _measure(work: Workload, rounds: int, clock: Clock) -> Row:
    trial = work.trial
    ours = OURS_BY_VARIANT[trial.variant](work)
    work.poison()
    ours()
    exact = work.is_exact() and (not isinstance(ours, ChecksumCopy) or ours.is_exact())
    everyone = baselines.BASELINES
    others, absent = baselines.enter(
        work, everyone if trial.variant == "plain" else {CEILING: everyone[CEILING]}
    )
    if trial.variant != "plain":
        others.append(Contender(UNCHANGED, OURS_BY_VARIANT["plain"](work), work.moved))
    contenders = [Contender(OURS, ours, work.moved), *others]
    return row_of(work, contenders, measure(contenders, rounds, clock), exact, absent)


def row_of(
    work: Workload,
    contenders: Iterable[Contender],
    seconds: dict[str, Spread],
    exact: bool,
    absent: dict[str, str],
) -> Row:
    """The row of a copy inside one memory."""
    trial = work.trial
    return with_ratios(
        Row(
            case=trial.case.name,
            variant=trial.variant,
            direction=trial.direction,
            ids=trial.ids,
            bytes=work.moved,
            run_bytes=work.run_bytes,
            max_programs=trial.max_programs,
            bit_exact=exact,
            traffic=2,
            ceiling=CEILING,
            seconds=seconds,
            moved={c.name: c.moved for c in contenders if c.moved != work.moved},
            absent=absent,
        )
    )


def line(row: Row) -> str:
    """One row for the terminal."""
    rivals = "  ".join(
        f"{name} x{ratio:.2f}" for name, ratio in row.ratios.items() if name != row.ceiling
    )
    exact = "" if row.bit_exact else "  NOT BIT-EXACT"
    return (
        f"{row.title:58} run {row.run_bytes:6} B  {row.gb_s(OURS):5.0f} GB/s  "
        f"{row.of_ceiling(OURS):.3f} of {row.ceiling}  faster than: {rivals or '-'}{exact}"
    )
