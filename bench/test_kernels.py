"""The trials under pytest-benchmark: ``pytest bench/``; BENCH_SIZE_MB sets the payload of each.

Quick figures for somebody who is changing a kernel. The ones that are published come from
``python -m bench run``, which takes time with cold caches.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from .baselines import BASELINES, Baseline, NotApplicable
from .kernels import OURS_BY_VARIANT
from .results import OURS
from .trials import Trial, trials
from .workload import set_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .workload import Workload

SIZE_MB = int(os.environ.get("BENCH_SIZE_MB", "16"))
DEVICE = "cuda:0"
ROUNDS = 10

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def _own_stream() -> Iterator[torch.cuda.Stream]:
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        yield stream


def _prepare(contender: str, work: Workload) -> Baseline:
    if contender != OURS:
        return BASELINES[contender](work)
    copy = OURS_BY_VARIANT[work.trial.variant](work)
    return Baseline(copy, work.moved, work.poison, work.is_exact)


@pytest.mark.parametrize("contender", [OURS, *BASELINES])
@pytest.mark.parametrize("trial", list(trials(SIZE_MB)), ids=lambda trial: trial.title)
def test_copy(benchmark: Any, trial: Trial, contender: str) -> None:
    with _own_stream() as stream:
        work = set_up(trial, DEVICE)
        try:
            entrant = _prepare(contender, work)
        except NotApplicable as reason:
            pytest.skip(str(reason))
        entrant.poison()
        entrant.run()
        assert entrant.is_exact()

        def done() -> None:
            entrant.run()
            stream.synchronize()

        benchmark.group = trial.title
        benchmark.extra_info["bytes"] = entrant.moved
        benchmark.pedantic(done, rounds=ROUNDS, warmup_rounds=2)
