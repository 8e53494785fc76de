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

from lmcache_kernels.copying import prepare_copy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.copying import PreparedCopy
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
        self._out = _Direction(groups, layout, max_programs, outward=True)
        self._in = _Direction(groups, layout, max_programs, outward=False)

    def ready(self) -> Completion | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return CudaCompletion(event)

    def gather(
        self, moves: Sequence[ChunkMove], after: Completion | None
    ) -> tuple[Completion, Completion]:
        return self._out.run(moves, after)

    def scatter(self, moves: Sequence[ChunkMove], after: Completion | None) -> Completion:
        return self._in.run(moves, after)[0]

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
        *,
        outward: bool,
    ) -> None:
        self._groups = groups
        self._layout = layout
        self._max_programs = max_programs
        self._outward = outward
        self._device = torch.device(groups[0].device)
        self._slices: list[_Slice] = []
        self._next = 0

    def _open(self) -> None:
        self._kernels = torch.cuda.Stream(self._device)
        self._link = torch.cuda.Stream(self._device)
        self._slices = [
            _Slice(self._groups, self._layout, self._max_programs, outward=self._outward)
            for _ in range(SLICES)
        ]

    def run(
        self, moves: Sequence[ChunkMove], after: Completion | None
    ) -> tuple[Completion, Completion]:
        """Queue the moves; returns (kernels are over, link is idle)."""
        with torch.cuda.device(self._device):
            if not self._slices:
                self._open()
            if isinstance(after, CudaCompletion):
                self._kernels.wait_event(after.event)
            try:
                for move in moves:
                    self._queue(move)
            except BaseException:
                # What was queued before still uses the blocks and the host memory.
                self._kernels.synchronize()
                self._link.synchronize()
                raise
            return _recorded(self._kernels), _recorded(self._link)

    def _queue(self, move: ChunkMove) -> None:
        slice_ = self._slices[self._next]
        self._next = (self._next + 1) % SLICES
        first, second = (
            (self._kernels, self._link) if self._outward else (self._link, self._kernels)
        )
        for stream, step in ((first, slice_.fill), (second, slice_.drain)):
            stream.wait_event(slice_.last)
            with torch.cuda.stream(stream):
                step(move)
            slice_.last = torch.cuda.Event()
            slice_.last.record(stream)

    def release(self) -> None:
        for slice_ in self._slices:
            slice_.last.synchronize()
        self._slices = []


class _Slice:
    """Device memory for one chunk, with the copies between it and the cache prepared."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        layout: ChunkLayout,
        max_programs: int | None,
        *,
        outward: bool,
    ) -> None:
        device = groups[0].device
        self._memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self._nbytes = layout.nbytes
        self._copies: list[list[PreparedCopy]] = []
        for group, chunk in zip(
            groups, layout.planes_at(self._memory.data_ptr(), device), strict=True
        ):
            sides = [
                (dense, plane) if outward else (plane, dense)
                for plane, dense in zip(group.planes, chunk, strict=True)
            ]
            self._copies.append(
                [prepare_copy(dst, src, max_programs=max_programs) for dst, src in sides]
            )
        self._outward = outward
        self.fill = self._kernel if outward else self._from_host
        self.drain = self._to_host if outward else self._kernel
        self.last = torch.cuda.Event()
        self.last.record(torch.cuda.current_stream(self._memory.device))

    def _kernel(self, move: ChunkMove) -> None:
        for copies, (inside, blocks) in zip(self._copies, move.pairs, strict=True):
            for copy in copies:
                copy.copy(*((inside, blocks) if self._outward else (blocks, inside)))

    def _to_host(self, move: ChunkMove) -> None:
        for host, here in self._pieces(move):
            host.copy_(here, non_blocking=True)

    def _from_host(self, move: ChunkMove) -> None:
        for host, here in self._pieces(move):
            here.copy_(host, non_blocking=True)

    def _pieces(self, move: ChunkMove) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        host = host_bytes(move.address, self._nbytes)
        edges = (0, *move.cuts, self._nbytes)
        for start, end in itertools.pairwise(edges):
            yield host[start:end], self._memory[start:end]


def _recorded(stream: torch.cuda.Stream) -> CudaCompletion:
    event = torch.cuda.Event()
    event.record(stream)
    return CudaCompletion(event)


def host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over host memory that someone else owns and keeps alive."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
