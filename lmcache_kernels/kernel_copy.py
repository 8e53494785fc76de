"""The block copy by the kernel: tables made once, then a few words and a launch for every copy."""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING

import torch

from .call_ring import CallRing, ring_of
from .copy_config import choose_config
from .copy_tables import CALL_WORDS, NO_TILE, leg_table, row_table
from .launching import launcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .copy_plan import CopyPlan
    from .ids import IdBuffer

_FINGERPRINT = {None: 0, "dst": 1, "src": 2}


class KernelCopy:
    """Carries out a plan on a GPU, or in Triton's interpreter.

    Args:
        plan: whose planes ``device`` reaches.
        device: whose current stream gets the launches.
        max_programs: bound on the grid of a launch, or None.
        max_launch_bytes: bound on the payload of a launch.
    """

    def __init__(
        self, plan: CopyPlan, device: str, *, max_programs: int | None, max_launch_bytes: int
    ) -> None:
        self._legs = plan.legs
        self._unit = plan.unit
        # One tile shape for all legs; the one that moves most per block decides.
        most = max((leg.dst for leg in plan.legs), key=lambda plane: plane.rows * plane.block_bytes)
        self._config = choose_config(most, plan.unit, max_programs)
        self._tiles_per_launch = max(1, max_launch_bytes // self._config.tile_bytes(plan.unit))
        self._slots = 1 << (len(plan.legs) - 1).bit_length()
        self._counts: list[int] = []
        self._header: tuple[memoryview, int] = memoryview(b""), 0
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._host_ring = CallRing(None)
        self._streams: set[int] = set()
        pairs = [(leg.dst, leg.src) for leg in plan.legs]
        places = [place for leg in plan.legs for place in leg.places]
        self._tables = (
            _table(leg_table(pairs, plan.unit), self._device),
            _table(row_table(pairs, places), self._device),
        )
        self._launch = launcher(
            *self._tables,
            leg_slots=self._slots,
            unit=plan.unit,
            config=self._config,
            fingerprint=_FINGERPRINT[plan.chunk_side],
        )

    def copy(self, ids: Sequence[tuple[IdBuffer, IdBuffer]], sums: torch.Tensor | None) -> None:
        if not self._on_gpu:
            self._queue(self._host_ring, 0, ids, sums)
            return
        index = self._device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self.copy(ids, sums)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        self._streams.add(stream)
        self._queue(ring_of(index, stream), stream, ids, sums)

    def _queue(
        self,
        ring: CallRing,
        stream: int,
        ids: Sequence[tuple[IdBuffer, IdBuffer]],
        sums: torch.Tensor | None,
    ) -> None:
        counts = [len(to) for to, _ in ids]
        if counts != self._counts:
            self._header, self._counts = self._header_of(counts), counts
        header, tiles = self._header
        if not tiles:
            return
        with ring.lock:
            at = ring.take(len(header) + 2 * sum(counts))
            view = ring.view
            end = at + len(header)
            view[at:end] = header
            for to, origin in ids:
                middle = end + len(to)
                view[end:middle] = to
                end = middle + len(to)
                view[middle:end] = origin
            for first in range(0, tiles, self._tiles_per_launch):
                last = min(tiles, first + self._tiles_per_launch)
                self._launch(ring, at, stream, first, last, sums)

    def _header_of(self, counts: list[int]) -> tuple[memoryview, int]:
        """The call's words in front of the ids, and the tiles of all legs."""
        starts, at = [], self._slots * CALL_WORDS
        for count in counts:
            starts.append(at)
            at += 2 * count
        words: list[int] = []
        tiles = 0
        for leg in self._legs:
            count = counts[leg.group]
            words += (tiles, count, starts[leg.group], 0)
            tiles += self._config.tiles(leg.dst, count, self._unit)
        words += [NO_TILE, 0, 0, 0] * (self._slots - len(self._legs))
        return memoryview(array("i", words)), tiles

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # Kernels that are still queued read the tables.
        for stream in getattr(self, "_streams", ()):
            for table in self._tables:
                table.record_stream(torch.cuda.ExternalStream(stream, self._device))


def _table(words: list[int], device: torch.device) -> torch.Tensor:
    table = torch.tensor(words, dtype=torch.int64).to(device)
    if table.is_cuda:
        # The table outlives this stream's order: a later copy may run on another stream.
        torch.cuda.current_stream(device).synchronize()
    return table
