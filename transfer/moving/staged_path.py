"""Through slices of device memory: a kernel fills (or empties) one while another is on the link.

Stores: gather kernel into a slice, then one large copy-engine copy of it to host memory; loads run
the mirror. So the link stays full and only short kernels touch the multiprocessors. Order is kept by
events alone. A slice holds parts of one chunk or of several. Those whose slots are neighbours, or evenly
spaced, are rows of one copy; other small ones share a call of the copy engine.
Device memory: what slice_plan says, for each direction that is used.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcache_kernels.errors import TransferFailed
from lmcache_kernels.transfer.pacing import paced

from .device import EventCompletion
from .path import Path
from .pieces import ALIGN, Contents, Piece, aligned, in_rows
from .slice_plan import (
    ALONE_BYTES,
    FIRST_BYTES,
    HEAD_PROGRAMS,
    SECOND_BYTES,
    SLICE_BYTES,
    SLICES,
    WHOLE_BYTES,
    fill,
    head_bytes,
    layer_ends,
    layer_sizes,
    part_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from lmcache_kernels.chunk_copy import ChunkCopy, ChunkPart, Layers
    from lmcache_kernels.chunk_layout import ChunkLayout

    from .device import Device
    from .moves import ChunkMove, Completion, LayerMarks, Moved, Steps
    from .path import Launches

    _Filled: TypeAlias = "tuple[_Slice, Contents]"

BY_LAYER = "staged: layer by layer"

_RAMP = FIRST_BYTES, SECOND_BYTES
_ENDS = ((False, False), (True, False), (False, True), (True, True))


class StagedPath(Path):
    """See the module.

    Args:
        layout: of the chunks.
        slices, slice_bytes: how many there are, and how large at most; None: as slice_plan has it.
        head: a kernel writes the first part of a store to host memory itself.
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
        head: bool = True,
    ) -> None:
        super().__init__(device, prepare, where, storing=storing)
        self._nbytes = layout.nbytes
        self._count = slices or SLICES
        self._slice_bytes = aligned(slice_bytes or SLICE_BYTES)
        self._has_head = head and storing
        self._slices: deque[_Slice] = deque()
        self._cuts: dict[tuple[bool, bool], list[ChunkPart]] = {}
        self._layer_cut: list[ChunkPart] = []
        self._cut_for: list[Any] = []

    def _make_ready(self) -> None:
        largest = max(part.nbytes for ends in _ENDS for part in self._parts(*ends))
        # Small chunks share a slice, so it is not made smaller for them.
        shape = (self._count, max(aligned(largest), self._slice_bytes))
        with self._device.on(self._kernels):
            self._memory = torch.empty(shape, dtype=torch.uint8, device=self._where)
        # New ones, also where a device that stopped still holds older ones.
        self._slices = deque(_Slice(piece, self._device) for piece in self._memory)
        if self._has_head:
            self._aside = self._stream("head")

    def _let_go(self) -> None:
        self._slices.clear()
        del self._memory

    @contextmanager
    def _launches(self, moves: Sequence[ChunkMove]) -> Iterator[Launches]:
        """A load's ids are made ready for its first kernel: its copies into slices can begin before."""
        if self._storing:
            with super()._launches(moves) as launches:
                yield launches
            return
        with ExitStack() as stack:
            yield cache(lambda: stack.enter_context(self._ids_of(moves)))

    def _queue_chunks(self, launches: Launches, moves: Sequence[ChunkMove]) -> Steps:
        last = len(moves) - 1
        whole = not self._storing and len(moves) * self._nbytes <= WHOLE_BYTES
        pieces = [
            piece
            for index, move in paced(enumerate(moves))
            for piece in self._pieces_of(
                index, move, self._parts(index == 0, index == last and not whole)
            )
        ]
        of_first = itertools.takewhile(lambda piece: piece.chunk == 0, pieces)
        head = next((piece for piece in of_first if not piece.part.last), None)
        if self._has_head and head is not None and head.move.reachable:
            pieces.remove(head)
            self._queue_head(launches, head)
            self._queue_pieces(launches, pieces, _RAMP[1:])
        else:
            self._queue_pieces(launches, pieces, () if whole else _RAMP)
        return ()

    def _wait_for(self, event: Any) -> None:
        super()._wait_for(event)
        if self._has_head:  # not by way of the other stream: every step costs some 3 us
            self._device.wait(self._aside, event)

    def _queue_head(self, launches: Launches, piece: Piece) -> None:
        """Let a kernel write the first part of a store to host memory, while slices are filled."""
        aside = self._aside
        if not self._copy.inline:  # the ids must be on the device
            self._device.wait(aside, self._point(self._kernels))
        self._launch(
            launches,
            piece.chunk,
            piece.part,
            piece.move.address,
            (aside, HEAD_PROGRAMS),
        )
        self._head = self._point(aside), piece.part.group

    def run_by_layer(
        self, moves: Sequence[ChunkMove], after: Completion | None, layers: Layers
    ) -> Moved:
        """:meth:`run`, all chunks' first layers first; what comes when is in ``Moved.layers``.

        Args:
            layers: see :meth:`ChunkCopy.cut`.
        """
        return self._run(
            moves, after, BY_LAYER, lambda launches, _: self._queue_layers(launches, moves, layers)
        )

    def _queue_layers(
        self, launches: Launches, moves: Sequence[ChunkMove], layers: Layers
    ) -> Steps:
        parts = self._cut_by_layer(layer_sizes(self._within_slice()), layers)
        steps: list[tuple[int, Completion]] = []
        for part, behind in itertools.zip_longest(parts, parts[1:]):
            pieces = [
                Piece(index, move, part)
                for index, move in enumerate(moves)
                if self._wanted[index][part.group]
            ]
            self._queue_pieces(launches, pieces)
            through = max(map(max, layers)) if behind is None else behind.first_layer - 1
            if through >= part.first_layer:
                steps.append((through, EventCompletion(self._point(self._kernels))))
        return steps

    def run_behind(
        self, moves: Sequence[ChunkMove], after: Completion | None, marks: LayerMarks
    ) -> Moved:
        """:meth:`run` of a store behind an engine that still computes the layers."""
        return self._run(
            moves, after, BY_LAYER, lambda launches, _: self._queue_behind(launches, moves, marks)
        )

    def _queue_behind(
        self, launches: Launches, moves: Sequence[ChunkMove], marks: LayerMarks
    ) -> Steps:
        ends = layer_ends(sorted(set(itertools.chain(*marks.order))))
        parts = self._cut_by_layer([self._within_slice()], marks.order, ends)
        for place, some in itertools.groupby(parts, lambda part: part.last_layer):
            self._come_after(marks.wait(place))
            pieces = [Piece(index, move, part) for part in some for index, move in enumerate(moves)]
            self._queue_pieces(launches, pieces)
        return ()

    def _cut_by_layer(
        self, sizes: Sequence[int], layers: Layers, ends: Sequence[int] = ()
    ) -> list[ChunkPart]:
        """:meth:`ChunkCopy.cut`, which takes milliseconds, done once for an order: an engine has one."""
        asked = [list(sizes), [list(order) for order in layers], list(ends)]
        if asked != self._cut_for:
            self._layer_cut, self._cut_for = self._copy.cut(sizes, layers, ends), asked
        return self._layer_cut

    def _queue_pieces(
        self, launches: Launches, pieces: list[Piece], ramp: Sequence[int] = _RAMP
    ) -> None:
        """Queue them in slices, in order.

        Args:
            ramp: bytes of slices, from the one at which one engine waits for the other.
        """
        way = 1 if self._storing else -1
        slices = fill(pieces[::way], Piece.size, self._slice_bytes, ramp)[::way]
        # A load's copies wait for nobody but slices, so all that can begin do so before any kernel.
        ahead = 1 if self._storing else self._count
        filled: deque[_Filled] = deque()
        for some in slices:
            if len(filled) == ahead:
                self._empty(launches, filled.popleft())
            filled.append(self._fill(launches, some[::way]))
        for one in filled:
            self._empty(launches, one)

    def _within_slice(self) -> int:
        """What a part may be cut to so that, with the step that it may have more, it fits a slice."""
        return max(1, self._slice_bytes - self._copy.step_bytes - ALIGN)

    def _fill(self, launches: Launches, pieces: list[Piece]) -> _Filled:
        """Queue what brings pieces into the next slice."""
        slice_ = self._slices[0]
        self._slices.rotate(-1)
        self._pace(3)
        contents = Contents.at(slice_.address, pieces)
        if contents.end() > slice_.end:
            raise TransferFailed(
                f"slice: expected at most {slice_.end - slice_.address} bytes, got "
                f"{contents.end() - slice_.address}"
            )
        stream = self._kernels if self._storing else self._link
        self._move(launches, contents, stream, after=slice_.emptied, then=slice_.filled)
        return slice_, contents

    def _empty(self, launches: Launches, filled: _Filled) -> None:
        """Queue what brings the pieces of a slice where they belong."""
        slice_, contents = filled
        stream = self._link if self._storing else self._kernels
        self._move(launches, contents, stream, after=slice_.filled, then=slice_.emptied)

    def _move(
        self, launches: Launches, contents: Contents, stream: Any, *, after: Any, then: Any
    ) -> None:
        self._device.wait(stream, after)
        if stream is self._kernels:
            for piece, start in zip(contents.pieces, contents.starts, strict=True):
                self._pace()
                self._launch(launches, piece.chunk, piece.part, start)
        else:
            self._copy_pieces(contents)
        self._device.record(then, stream)

    def _copy_pieces(self, contents: Contents) -> None:
        stretches = contents.stretches()
        pinned = all(piece.move.reachable for piece in contents.pieces)
        calls = in_rows(stretches) if pinned else stretches
        small = sum(one.nbytes for one in stretches) < ALONE_BYTES * len(calls)
        if small and len(calls) > 1 and pinned and self._device.batches:
            here, there, sizes, *_ = zip(*stretches, strict=True)
            sides = (there, here, sizes) if self._storing else (here, there, sizes)
            columns = (np.array(column, dtype=np.uint64) for column in sides)
            self._device.copy_batch(self._link, *columns)
            return
        for rows in calls:
            self._pace()
            here, there = (rows.here, rows.here_apart), (rows.there, rows.there_apart)
            to, origin = (there, here) if self._storing else (here, there)
            if rows.times == 1:
                self._device.copy(self._link, to[0], origin[0], rows.nbytes, pinned=pinned)
            else:
                self._device.copy_rows(self._link, to, origin, rows.nbytes, rows.times)

    def _ends(self) -> tuple[Any, Any]:
        if self._head is not None:
            self._device.wait(self._kernels, self._head[0])
            self._device.wait(self._link, self._head[0])
        cache_free = self._point(self._kernels)
        # Every copy of a store comes after its kernel.
        return cache_free, self._point(self._link) if self._storing else cache_free

    def _pieces_of(self, chunk: int, move: ChunkMove, parts: Sequence[ChunkPart]) -> list[Piece]:
        wanted = self._wanted[chunk]
        return [Piece(chunk, move, part) for part in parts if wanted[part.group]]

    def _parts(self, first: bool, last: bool) -> list[ChunkPart]:
        """How a chunk is cut that is, or is not, the first and the last of a run."""
        ends = first and self._storing, last and not self._storing
        if ends not in self._cuts:
            start = head_bytes(self._nbytes) if self._has_head else FIRST_BYTES
            sizes = part_sizes(
                self._nbytes,
                self._slice_bytes,
                first=start if ends[0] else 0,
                last=FIRST_BYTES if ends[1] else 0,
            )
            self._cuts[ends] = self._copy.cut(sizes)
        return self._cuts[ends]


class _Slice:
    """A piece of device memory, and the events after which each engine may have it."""

    def __init__(self, memory: torch.Tensor, device: Device) -> None:
        self.address = memory.data_ptr()
        self.end = self.address + memory.numel()
        self.filled = device.event()
        self.emptied = device.event()
