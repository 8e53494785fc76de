"""Moves chunks of a cache that lies in host memory: plain synchronous copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_kernels.copying import copy_blocks

from .moves import Over

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.plane import CacheGroup, Plane

    from .moves import ChunkMove, Completion


class HostMover:
    """The :class:`~lmcache_kernels.transfer.moves.Mover` of CPU engines."""

    synchronous = True

    def __init__(self, groups: Sequence[CacheGroup], layout: ChunkLayout) -> None:
        self._groups = groups
        self._layout = layout

    def ready(self) -> Completion | None:
        return None

    def gather(
        self, moves: Sequence[ChunkMove], after: Completion | None
    ) -> tuple[Completion, Completion]:
        for plane, blocks, dense, inside in self._pairs(moves):
            copy_blocks(dense, inside, plane, blocks)
        return Over(), Over()

    def scatter(self, moves: Sequence[ChunkMove], after: Completion | None) -> Completion:
        for plane, blocks, dense, inside in self._pairs(moves):
            copy_blocks(plane, blocks, dense, inside)
        return Over()

    def _pairs(
        self, moves: Sequence[ChunkMove]
    ) -> Iterator[tuple[Plane, tuple[int, ...], Plane, tuple[int, ...]]]:
        """(plane of the cache, its blocks, plane of a chunk, its blocks) of all moves."""
        for move in moves:
            chunks = self._layout.planes_at(move.address, "cpu")
            for group, chunk, (inside, blocks) in zip(
                self._groups, chunks, move.pairs, strict=True
            ):
                for plane, dense in zip(group.planes, chunk, strict=True):
                    yield plane, blocks, dense, inside

    def close(self) -> None:
        pass
