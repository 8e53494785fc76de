"""Moves chunks of a cache that lies in host memory: plain synchronous copies."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, repeat
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.chunk_copy import check_layers, pair_planes
from lmcache_kernels.copying import PreparedCopy
from lmcache_kernels.fingerprint import unsigned

from .moves import Moved, Over, pair_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.chunk_copy import Layers
    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.copy_plan import Side
    from lmcache_kernels.plane import CacheGroup

    from .moves import ChunkMove, Completion, Fingerprints, LayerMarks


class HostMover:
    """The :class:`~lmcache_kernels.transfer.moving.moves.Mover` of CPU engines."""

    synchronous = True
    decoding = False

    def __init__(self, groups: Sequence[CacheGroup], layout: ChunkLayout) -> None:
        self._groups = groups
        self._layout = layout

    def prepare(self) -> None:
        pass

    def ready(self) -> Completion | None:
        return None

    def join(self, point: Completion) -> None:
        pass  # what it stands for is over

    def gather(
        self,
        moves: Sequence[ChunkMove],
        after: Completion | None,
        layers: LayerMarks | None = None,
    ) -> Moved:
        if layers is not None:
            layers.wait(check_layers(layers.order, self._groups))
        return self._move(moves, "dst")

    def scatter(
        self,
        moves: Sequence[ChunkMove],
        after: Completion | None,
        layers: Layers | None = None,
    ) -> Moved:
        if layers is None:
            return self._move(moves, "src")
        last = check_layers(layers, self._groups)
        moved = self._move(moves, "src")
        return replace(moved, layers=[(last, moved.done)])

    def _move(self, moves: Sequence[ChunkMove], chunk_side: Side) -> Moved:
        found = [self._move_one(move, chunk_side) for move in moves]
        return Moved(Over(), Over(), lambda: found)

    def _move_one(self, move: ChunkMove, chunk_side: Side) -> Fingerprints:
        chunks = self._layout.planes_at(move.address, "cpu")
        copy = PreparedCopy(pair_planes(self._groups, chunks, chunk_side), chunk_side=chunk_side)
        sums = torch.zeros((1, copy.plan.rows), dtype=torch.int64)
        copy.copy_groups(pair_ids(self._layout, move, chunk_side), sums=sums)
        rows = iter(sums[0].tolist())
        totals = [0] * len(self._groups)
        for leg in copy.plan.legs:
            totals[leg.group] = unsigned([totals[leg.group], *islice(rows, leg.dst.rows)])
        kept = move.wanted() if chunk_side == "src" else repeat(True)
        return tuple(total if one else None for total, one in zip(totals, kept, strict=False))

    def close(self) -> None:
        pass
