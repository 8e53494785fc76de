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

    def totals(self, chunks: int) -> torch.Tensor:
        """Pinned int64[chunks] for what :meth:`fold` brings."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        return self._device.pinned(chunks)

    def fold(self, chunks: int, totals: torch.Tensor) -> None:
        """Queue: the sums of the first parts go to ``totals``, and the parts are zero again."""
        self._device.run(self._stream, self._fold, chunks, totals)

    def when(self, over: Any, totals: torch.Tensor) -> Callable[[], list[int]]:
        """How to read the totals once the event ``over`` has passed; they stay until then."""
        self._kept.append((over, totals))
        return lambda: [total % _MODULUS for total in totals.tolist()]

    def clear(self) -> None:
        """Queue: forget what was added up."""
        self._device.run(self._stream, self._zero)

    def _fold(self, chunks: int, totals: torch.Tensor) -> None:
        with self._device.on(self._stream):
            fold_sums(self._sums[:chunks], totals)

    def _zero(self) -> None:
        with self._device.on(self._stream):
            self._sums.zero_()
