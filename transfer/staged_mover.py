"""Moves chunks between a GPU's cache and pinned host memory through slices on the GPU.

Gather kernel into a slice, then one large copy-engine copy of the slice to host memory; loads run
the mirror. While slice ``n`` is on the link the kernel fills slice ``n + 1``, so the link stays full
and only short kernels touch the multiprocessors. Order is kept by events alone. Device memory:
``SLICES`` chunks a direction that is used.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.copying import PreparedCopy
from lmcache_kernels.fingerprint import unsigned

from .moves import Moved, pair_ids, pair_planes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.copy_plan import Side
    from lmcache_kernels.plane import CacheGroup

    from .moves import ChunkMove, Completion

SLICES = 2
"""Slices a direction: one on the link, one at the kernel."""

POLL_SECONDS = 50e-6
"""How often a host thread that waits for the device looks."""


class CudaCompletion:
    """A recorded CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


class StagedMover:
    """The :class:`~lmcache_kernels.transfer.moves.Mover` of CUDA engines.

    One thread may gather while another scatters; neither call may be made by two threads at once.

    Args:
        groups: the engine's cache, all on one CUDA device.
        layout: of the chunks.
        max_programs: bound on the grid of every kernel; None lets a kernel fill the device.
    """

    synchronous = False

    def __init__(
        self, groups: Sequence[CacheGroup], layout: ChunkLayout, *, max_programs: int | None = None
    ) -> None:
        self._device = torch.device(groups[0].device)
        self._out = _Direction(groups, layout, max_programs, "dst")
        self._in = _Direction(groups, layout, max_programs, "src")

    def ready(self) -> Completion | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return CudaCompletion(event)

    def gather(self, moves: Sequence[ChunkMove], after: Completion | None) -> Moved:
        return self._out.run(moves, after)

    def scatter(self, moves: Sequence[ChunkMove], after: Completion | None) -> Moved:
        return self._in.run(moves, after)

    def close(self) -> None:
        self._out.release()
        self._in.release()


class _Direction:
    """One direction's streams and slices; made when first used."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        layout: ChunkLayout,
        max_programs: int | None,
        chunk_side: Side,
    ) -> None:
        self._groups = groups
        self._layout = layout
        self._max_programs = max_programs
        self._chunk_side = chunk_side
        self._device = torch.device(groups[0].device)
        self._slices: list[_Slice] = []
        self._next = 0

    def _open(self) -> None:
        self._kernels = torch.cuda.Stream(self._device)
        self._link = torch.cuda.Stream(self._device)
        self._slices = [
            _Slice(self._groups, self._layout, self._max_programs, self._chunk_side)
            for _ in range(SLICES)
        ]

    def run(self, moves: Sequence[ChunkMove], after: Completion | None) -> Moved:
        """Queue the moves."""
        with torch.cuda.device(self._device):
            if not self._slices:
                self._open()
            if isinstance(after, CudaCompletion):
                self._kernels.wait_event(after.event)
            rows = self._slices[0].rows
            sums = torch.empty((len(moves), rows), dtype=torch.int64, pin_memory=True)
            try:
                for move, sums_of_move in zip(moves, sums, strict=True):
                    self._queue(move, sums_of_move)
            except BaseException:
                # What was queued before still uses the blocks and the host memory.
                self._kernels.synchronize()
                self._link.synchronize()
                raise
            cache_free = _recorded(self._kernels)
            done = _recorded(self._link) if self._chunk_side == "dst" else cache_free
            return Moved(cache_free, done, lambda: [unsigned(row) for row in sums.tolist()])

    def _queue(self, move: ChunkMove, sums: torch.Tensor) -> None:
        slice_ = self._slices[self._next]
        self._next = (self._next + 1) % SLICES
        kernel, link = (self._kernels, slice_.run_kernel), (self._link, slice_.copy_payload)
        for stream, step in (kernel, link) if self._chunk_side == "dst" else (link, kernel):
            stream.wait_event(slice_.last)
            with torch.cuda.stream(stream):
                step(move)
                if stream is self._kernels:
                    sums.copy_(slice_.sums[0], non_blocking=True)
            slice_.last = torch.cuda.Event()
            slice_.last.record(stream)

    def release(self) -> None:
        for slice_ in self._slices:
            slice_.last.synchronize()
        self._slices = []


class _Slice:
    """Device memory for one chunk and its fingerprint, with the copy between it and the cache."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        layout: ChunkLayout,
        max_programs: int | None,
        chunk_side: Side,
    ) -> None:
        device = groups[0].device
        self._memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self._layout = layout
        self._chunk_side = chunk_side
        chunk = layout.planes_at(self._memory.data_ptr(), device)
        self._copy = PreparedCopy(
            pair_planes(groups, chunk, chunk_side),
            chunk_side=chunk_side,
            max_programs=max_programs,
        )
        self.rows = self._copy.plan.rows
        self.sums = torch.zeros((1, self.rows), dtype=torch.int64, device=device)
        self.last = torch.cuda.Event()
        self.last.record(torch.cuda.current_stream(self._memory.device))

    def run_kernel(self, move: ChunkMove) -> None:
        self.sums.zero_()
        self._copy.copy_groups(pair_ids(self._layout, move, self._chunk_side), sums=self.sums)

    def copy_payload(self, move: ChunkMove) -> None:
        for host, here in self._pieces(move):
            to, origin = (host, here) if self._chunk_side == "dst" else (here, host)
            to.copy_(origin, non_blocking=True)

    def _pieces(self, move: ChunkMove) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        host = host_bytes(move.address, self._layout.nbytes)
        edges = (0, *move.cuts, self._layout.nbytes)
        for start, end in itertools.pairwise(edges):
            yield host[start:end], self._memory[start:end]


def _recorded(stream: torch.cuda.Stream) -> CudaCompletion:
    event = torch.cuda.Event()
    event.record(stream)
    return CudaCompletion(event)


def host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over host memory that someone else owns and keeps alive."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
