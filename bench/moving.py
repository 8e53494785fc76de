"""The library's mover as a contender: a workload as its moves, in slots as a cache server has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.fingerprint import fingerprint
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.moving.device import CudaDevice
from lmcache_kernels.transfer.moving.gpu_mover import GpuMover
from lmcache_kernels.transfer.moving.host_mover import HostMover
from lmcache_kernels.transfer.moving.moves import ChunkMove
from lmcache_kernels.views import group_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from lmcache_kernels.chunk_copy import Layers
    from lmcache_kernels.transfer.moving.moves import Completion, Moved, Mover

    from .timing import Clock
    from .workload import Workload

PAGE_BYTES = 4096
TIMEOUT = 60.0
"""Seconds after which the benchmark gives up waiting."""


def host_slots(device: str, chunks: int, nbytes: int) -> torch.Tensor:
    """A :data:`~.workload.Memory` of slots, each a header and a payload, in one piece of pinned memory.

    Args:
        device: that copies to and from it.
    """
    distance = -(-(HEADER_BYTES + nbytes) // PAGE_BYTES) * PAGE_BYTES
    memory = torch.empty((chunks, distance), dtype=torch.uint8, pin_memory=device != "cpu")
    payloads = memory[:, HEADER_BYTES : HEADER_BYTES + nbytes]
    for payload in payloads:
        payload.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device))
    return payloads


def open_mover(work: Workload, settings: Mapping[str, Any], clock: Clock) -> Mover:
    """A mover over the cache of ``work``.

    Args:
        settings: further arguments of the GPU's one.
        clock: with which loads begin.
    """
    groups = [group_of(work.caches, work.trial.case.axes)]
    layout = ChunkLayout.of(groups, work.trial.chunk_tokens)
    if work.device == "cpu":
        return HostMover(groups, layout)
    return GatedMover(groups, layout, device=GatedDevice(work.device, clock), **settings)


class GatedDevice(CudaDevice):
    """Its next copy can be held back until a clock starts.

    A load fills its slices without waiting for the engine. So it would seem too fast if its copies
    began before the clock, and too slow if they began when the engine's stream says so.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name)
        self._clock = clock
        self.held = False

    def copy(
        self, stream: torch.cuda.Stream, to: int, origin: int, nbytes: int, *, pinned: bool
    ) -> None:
        self._pass(stream)
        super().copy(stream, to, origin, nbytes, pinned=pinned)

    def copy_rows(
        self,
        stream: torch.cuda.Stream,
        to: tuple[int, int],
        origin: tuple[int, int],
        nbytes: int,
        count: int,
    ) -> None:
        self._pass(stream)
        super().copy_rows(stream, to, origin, nbytes, count)

    def copy_batch(
        self,
        stream: torch.cuda.Stream,
        to: NDArray[np.uint64],
        origin: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        self._pass(stream)
        super().copy_batch(stream, to, origin, sizes)

    def _pass(self, stream: torch.cuda.Stream) -> None:
        held, self.held = self.held, False
        if held and self._clock.started is not None:
            stream.wait_event(self._clock.started)


class GatedMover(GpuMover):
    """Its loads do not touch the link before the clock starts."""

    def __init__(self, *arguments: Any, device: GatedDevice, **settings: Any) -> None:
        super().__init__(*arguments, device=device, **settings)
        self._gated = device

    def scatter(
        self, moves: Sequence[ChunkMove], after: Completion | None, layers: Layers | None = None
    ) -> Moved:
        self._gated.held = True
        moved = super().scatter(moves, after, layers)
        # Where no copy has begun, kernels read host memory, and they come after the engine anyway.
        self._gated.held = False
        return moved


@dataclass(frozen=True)
class Transfer:
    """All chunks of a workload, to be moved by a mover over its cache."""

    mover: Mover
    work: Workload
    moves: list[ChunkMove]

    @classmethod
    def of(cls, mover: Mover, work: Workload) -> Transfer:
        per_chunk = work.blocks_per_chunk
        blocks = [
            tuple(work.ids[start : start + per_chunk])
            for start in range(0, len(work.ids), per_chunk)
        ]
        moves = [
            ChunkMove(payload.data_ptr(), (ids,), reachable=True)
            for payload, ids in zip(work.chunk, blocks, strict=True)
        ]
        return cls(mover, work, moves)

    def queue(self, after: Completion | None) -> Moved:
        move = self.mover.gather if self.work.gathers else self.mover.scatter
        return move(self.moves, after)

    def run(self) -> None:
        """Move everything as if it were work of the current stream."""
        join(self.mover, self.queue(self.mover.ready()))

    def path(self) -> str:
        """Which way they go."""
        if not isinstance(self.mover, GpuMover):
            return ""
        return self.mover.choose(self.moves, storing=self.work.gathers).path

    def is_exact(self) -> bool:
        """Move everything once; is all of it right? The caller spoils what is written before."""
        moved = self.queue(self.mover.ready())
        finish(moved.done)
        return self.holds(moved)

    def holds(self, moved: Moved) -> bool:
        """Did this, which is over, leave the right bytes and give their fingerprints?"""
        expected = [(fingerprint(memoryview(payload.numpy())),) for payload in self.work.chunk]
        return moved.fingerprints() == expected and self.work.is_exact()


def join(mover: Mover, moved: Moved) -> None:
    """Let the current stream wait until everything is done."""
    if not mover.synchronous:
        done: Any = moved.done
        torch.cuda.current_stream().wait_event(done.event)


def finish(done: Completion) -> None:
    """Wait for it on the host.

    Raises:
        RuntimeError: it takes too long.
    """
    if not done.wait(TIMEOUT):
        raise RuntimeError(f"a transfer was not done after {TIMEOUT:g} s")
