"""Paths whose kernels take each group of a chunk in one launch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from .path import Path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .moves import ChunkMove, Steps
    from .path import Launches


class WholeChunkPath(Path):
    """See the module."""

    def _make_ready(self) -> None:
        self._whole = self._copy.cut([1 << 62])  # a part for each group

    def _queue_chunks(self, launches: Launches, moves: Sequence[ChunkMove]) -> Steps:
        for index, move in enumerate(moves):
            self._pace(len(self._whole))
            self._queue_chunk(launches, index, move)
        return ()

    @abstractmethod
    def _queue_chunk(self, launches: Launches, index: int, move: ChunkMove) -> None:
        """Queue the chunk at a place in its run."""
