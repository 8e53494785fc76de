"""Gather and scatter at once, against two plain copies at once.

Each direction is queued by a thread of its own, as the transfer context does it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import cases
from .baselines import TO_HOST, enter
from .cases import Case
from .flows import BOTH, STAGED
from .link import line
from .moving import Transfer, finish, join
from .plain_link import CEILING
from .results import OURS, Row, with_ratios
from .streams import forked, new_stream, on
from .timing import Contender, measure
from .trials import DIRECTIONS, Trial
from .workload import set_up, set_up_both

if TYPE_CHECKING:
    from lmcache_kernels.transfer.moving.moves import Moved

    from .rig import Rig

PART = "two-way"
FEW = (
    Case(cases.LLAMA_8B, cases.KV_FIRST),
    Case(cases.LLAMA_8B, cases.KV_FIRST_HND),
    Case(cases.LLAMA_70B_TP8, cases.KV_FIRST),
    Case(cases.MLA_64, cases.LATENT),
)


def run(rig: Rig) -> list[Row]:
    """Measure every case, printing each as it is done."""
    rows = []
    for case in FEW:
        if rig.wants(PART, case.name, BOTH, 2 * rig.options.size_mb):
            rows.append(measure_both(case, rig))
            print(line(rows[-1]), flush=True)
    return rows


@dataclass(frozen=True)
class BothWays:
    """Two transfers over one cache, queued at once by two threads."""

    out: Transfer
    into: Transfer
    threads: ThreadPoolExecutor

    def queue(self) -> list[Moved]:
        after = self.out.mover.ready()
        queued = [self.threads.submit(one.queue, after) for one in (self.out, self.into)]
        return [one.result() for one in queued]

    def run(self) -> None:
        """Move everything as if it were work of the current stream."""
        for moved in self.queue():
            join(self.out.mover, moved)

    def is_exact(self) -> bool:
        """Move everything once; is all of it right?"""
        self.out.work.poison()
        out, into = self.queue()
        for moved in (out, into):
            finish(moved.done)
        return self.out.holds(out) and self.into.holds(into)


def measure_both(case: Case, rig: Rig) -> Row:
    nbytes = rig.options.size_mb << 20
    out, into = set_up_both(case, nbytes, rig.device, rig.memory)
    mover = rig.open_mover(out)
    with ThreadPoolExecutor(2) as threads:
        try:
            ours = BothWays(Transfer.of(mover, out), Transfer.of(mover, into), threads)
            exact = ours.is_exact()
            theirs, absent = staged_both_ways(case, rig)
            contenders = [
                Contender(OURS, ours.run, out.moved + into.moved),
                rig.link.both_ways(),
                *theirs,
            ]
            seconds = measure(contenders, rig.options.rounds, rig.clock)
        finally:
            mover.close()
    return with_ratios(
        Row(
            part=PART,
            case=case.name,
            variant=rig.variant,
            direction=BOTH,
            ids="random",
            bytes=out.moved + into.moved,
            run_bytes=out.run_bytes,
            max_programs=rig.max_programs,
            bit_exact=exact,
            traffic=1,
            ceiling=CEILING,
            seconds=seconds,
            moved={CEILING: 2 * rig.link.nbytes},
            absent=absent,
            path=", ".join(sorted({ours.out.path(), ours.into.path()})),
        )
    )


def staged_both_ways(case: Case, rig: Rig) -> tuple[list[Contender], dict[str, str]]:
    """LMCache's staged path both ways, each on a stream and in a cache of its own."""
    streams, halves = [new_stream(rig.device) for _ in DIRECTIONS], []
    for direction in DIRECTIONS:
        work = set_up(Trial(case, direction, rig.options.size_mb << 20), rig.device, rig.memory)
        found, absent = enter(work, {STAGED: TO_HOST[STAGED]})
        if absent:
            return [], absent
        halves += found

    def run() -> None:
        with forked(streams):
            for stream, half in zip(streams, halves, strict=True):
                with on(stream):
                    half.run()

    return [Contender(STAGED, run, sum(half.moved for half in halves))], {}
