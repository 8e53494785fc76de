"""The fingerprints of chunks in flight: parts added up by kernels, sums brought to the host."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.fold_kernel import fold_sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device import Device

BATCH = 64
"""Chunks whose fingerprints are added up by one kernel."""

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
        with device.on(stream):
            self._sums = torch.zeros((BATCH, rows), dtype=torch.int64, device=where)
        self.parts = list(self._sums.split(1))
        """int64[1, rows] of each chunk of a batch, zero when its kernels begin."""
        self._kept: deque[tuple[Any, torch.Tensor]] = deque()
        self._spare: list[torch.Tensor] = []

    def totals(self, chunks: int) -> torch.Tensor:
        """Pinned int64 for what :meth:`fold` brings, of at least so many chunks."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        for index, spare in enumerate(self._spare):
            if len(spare) >= chunks:
                return self._spare.pop(index)
        return self._device.pinned(max(chunks, BATCH))

    def fold(self, chunks: int, totals: torch.Tensor) -> None:
        """Queue: the sums of the first parts go to ``totals``, and the parts are zero again."""
        handle = self._device.handle(self._stream)
        self._device.run(self._stream, fold_sums, self._sums[:chunks], totals, handle)

    def when(self, over: Any, totals: torch.Tensor, chunks: int) -> Callable[[], list[int]]:
        """How to read the totals once the event ``over`` has passed; they stay until then."""
        self._kept.append((over, totals))
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
