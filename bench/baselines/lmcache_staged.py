"""LMCache's staged path between the cache and pinned host memory: its kernel and a buffer on the GPU.

As its server works: four slots on the GPU, and on one stream, one after the other, a kernel for four
objects and a copy for each of them, or the copies and then the kernel. The server stores one object
at a time; here it is four, which is faster.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from .base import Baseline
from .lmcache_ops import OBJECTS_A_LAUNCH, launcher_for, layer_of

if TYPE_CHECKING:
    from bench.workload import Workload


def prepare(work: Workload) -> Baseline:
    staged = Staged(work)
    return Baseline(
        run=lambda: staged(work.ids),
        moved=work.moved,
        poison=work.poison,
        is_exact=lambda: work.is_exact(layer_of=partial(layer_of, work)),
    )


class Staged:
    """Moves blocks between the cache of a workload and its chunks in host memory.

    More ids than make its chunks use these again from the first on: for timing many from little
    memory.
    """

    def __init__(self, work: Workload) -> None:
        self._gathers = work.gathers
        self._host = list(work.chunk)
        self._slots = torch.empty(
            (OBJECTS_A_LAUNCH, work.chunk.shape[1]), dtype=torch.uint8, device=work.device
        )
        self._launcher = launcher_for(work, self._slots)

    def __call__(self, ids: list[int]) -> None:
        for first, some in self._launcher.batches(ids):
            count = len(some) // self._launcher.per_object
            host = [self._host[(first + n) % len(self._host)] for n in range(count)]
            if self._gathers:
                self._launcher.launch(0, some)
                for here, there in zip(host, self._slots, strict=False):
                    here.copy_(there, non_blocking=True)
            else:
                for here, there in zip(host, self._slots, strict=False):
                    there.copy_(here, non_blocking=True)
                self._launcher.launch(0, some)
