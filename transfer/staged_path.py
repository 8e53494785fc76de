"""Through slices of device memory: a kernel fills (or empties) one while another is on the link.

Stores: gather kernel into a slice, then one large copy-engine copy of it to host memory; loads run
the mirror. So the link stays full and only short kernels touch the multiprocessors. Order is kept by
events alone. Device memory: ``SLICES`` slices a direction that is used, each of at most
``SLICE_BYTES`` and of a chunk.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from .device import EventCompletion
from .path import Path
from .slice_plan import SLICE_BYTES, SLICES, layer_sizes, slice_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.chunk_copy import ChunkCopy, ChunkPart, Layers, Queue
    from lmcache_kernels.chunk_layout import ChunkLayout

    from .device import Device
    from .moves import ChunkMove, Completion, Moved

_ALIGN = 512  # of slices: as the slots of host memory
_ENDS = ((False, False), (True, False), (False, True), (True, True))


class StagedPath(Path):
    """See the module.

    Args:
        layout: of the chunks.
        storing: the direction.
        slices, slice_bytes: how many there are, and how large at most.
    """

    def __init__(
        self,
        device: Device,
        prepare: Callable[[], ChunkCopy],
        where: str,
        *,
        layout: ChunkLayout,
        storing: bool,
        slices: int = SLICES,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        super().__init__(device, prepare, where)
        self._nbytes = layout.nbytes
        self._storing = storing
        self._count = slices
        self._slice_bytes = slice_bytes
        self._slices: deque[_Slice] = deque()
        self._cuts: dict[tuple[bool, bool], list[ChunkPart]] = {}

    def _make_ready(self) -> None:
        largest = max(part.nbytes for ends in _ENDS for part in self._parts(*ends))
        shape = (self._count, -(-largest // _ALIGN) * _ALIGN)
        with self._device.on(self._kernels):
            self._memory = torch.empty(shape, dtype=torch.uint8, device=self._where)
        self._slices.extend(_Slice(piece, self._device) for piece in self._memory)

    def _let_go(self) -> None:
        self._slices.clear()
        del self._memory

    def _queue_chunk(
        self, launch: Queue, index: int, move: ChunkMove, first: bool, last: bool
    ) -> None:
        for part in self._parts(first, last):
            self._queue_part(launch, index, part, move)

    def run_by_layer(
        self, moves: Sequence[ChunkMove], after: Completion | None, layers: Layers
    ) -> Moved:
        """:meth:`run`, all chunks' first layers first; what comes when is in ``Moved.layers``.

        Args:
            layers: see :meth:`ChunkCopy.cut`.
        """
        return self._run(moves, after, lambda launch, _: self._queue_layers(launch, moves, layers))

    def _queue_layers(
        self, launch: Queue, moves: Sequence[ChunkMove], layers: Layers
    ) -> list[tuple[int, Completion]]:
        parts = self._copy.cut(layer_sizes(self._slice_bytes), layers)
        steps: list[tuple[int, Completion]] = []
        for part, behind in itertools.zip_longest(parts, parts[1:]):
            for index, move in enumerate(moves):
                self._queue_part(launch, index, part, move)
            through = max(map(max, layers)) if behind is None else behind.first_layer - 1
            if through >= part.first_layer:
                steps.append((through, EventCompletion(self._point(self._kernels))))
        return steps

    def _queue_part(self, launch: Queue, index: int, part: ChunkPart, move: ChunkMove) -> None:
        device, kernels, link = self._device, self._kernels, self._link
        self._pace()
        piece = self._slices[0]
        self._slices.rotate(-1)
        pinned = move.reachable
        address, sums = piece.address - part.offset, self._tally.parts[index]
        if self._storing:
            device.wait(kernels, piece.emptied)
            device.run(kernels, launch, index, part, address, sums)
            device.record(piece.filled, kernels)
            device.wait(link, piece.filled)
            for start, end in _pieces(part, move.cuts):
                device.copy(link, move.address + start, address + start, end - start, pinned=pinned)
            device.record(piece.emptied, link)
        else:
            device.wait(link, piece.emptied)
            for start, end in _pieces(part, move.cuts):
                device.copy(link, address + start, move.address + start, end - start, pinned=pinned)
            device.record(piece.filled, link)
            device.wait(kernels, piece.filled)
            device.run(kernels, launch, index, part, address, sums)
            device.record(piece.emptied, kernels)

    def _ends(self) -> tuple[Any, Any]:
        cache_free = self._point(self._kernels)
        if not self._storing:
            return cache_free, cache_free
        self._device.wait(self._link, cache_free)
        return cache_free, self._point(self._link)

    def _parts(self, first: bool, last: bool) -> list[ChunkPart]:
        """How a chunk is cut that is, or is not, the first and the last of a run."""
        ends = first and self._storing, last and not self._storing
        if ends not in self._cuts:
            sizes = slice_sizes(
                self._nbytes, self._slice_bytes, small_first=ends[0], small_last=ends[1]
            )
            self._cuts[ends] = self._copy.cut(sizes)
        return self._cuts[ends]


class _Slice:
    """A piece of device memory, and the events after which each engine may have it."""

    def __init__(self, memory: torch.Tensor, device: Device) -> None:
        self.address = memory.data_ptr()
        self.filled = device.event()
        self.emptied = device.event()


def _pieces(part: ChunkPart, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """The part's range of the payload, cut where no single copy may go on."""
    end = part.offset + part.nbytes
    edges = [part.offset, *(cut for cut in cuts if part.offset < cut < end), end]
    return list(itertools.pairwise(edges))
