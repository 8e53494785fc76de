"""Transfers that keep the link full for as long as somebody looks: ours, plain copies, LMCache's."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .baselines import TO_HOST, enter
from .moving import Transfer
from .results import OURS
from .saturation import Flow
from .streams import new_stream, on, point_in
from .trials import DIRECTIONS, Trial
from .workload import set_up, set_up_both

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from lmcache_kernels.transfer.moving.moves import Completion

    from .cases import Case
    from .rig import Rig
    from .timing import Contender

BOTH = "both"
STAGED = "lmcache_staged"
PLAIN = "plain_copies"
"""Between pinned memory and the device, as fast as the link is: what no transfer disturbs less."""


@dataclass(frozen=True)
class Traffic:
    """Attributes:
    flows: per contender and direction.
    exact: ours moved the right bytes.
    absent: why LMCache has none.
    """

    flows: dict[str, dict[str, Flow]]
    exact: bool
    absent: dict[str, str]
    run_bytes: int


@contextmanager
def traffic(rig: Rig, case: Case, *, decoding: bool) -> Iterator[Traffic]:
    """What fills the link, both directions of everyone.

    Args:
        case: of the caches.
        decoding: what our mover is told of the engine.
    """
    works = set_up_both(case, rig.options.size_mb << 20, rig.device, rig.memory)
    mover = rig.open_mover(works[0])
    mover.decoding = decoding
    try:
        ours = {work.trial.direction: Transfer.of(mover, work) for work in works}
        works[0].poison()
        exact = all(transfer.is_exact() for transfer in ours.values())
        theirs, absent = staged_flows(rig, case)
        flows = {
            OURS: {direction: flow_of(one) for direction, one in ours.items()},
            PLAIN: {
                direction: Flow(direction, partial(rig.link.queue, work.gathers), rig.link.nbytes)
                for direction, work in zip(ours, works, strict=True)
            },
            **theirs,
        }
        yield Traffic(flows, exact, absent, works[0].run_bytes)
    finally:
        mover.close()


def flow_of(transfer: Transfer) -> Flow:
    """Ours."""
    direction, nbytes = transfer.work.trial.direction, transfer.work.moved
    return Flow(direction, lambda: transfer.queue(transfer.mover.ready()).done, nbytes)


def staged_flows(rig: Rig, case: Case) -> tuple[dict[str, dict[str, Flow]], dict[str, str]]:
    """LMCache's, each on a stream and in a cache of its own; or why there is none."""
    flows = {}
    for direction in DIRECTIONS:
        work = set_up(Trial(case, direction, rig.options.size_mb << 20), rig.device, rig.memory)
        found, absent = enter(work, {STAGED: TO_HOST[STAGED]})
        if absent:
            return {}, absent
        queue = partial(_queue_on, new_stream(rig.device), found[0])
        flows[direction] = Flow(direction, queue, found[0].moved)
    return {STAGED: flows}, {}


def _queue_on(stream: torch.cuda.Stream | None, contender: Contender) -> Completion:
    with on(stream):
        contender.run()
    return point_in(stream)
