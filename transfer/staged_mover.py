"""Moves chunks between a GPU's cache and pinned host memory through slices on the GPU.

Gather kernel into a slice, then one large copy-engine copy of the slice to host memory; loads run
the mirror. While slice ``n`` is on the link the kernel fills slice ``n + 1``, so the link stays full
and only short kernels touch the multiprocessors. Order is kept by events alone. Device memory:
``SLICES`` slices a direction that is used, each of at most ``SLICE_BYTES`` and of a chunk.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.chunk_copy import ChunkCopy
from lmcache_kernels.fold_kernel import fold_sums

from .device import CudaDevice, EventCompletion
from .moves import Moved
from .slice_plan import SLICE_BYTES, slice_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.chunk_copy import ChunkPart
    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.copy_plan import Side
    from lmcache_kernels.plane import CacheGroup

    from .device import Device
    from .moves import ChunkMove, Completion

SLICES = 3
"""Slices a direction: one on the link, one at the kernel, one between them."""

BATCH = 64
"""Chunks whose fingerprints are added up by one kernel."""

_MODULUS = 1 << 64
_ALIGN = 512  # of slices: as the slots of host memory


class StagedMover:
    """The :class:`~lmcache_kernels.transfer.moves.Mover` of CUDA engines.

    One thread may gather while another scatters; neither call may be made by two threads at once.

    Args:
        groups: the engine's cache, all on one device.
        layout: of the chunks.
        max_programs: bound on the grid of every kernel; None lets a kernel fill the device.
        slice_bytes, slices: see the module.
        device: where the work is queued; None: the cache's.
    """

    synchronous = False

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        layout: ChunkLayout,
        *,
        max_programs: int | None = None,
        slice_bytes: int = SLICE_BYTES,
        slices: int = SLICES,
        device: Device | None = None,
        staged: bool = True,
    ) -> None:
        self._device = device or CudaDevice(groups[0].device)

        def direction(chunk_side: Side) -> _Direction:
            return _Direction(
                self._device,
                lambda: ChunkCopy(
                    groups, layout, chunk_side, max_programs=max_programs, staged=staged
                ),
                groups[0].device,
                layout,
                chunk_side,
                slices,
                slice_bytes,
            )

        self._where = groups[0].device
        self._out, self._in = direction("dst"), direction("src")

    def ready(self) -> Completion | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._where))
        return EventCompletion(event)

    def gather(self, moves: Sequence[ChunkMove], after: Completion | None) -> Moved:
        return self._out.run(moves, after)

    def scatter(self, moves: Sequence[ChunkMove], after: Completion | None) -> Moved:
        return self._in.run(moves, after)

    def close(self) -> None:
        self._out.release()
        self._in.release()


class _Slice:
    """A piece of device memory, and the events after which each engine may have it."""

    def __init__(self, memory: torch.Tensor, device: Device) -> None:
        self.address = memory.data_ptr()
        self.filled = device.event()
        self.emptied = device.event()


class _Direction:
    """One direction's streams and slices; made when first used."""

    def __init__(
        self,
        device: Device,
        prepare: Callable[[], ChunkCopy],
        where: str,
        layout: ChunkLayout,
        chunk_side: Side,
        slices: int,
        slice_bytes: int,
    ) -> None:
        self._device = device
        self._prepare = prepare
        self._where = where
        self._nbytes = layout.nbytes
        self._storing = chunk_side == "dst"
        self._count = slices
        self._slice_bytes = slice_bytes
        self._slices: deque[_Slice] = deque()
        self._cuts: dict[tuple[bool, bool], list[ChunkPart]] = {}
        self._results: deque[tuple[Any, torch.Tensor]] = deque()

    def _open(self) -> None:
        device, where = self._device, self._where
        self._copy = self._prepare()
        self._kernels, self._link = device.stream(), device.stream()
        largest = max(part.nbytes for ends in _ENDS for part in self._parts(*ends))
        nbytes = -(-largest // _ALIGN) * _ALIGN
        with device.on(self._kernels):
            memory = torch.empty((self._count, nbytes), dtype=torch.uint8, device=where)
            sums = torch.zeros((BATCH, self._copy.plan.rows), dtype=torch.int64, device=where)
        made = device.event()
        device.record(made, self._kernels)
        device.wait(self._link, made)
        # Both streams use the memory as long as it is here, see release.
        self._memory, self._sums, self._sums_of = memory, sums, list(sums.split(1))
        self._slices.extend(_Slice(piece, device) for piece in memory)

    def run(self, moves: Sequence[ChunkMove], after: Completion | None) -> Moved:
        """Queue the moves."""
        device = self._device
        with device.current():
            if not self._slices:
                self._open()
            if isinstance(after, EventCompletion):
                device.wait(self._kernels, after.event)
            totals = self._new_results(len(moves))
            try:
                for start in range(0, len(moves), BATCH):
                    self._queue_batch(moves, start, totals[start : start + BATCH])
            except BaseException:
                # What was queued before still uses the blocks and the host memory.
                self._settle()
                raise
            cache_free = done = device.event()
            device.record(cache_free, self._kernels)
            if self._storing:
                done = device.event()
                device.wait(self._link, cache_free)
                device.record(done, self._link)
            self._results.append((done, totals))
            return Moved(
                EventCompletion(cache_free),
                EventCompletion(done),
                lambda: [total % _MODULUS for total in totals.tolist()],
            )

    def _queue_batch(self, moves: Sequence[ChunkMove], start: int, totals: torch.Tensor) -> None:
        batch = moves[start : start + BATCH]
        last = len(moves) - 1
        handle = self._device.handle(self._kernels)
        with self._copy.queued([move.blocks for move in batch], handle) as launch:
            for index, move in enumerate(batch):
                for part in self._parts(start + index == 0, start + index == last):
                    self._queue_part(launch, index, part, move)
        self._device.run(self._kernels, self._fold, len(batch), totals)

    def _fold(self, chunks: int, totals: torch.Tensor) -> None:
        with self._device.on(self._kernels):
            fold_sums(self._sums[:chunks], totals)

    def _queue_part(self, launch: Any, index: int, part: ChunkPart, move: ChunkMove) -> None:
        device, kernels, link = self._device, self._kernels, self._link
        piece = self._slices[0]
        self._slices.rotate(-1)
        address = piece.address - part.offset
        if self._storing:
            device.wait(kernels, piece.emptied)
            device.run(kernels, launch, index, part, address, self._sums_of[index])
            device.record(piece.filled, kernels)
            device.wait(link, piece.filled)
            for start, end in _pieces(part, move.cuts):
                device.copy(link, move.address + start, address + start, end - start)
            device.record(piece.emptied, link)
        else:
            device.wait(link, piece.emptied)
            for start, end in _pieces(part, move.cuts):
                device.copy(link, address + start, move.address + start, end - start)
            device.record(piece.filled, link)
            device.wait(kernels, piece.filled)
            device.run(kernels, launch, index, part, address, self._sums_of[index])
            device.record(piece.emptied, kernels)

    def _parts(self, first: bool, last: bool) -> list[ChunkPart]:
        """How a chunk is cut that is, or is not, the first and the last of a run."""
        ends = first and self._storing, last and not self._storing
        if ends not in self._cuts:
            sizes = slice_sizes(
                self._nbytes, self._slice_bytes, small_first=ends[0], small_last=ends[1]
            )
            self._cuts[ends] = self._copy.cut(sizes)
        return self._cuts[ends]

    def _new_results(self, count: int) -> torch.Tensor:
        """Pinned int64[count] that stays until the kernels that write it are over."""
        while self._results and self._results[0][0].query():
            self._results.popleft()
        return self._device.pinned(count)

    def _settle(self) -> None:
        """Wait for what was queued, and forget the fingerprints that it left half-made."""
        self._device.run(self._kernels, self._clear)
        self._device.synchronize(self._kernels)
        self._device.synchronize(self._link)

    def _clear(self) -> None:
        with self._device.on(self._kernels):
            self._sums.zero_()

    def release(self) -> None:
        if not self._slices:
            return
        for stream in (self._kernels, self._link):
            self._device.synchronize(stream)
            self._device.give_back(stream)
        self._slices.clear()
        self._results.clear()
        del self._memory, self._sums, self._sums_of


_ENDS = ((False, False), (True, False), (False, True), (True, True))


def _pieces(part: ChunkPart, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """The part's range of the payload, cut where no single copy may go on."""
    end = part.offset + part.nbytes
    edges = [part.offset, *(cut for cut in cuts if part.offset < cut < end), end]
    return list(itertools.pairwise(edges))
