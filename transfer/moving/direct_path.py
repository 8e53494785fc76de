"""Kernels that read and write pinned host memory themselves: one launch a group of a chunk, no slice.

The quickest way for a few small runs, which end before a copy engine has begun. It holds
multiprocessors for as long as the link takes, so a decoding engine pays several times as much for it
as for slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .whole_chunk_path import WholeChunkPath

if TYPE_CHECKING:
    from .moves import ChunkMove
    from .path import Launches

PROGRAMS = 32
"""On the grid: enough for the link (H200, PCIe 5 x16, 30 November 2026: 16 reach 51-52 of 55 GB/s)."""


class DirectPath(WholeChunkPath):
    """See the module. Host memory must be pinned, and kernels find it at the host's addresses."""

    def _queue_chunk(self, launches: Launches, index: int, move: ChunkMove) -> None:
        for part in self._whole:
            if self._wanted[index][part.group]:
                self._launch(launches, index, part, move.address)

    def _ends(self) -> tuple[Any, Any]:
        over = self._point(self._kernels)
        return over, over
