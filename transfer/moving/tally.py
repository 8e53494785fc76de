"""The fingerprints of chunks in flight: parts added up by kernels, sums brought to the host."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.fold_kernel import fold_sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device import Device

CHUNKS = 64
"""For which there is room at first."""

_MODULUS = 1 << 64


class Tally:
    """Of the chunks that one stream's kernels move.

    Args:
        rows: parts of a fingerprint.
        where: the device, as torch spells it.
    """

    def __init__(self, device: Device, stream: Any, rows: int, where: str) -> None:
        self._device = device
        self._stream = stream
        self._rows, self._where = rows, where
        self._kept: deque[tuple[Any, tuple[torch.Tensor, ...]]] = deque()
        self._spare: list[torch.Tensor] = []
        self._make_room(CHUNKS)

    def _make_room(self, chunks: int) -> None:
        with self._device.on(self._stream):
            self._sums = torch.zeros((chunks, self._rows), dtype=torch.int64, device=self._where)
        self.parts = list(self._sums.split(1))
        """int64[1, rows] of each chunk of a run, zero when its kernels begin."""

    def totals(self, chunks: int) -> torch.Tensor:
        """Pinned int64 for what :meth:`fold` brings, of a run of at most so many chunks."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        if chunks > len(self.parts):
            # Kernels that still use the old ones are in front of whatever gets that memory next.
            self._make_room(1 << (chunks - 1).bit_length())
        for index, spare in enumerate(self._spare):
            if len(spare) >= chunks:
                return self._spare.pop(index)
        return self._device.pinned(max(chunks, CHUNKS))

    def fold(self, chunks: int, totals: torch.Tensor) -> None:
        """Queue: the sums of the first parts go to ``totals``, and the parts are zero again."""
        handle = self._device.handle(self._stream)
        self._device.run(self._stream, fold_sums, self._sums[:chunks], totals, handle)

    def when(self, over: Any, totals: torch.Tensor, chunks: int) -> Callable[[], list[int]]:
        """How to read the totals once the event ``over`` has passed; they stay until then."""
        self._kept.append((over, (totals, self._sums)))
        found: list[int] = []

        def read() -> list[int]:
            if len(found) < chunks:
                found.extend(total % _MODULUS for total in totals[:chunks].tolist())
                self._spare.append(totals)  # torch takes 50 us to make another
            return found

        return read

    def clear(self) -> None:
        """Queue: forget what was added up."""
        self._device.run(self._stream, self._zero)

    def _zero(self) -> None:
        with self._device.on(self._stream):
            self._sums.zero_()
