"""Kernels that read and write pinned host memory themselves: one launch a chunk, no slice.

The quickest way for a few small runs, which end before a copy engine has begun. It holds
multiprocessors for as long as the link takes, so a decoding engine pays several times as much for it
as for slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .path import Path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.chunk_copy import ChunkPart, Queue

    from .moves import ChunkMove, Steps

PROGRAMS = 32
"""On the grid: enough for the link (H200, PCIe 5 x16, 30 November 2026: 16 reach 51-52 of 55 GB/s)."""


class DirectPath(Path):
    """See the module. Host memory must be pinned, and kernels find it at the host's addresses."""

    def _make_ready(self) -> None:
        (self._whole,) = self._copy.cut([1 << 62])

    def _queue_chunks(self, launch: Queue, moves: Sequence[ChunkMove]) -> Steps:
        for index, move in enumerate(moves):
            self._queue_chunk(launch, index, move)
        return ()

    def _queue_chunk(self, launch: Queue, index: int, move: ChunkMove) -> None:
        self._pace()
        whole: ChunkPart = self._whole
        self._device.run(
            self._kernels, launch, index, whole, move.address, self._tally.parts[index]
        )

    def _ends(self) -> tuple[Any, Any]:
        over = self._point(self._kernels)
        return over, over
