"""Moves chunks of a cache that lies in host memory: plain synchronous copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_kernels.copying import copy_blocks

from .moves import Over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.plane import CacheGroup

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
        for move in moves:
            for group, chunk, (inside, blocks) in self._sides(move):
                for plane, dense in zip(group.planes, chunk, strict=True):
                    copy_blocks(dense, inside, plane, blocks)
        return Over(), Over()

    def scatter(self, moves: Sequence[ChunkMove], after: Completion | None) -> Completion:
        for move in moves:
            for group, chunk, (inside, blocks) in self._sides(move):
                for plane, dense in zip(group.planes, chunk, strict=True):
                    copy_blocks(plane, blocks, dense, inside)
        return Over()

    def _sides(self, move: ChunkMove):  # type: ignore[no-untyped-def]  # noqa: ANN202
        planes = self._layout.planes_at(move.address, "cpu")
        return zip(self._groups, planes, move.pairs, strict=True)

    def close(self) -> None:
        pass
