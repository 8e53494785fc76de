"""Through slices of device memory: a kernel fills (or empties) one while another is on the link.

Stores: gather kernel into a slice, then one large copy-engine copy of it to host memory; loads run
the mirror. So the link stays full and only short kernels touch the multiprocessors. Order is kept by
events alone. A slice holds parts of one chunk or of several, which then share one call of the copy
engine. Device memory: what slice_plan says, for each direction that is used.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .device import EventCompletion
from .path import Path
from .slice_plan import (
    FIRST_BYTES,
    LOAD_BYTES,
    LOAD_SLICES,
    STORE_BYTES,
    STORE_SLICES,
    fill,
    layer_ends,
    layer_sizes,
    part_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_kernels.chunk_copy import ChunkCopy, ChunkPart, Layers, Queue
    from lmcache_kernels.chunk_layout import ChunkLayout

    from .device import Device
    from .moves import ChunkMove, Completion, LayerMarks, Moved, Steps

_ALIGN = 512  # of pieces in a slice: enough for any access width
NEAR_BYTES = 8192
"""Between two chunks of neighbouring slots: a load reads so much for nothing rather than begin a copy, for a
new one costs the link some 3 us, or 180 KB (H200, 30 November 2026)."""

_ENDS = ((False, False), (True, False), (False, True), (True, True))


class StagedPath(Path):
    """See the module.

    Args:
        layout: of the chunks.
        slices, slice_bytes: how many there are, and how large at most; None: as slice_plan has it.
    """

    def __init__(
        self,
        device: Device,
        prepare: Callable[[], ChunkCopy],
        where: str,
        *,
        layout: ChunkLayout,
        storing: bool,
        slices: int | None = None,
        slice_bytes: int | None = None,
    ) -> None:
        super().__init__(device, prepare, where, storing=storing)
        self._nbytes = layout.nbytes
        count, most = (STORE_SLICES, STORE_BYTES) if storing else (LOAD_SLICES, LOAD_BYTES)
        self._count = slices or count
        self._slice_bytes = _aligned(slice_bytes or most)
        self._slices: deque[_Slice] = deque()
        self._cuts: dict[tuple[bool, bool], list[ChunkPart]] = {}

    def _make_ready(self) -> None:
        largest = max(part.nbytes for ends in _ENDS for part in self._parts(*ends))
        # Small chunks share a slice, so it is not made smaller for them.
        shape = (self._count, max(_aligned(largest), self._slice_bytes))
        with self._device.on(self._kernels):
            self._memory = torch.empty(shape, dtype=torch.uint8, device=self._where)
        # New ones, also where a device that stopped still holds older ones.
        self._slices = deque(_Slice(piece, self._device) for piece in self._memory)

    def _let_go(self) -> None:
        self._slices.clear()
        del self._memory

    def _queue_chunks(self, launch: Queue, moves: Sequence[ChunkMove]) -> Steps:
        last = len(moves) - 1
        self._queue_pieces(
            launch,
            [
                _Piece(index, move, part)
                for index, move in enumerate(moves)
                for part in self._parts(index == 0, index == last)
            ],
        )
        return ()

    def run_by_layer(
        self, moves: Sequence[ChunkMove], after: Completion | None, layers: Layers
    ) -> Moved:
        """:meth:`run`, all chunks' first layers first; what comes when is in ``Moved.layers``.

        Args:
            layers: see :meth:`ChunkCopy.cut`.
        """
        return self._run(moves, after, lambda launch, _: self._queue_layers(launch, moves, layers))

    def _queue_layers(self, launch: Queue, moves: Sequence[ChunkMove], layers: Layers) -> Steps:
        parts = self._copy.cut(layer_sizes(self._slice_bytes), layers)
        steps: list[tuple[int, Completion]] = []
        for part, behind in itertools.zip_longest(parts, parts[1:]):
            pieces = [_Piece(index, move, part) for index, move in enumerate(moves)]
            self._queue_pieces(launch, pieces)
            through = max(map(max, layers)) if behind is None else behind.first_layer - 1
            if through >= part.first_layer:
                steps.append((through, EventCompletion(self._point(self._kernels))))
        return steps

    def run_behind(
        self, moves: Sequence[ChunkMove], after: Completion | None, marks: LayerMarks
    ) -> Moved:
        """:meth:`run` of a store behind an engine that still computes the layers."""
        return self._run(moves, after, lambda launch, _: self._queue_behind(launch, moves, marks))

    def _queue_behind(self, launch: Queue, moves: Sequence[ChunkMove], marks: LayerMarks) -> Steps:
        ends = layer_ends(sorted(set(itertools.chain(*marks.order))))
        parts = self._copy.cut([self._slice_bytes], marks.order, ends)
        for place, some in itertools.groupby(parts, lambda part: part.last_layer):
            self._come_after(marks.wait(place))
            pieces = [
                _Piece(index, move, part) for part in some for index, move in enumerate(moves)
            ]
            self._queue_pieces(launch, pieces)
        return ()

    def _queue_pieces(self, launch: Queue, pieces: list[_Piece]) -> None:
        """Queue them in slices, in order; those of one slice share a call of the copy engine."""
        way = 1 if self._storing else -1
        slices = fill(pieces[::way], _Piece.room, self._slice_bytes, FIRST_BYTES)[::way]
        for some in slices:
            self._queue_slice(launch, some[::way])

    def _queue_slice(self, launch: Queue, pieces: list[_Piece]) -> None:
        device, kernels, link = self._device, self._kernels, self._link
        slice_ = self._slices[0]
        self._slices.rotate(-1)
        self._pace(3)
        gaps = [self._gap(*pair) for pair in itertools.pairwise(pieces)]
        starts = _place(pieces, gaps, slice_.address)
        if self._storing:
            device.wait(kernels, slice_.emptied)
            self._launch(launch, pieces, starts)
            device.record(slice_.filled, kernels)
            device.wait(link, slice_.filled)
            self._copy_pieces(pieces, gaps, starts)
            device.record(slice_.emptied, link)
        else:
            device.wait(link, slice_.emptied)
            self._copy_pieces(pieces, gaps, starts)
            device.record(slice_.filled, link)
            device.wait(kernels, slice_.filled)
            self._launch(launch, pieces, starts)
            device.record(slice_.emptied, kernels)

    def _launch(self, launch: Queue, pieces: list[_Piece], starts: list[int]) -> None:
        for piece, start in zip(pieces, starts, strict=True):
            self._pace()
            sums = self._tally.parts[piece.chunk]
            self._device.run(self._kernels, launch, piece.chunk, piece.part, start, sums)

    def _gap(self, before: _Piece, piece: _Piece) -> int | None:
        """Bytes between two payloads that one load may read; None if it may not."""
        one_copy = before.last_region() == piece.region()
        if self._storing or not (one_copy and before.move.reachable and piece.move.reachable):
            return None
        gap = piece.begin() - (before.begin() + before.part.nbytes)
        return (
            gap if 0 <= gap <= NEAR_BYTES and gap % _ALIGN == -before.part.nbytes % _ALIGN else None
        )

    def _copy_pieces(self, pieces: list[_Piece], gaps: list[int | None], starts: list[int]) -> None:
        copies: list[list[int]] = []
        for piece, gap, start in zip(pieces, (None, *gaps), starts, strict=True):
            for first, end in piece.ranges():
                if gap is not None and first == piece.part.offset:
                    copies[-1][2] += gap + end - first
                else:
                    copies.append([start + first, piece.move.address + first, end - first])
        pinned = all(piece.move.reachable for piece in pieces)
        here, host_side, sizes = zip(*copies, strict=True)
        to, origin = (host_side, here) if self._storing else (here, host_side)
        if len(copies) > 1 and pinned and self._device.batches:
            columns = (np.array(column, dtype=np.uint64) for column in (to, origin, sizes))
            self._device.copy_batch(self._link, *columns)
            return
        for one in zip(to, origin, sizes, strict=True):
            self._device.copy(self._link, *one, pinned=pinned)

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
            sizes = part_sizes(
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


class _Piece(NamedTuple):
    """A part of one chunk of a run."""

    chunk: int
    move: ChunkMove
    part: ChunkPart

    def size(self) -> int:
        """What it takes of a slice."""
        return _aligned(self.part.nbytes)

    def room(self) -> int:
        """The same, and what may lie between it and the next."""
        return self.size() + NEAR_BYTES

    def begin(self) -> int:
        """Where it lies in host memory."""
        return self.move.address + self.part.offset

    def region(self) -> int:
        """The registration in which it begins."""
        return self.move.region + sum(cut <= self.part.offset for cut in self.move.cuts)

    def last_region(self) -> int:
        """The registration in which it ends."""
        end = self.part.offset + self.part.nbytes
        return self.move.region + sum(cut < end for cut in self.move.cuts)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Its range of the payload, cut where no single copy may go on."""
        part = self.part
        end = part.offset + part.nbytes
        cuts = (cut for cut in self.move.cuts if part.offset < cut < end)
        return itertools.pairwise((part.offset, *cuts, end))


def _place(pieces: list[_Piece], gaps: list[int | None], address: int) -> list[int]:
    """Where the payload of each would begin for its part to lie in the slice at ``address``.

    A part is as far from the last as in host memory, where one copy brings both.
    """
    starts = []
    for piece, gap in zip(pieces, (*gaps, None), strict=True):
        starts.append(address - piece.part.offset)
        address += piece.size() if gap is None else piece.part.nbytes + gap
    return starts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
