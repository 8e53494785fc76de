"""The block copy by the kernel: tables made once, then a few words and a launch for every copy."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from .call_buffers import call_buffers
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
        self._device = torch.device(device)
        pairs = [(leg.dst, leg.src) for leg in plan.legs]
        places = [place for leg in plan.legs for place in leg.places]
        self._launch = launcher(
            _table(leg_table(pairs, plan.unit), self._device),
            _table(row_table(pairs, places), self._device),
            leg_slots=self._slots,
            unit=plan.unit,
            config=self._config,
            fingerprint=_FINGERPRINT[plan.chunk_side],
        )
        self._buffers = call_buffers(device)

    def copy(self, ids: Sequence[tuple[IdBuffer, IdBuffer]], sums: torch.Tensor | None) -> None:
        if self._device.type == "cuda" and torch._C._cuda_getDevice() != self._device.index:
            with torch.cuda.device(self._device):
                self._queue(ids, sums)
        else:
            self._queue(ids, sums)

    def _queue(self, ids: Sequence[tuple[IdBuffer, IdBuffer]], sums: torch.Tensor | None) -> None:
        header, total = self._header([len(to) for to, _ in ids])
        if not total:
            return
        words = len(header) + 2 * sum(len(to) for to, _ in ids)
        buffer = self._buffers.take(words)
        view = buffer.view
        view[: len(header)] = header
        at = len(header)
        for to, origin in ids:
            end = at + len(to)
            view[at:end] = to
            at = end + len(to)
            view[end:at] = origin
        config = self._config
        for first in range(0, total, self._tiles_per_launch):
            end = min(total, first + self._tiles_per_launch)
            self._launch(buffer, first, end, min(end - first, config.programs), sums)
        self._buffers.put(buffer)

    def _header(self, counts: list[int]) -> tuple[memoryview, int]:
        """The call's words in front of the ids, and the tiles of all legs."""
        starts, at = [], self._slots * CALL_WORDS
        for count in counts:
            starts.append(at)
            at += 2 * count
        words: list[int] = []
        tile = 0
        for leg in self._legs:
            count = counts[leg.group]
            words += (tile, count, starts[leg.group], 0)
            tile += self._config.tiles(leg.dst, count, self._unit)
        words += [NO_TILE, 0, 0, 0] * (self._slots - len(self._legs))
        return memoryview(array("i", words)), tile


def _table(words: list[int], device: torch.device) -> torch.Tensor:
    table = torch.tensor(words, dtype=torch.int64).to(device)
    if table.is_cuda:
        # The table outlives this stream's order: a later copy may run on another stream.
        torch.cuda.current_stream(device).synchronize()
    return table
