"""The block copy by the kernel: tables made once, then a few words and a launch for every copy."""

from __future__ import annotations

import sys
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .call_ring import ring_of
from .copy_config import MAX_GRID, choose_config
from .copy_tables import CALL_WORDS, INLINE_IDS, NO_TILE, leg_table, row_table
from .cuda_runtime import current_device, current_stream
from .errors import LayoutError
from .launching import NOT_INLINE, constants_of, launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from .copy_config import CopyConfig
    from .copy_plan import CopyPlan
    from .ids import IdBuffer
    from .launching import Launch

    Ids: TypeAlias = Sequence[tuple[IdBuffer, IdBuffer]]
    """Per group, destination and source ids."""

    LaunchPart: TypeAlias = Callable[
        [int, int, int, torch.Tensor, int, int, "tuple[int, int] | None"], None
    ]
    """Of one of several copies: its number, first and last tile, sums, shift of its chunk side, where
    the total goes or 0, and another stream with a bound on the grid there."""

_PADDING = [(0,) * (INLINE_IDS - count) for count in range(INLINE_IDS + 1)]
_FINGERPRINT = {None: 0, "dst": 1, "src": 2}


class KernelCopy:
    """Carries out a plan on a GPU, or in Triton's interpreter.

    Args:
        plan: whose planes ``device`` reaches.
        device: whose current stream gets the launches.
        max_programs: bound on the grid of a launch, or None.
        max_launch_bytes: bound on the payload of a launch.
        config: tile and grid, instead of what :func:`choose_config` picks.
        staged: the chunk side is a slice that shall stay in the L2 cache.
        writes: False to make fingerprints only.
    """

    def __init__(
        self,
        plan: CopyPlan,
        device: str,
        *,
        max_programs: int | None,
        max_launch_bytes: int,
        config: CopyConfig | None = None,
        staged: bool = False,
        writes: bool = True,
    ) -> None:
        self._legs = plan.legs
        self._unit = plan.unit
        self._chunk_side = plan.chunk_side
        self._staged, self._writes = staged, writes
        # One tile shape for all legs; the one that moves most per block decides.
        most = max((leg.dst for leg in plan.legs), key=lambda plane: plane.rows * plane.block_bytes)
        self.config = config or choose_config(most, plan.unit, max_programs)
        self._tiles_per_launch = max(1, max_launch_bytes // self.config.tile_bytes(plan.unit))
        self._slots = 1 << (len(plan.legs) - 1).bit_length()
        self._counts: list[int] = []
        self._header: tuple[memoryview, int, int] = memoryview(b""), 0, 0
        self._device = torch.device(device)
        self._index = self._device.index
        self._stream = -1
        self._streams: set[int] = set()
        pairs = [(leg.dst, leg.src) for leg in plan.legs]
        places = [place for leg in plan.legs for place in leg.places]
        legs, rows, self._ready = _upload(
            leg_table(pairs, plan.unit, self.config, self._slots),
            row_table(pairs, places),
            self._device,
        )
        self._tables = (legs, rows)
        self._launch = launcher(legs, rows, plan.rows, self.constants(False), self.config)
        self._launch_inline = None
        if plan.groups == 1:
            self._launch_inline = launcher(legs, rows, plan.rows, self.constants(True), self.config)

    def constants(self, inline: bool) -> dict[str, Any]:
        """What the kernel of this copy is compiled for."""
        return constants_of(
            leg_slots=self._slots,
            unit=self._unit,
            config=self.config,
            fingerprint=_FINGERPRINT[self._chunk_side],
            staged=self._staged,
            writes=self._writes,
            inline=inline,
        )

    def copy(self, ids: Ids, sums: torch.Tensor | None) -> None:
        index = self._index
        if index is not None and current_device() != index:
            with torch.cuda.device(index):
                self.copy(ids, sums)
            return
        stream = 0 if index is None else current_stream(index)
        if stream != self._stream:
            self._use(stream)
        counts = [len(to) for to, _ in ids]
        if counts != self._counts:
            self._header, self._counts = self._header_of(counts), counts
        header, words, tiles = self._header
        if not tiles:
            return
        if self._launch_inline is not None and counts[0] <= INLINE_IDS:
            self._queue(self._launch_inline, 0, _inline(*ids[0]), tiles, sums)
        elif index is None:
            call = torch.empty(words, dtype=torch.int32)
            _write(call.numpy().data, 0, header, ids)
            self._queue(self._launch, call, NOT_INLINE, tiles, sums)
        else:
            ring = ring_of(index, stream)
            with ring.lock:
                at = ring.take(words)
                _write(ring.view, at, header, ids)
                self._queue(self._launch, ring.upload(at, words), NOT_INLINE, tiles, sums)

    @contextmanager
    def queued(self, copies: Sequence[Ids], stream: int) -> Iterator[LaunchPart]:
        """Make the ids of several copies of equal counts ready for launches of parts of them.

        The stream's device must be the current one, and no other copies may be queued on the stream
        before the block ends.
        """
        if stream != self._stream:
            self._use(stream)
        counts = [len(to) for to, _ in copies[0]] if copies else []
        header, words, _ = self._header_of(counts) if copies else self._header
        launch, calls = self._launch, []
        if self._launch_inline is not None and copies and self.inline(counts[0]):
            launch = self._launch_inline
            calls = [(0, _inline(*ids[0])) for ids in copies]
        elif self._index is None:
            for ids in copies:
                call = torch.empty(words, dtype=torch.int32)
                _write(call.numpy().data, 0, header, ids)
                calls.append((call, NOT_INLINE))
        else:
            ring = ring_of(self._index, stream)
            with ring.lock:
                at = ring.take(words * len(copies))
                for number, ids in enumerate(copies):
                    _write(ring.view, at + number * words, header, ids)
                there = ring.upload(at, words * len(copies))
                calls = [(there + 4 * words * copy, NOT_INLINE) for copy in range(len(copies))]
                yield self._parts_of(launch, calls, stream)
            return
        yield self._parts_of(launch, calls, stream)

    def inline(self, ids: int) -> bool:
        """Do so many ids travel as arguments of a launch, and not through memory?"""
        return self._launch_inline is not None and ids <= INLINE_IDS

    def _parts_of(
        self, launch: Launch, calls: Sequence[tuple[Any, tuple[int, ...]]], stream: int
    ) -> LaunchPart:
        def part(
            copy: int,
            first: int,
            end: int,
            sums: torch.Tensor,
            shift: int,
            total_at: int,
            aside: tuple[int, int] | None,
        ) -> None:
            other, most = aside or (stream, MAX_GRID)
            if other not in self._streams:
                self._use(other)
            launch(*calls[copy], other, first, end, sums, shift, total_at, most)

        return part

    def _use(self, stream: int) -> None:
        """From now on copies go to another stream."""
        if self._ready is not None and stream not in self._streams:
            torch.cuda.ExternalStream(stream, self._device).wait_event(self._ready)
        self._streams.add(stream)
        self._stream = stream

    def _queue(
        self,
        launch: Launch,
        call: Any,
        inline: tuple[int, ...],
        tiles: int,
        sums: torch.Tensor | None,
    ) -> None:
        step = self._tiles_per_launch
        if tiles <= step:
            launch(call, inline, self._stream, 0, tiles, sums)
            return
        for first in range(0, tiles, step):
            launch(call, inline, self._stream, first, min(tiles, first + step), sums)

    def _header_of(self, counts: list[int]) -> tuple[memoryview, int, int]:
        """The call's words in front of the ids; the words of all; the tiles of all legs."""
        starts, at = [], self._slots * CALL_WORDS
        for count in counts:
            starts.append(at)
            at += 2 * count
        words: list[int] = []
        tiles = 0
        for leg in self._legs:
            count = counts[leg.group]
            words += (tiles, count, starts[leg.group], 0)
            tiles += self.config.tiles(leg.dst, count, self._unit)
        if tiles >= NO_TILE:
            raise LayoutError(f"ids: expected a copy of less than {NO_TILE} tiles, got {tiles}")
        words += [NO_TILE, 0, 0, 0] * (self._slots - len(self._legs))
        return memoryview(array("i", words)), at, tiles

    def __del__(self) -> None:
        # At the very end the module's own names are gone.
        if sys is None or sys.is_finalizing() or getattr(self, "_index", None) is None:
            return
        # Kernels that are still queued read the tables.
        for stream in self._streams:
            for table in self._tables:
                table.record_stream(torch.cuda.ExternalStream(stream, self._device))


def _inline(to: IdBuffer, origin: IdBuffer) -> tuple[int, ...]:
    """The ids of a copy as arguments of its launch."""
    padding = _PADDING[len(to)]
    return (len(to), *to, *padding, *origin, *padding)


def _write(view: memoryview, at: int, header: memoryview, ids: Ids) -> None:
    end = at + len(header)
    view[at:end] = header
    for to, origin in ids:
        middle = end + len(to)
        view[end:middle] = to
        end = middle + len(origin)
        view[middle:end] = origin


def _upload(
    legs: list[int], rows: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]:
    """The tables on the device, and the event after which they are there."""
    if device.type == "cpu":
        return torch.tensor(legs), torch.tensor(rows), None
    with torch.cuda.device(device):
        there = [
            torch.tensor(words, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
            for words in (legs, rows)
        ]
        ready = torch.cuda.Event()
        ready.record()
    return there[0], there[1], ready
