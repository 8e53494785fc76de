"""Paths whose kernels take each chunk in one launch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from .path import Path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.chunk_copy import Queue

    from .moves import ChunkMove, Steps


class WholeChunkPath(Path):
    """See the module."""

    def _make_ready(self) -> None:
        (self._whole,) = self._copy.cut([1 << 62])

    def _queue_chunks(self, launch: Queue, moves: Sequence[ChunkMove]) -> Steps:
        for index, move in enumerate(moves):
            self._pace()
            self._queue_chunk(launch, index, move)
        return ()

    @abstractmethod
    def _queue_chunk(self, launch: Queue, index: int, move: ChunkMove) -> None:
        """Queue the chunk at a place in its run."""
