"""What else can move the same bytes. One module each, with ``prepare(work)``.

``prepare`` returns what to time and how to check it, or raises :class:`NotApplicable` with the
reason. A baseline that fails or leaves other bytes than it should is left out with that as reason.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bench.timing import Contender

from . import (
    index_select,
    lmcache_ops,
    lmcache_staged,
    memcpy_batch,
    per_block,
    plain,
    vllm_swap,
)
from .base import Baseline, NotApplicable, ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.workload import Workload

__all__ = ["BASELINES", "TO_HOST", "Baseline", "NotApplicable", "enter", "ready"]

BASELINES: dict[str, Callable[[Workload], Baseline]] = {
    "plain": plain.prepare,
    "index_select": index_select.prepare,
    "per_block": per_block.prepare,
    "memcpy_batch": memcpy_batch.prepare,
    "lmcache": lmcache_ops.prepare,
    "vllm_swap": vllm_swap.prepare,
}
"""Inside GPU memory."""

TO_HOST: dict[str, Callable[[Workload], Baseline]] = {
    "lmcache_staged": lmcache_staged.prepare,
    "lmcache_direct": lmcache_ops.prepare,
    "memcpy_batch": memcpy_batch.prepare,
    "vllm_swap": vllm_swap.prepare,
}
"""Between GPU memory and chunks in pinned host memory."""


def enter(
    work: Workload, candidates: Mapping[str, Callable[[Workload], Baseline]]
) -> tuple[list[Contender], dict[str, str]]:
    """Which candidates can do this work and did it right once; and why the others did not."""
    found, absent = ready({name: partial(_checked, c, work) for name, c in candidates.items()})
    return [Contender(name, b.run, b.moved) for name, b in found.items()], absent


def _checked(prepare: Callable[[Workload], Baseline], work: Workload) -> Baseline:
    baseline = prepare(work)
    baseline.poison()
    baseline.run()
    if not baseline.is_exact():
        raise NotApplicable("its copy differs from what torch's indexing finds")
    return baseline
