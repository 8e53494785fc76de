"""Copy-engine copies of every run, many a call, and a kernel that only makes the fingerprints.

No slice and next to no multiprocessor; but the host spends a microsecond or more on a run, so this is
for caches whose runs are long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .whole_chunk_path import WholeChunkPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lmcache_kernels.copy_plan import Leg
    from lmcache_kernels.plane import Plane

    from .moves import ChunkMove
    from .path import Launches


class BatchPath(WholeChunkPath):
    """See the module. No block may be left out.

    Args:
        prepare: a copy into chunks that does not write.
    """

    def _make_ready(self) -> None:
        super()._make_ready()
        self._runs = [_Runs(leg) for leg in self._copy.plan.legs]

    def _wait_for(self, event: Any) -> None:
        super()._wait_for(event)
        self._device.wait(self._link, event)

    def _queue_chunk(self, launches: Launches, index: int, move: ChunkMove) -> None:
        self._pace(3)
        cache, host, sizes = self._addresses(move)
        to, origin = (host, cache) if self._storing else (cache, host)
        self._device.copy_batch(self._link, to, origin, sizes)
        if not self._storing:
            self._device.wait(self._kernels, self._point(self._link))
        for part in self._whole:
            # The address of a chunk that is not written says nothing.
            self._launch(launches, index, part, 0)

    def _ends(self) -> tuple[Any, Any]:
        self._device.wait(self._kernels, self._point(self._link))
        over = self._point(self._kernels)
        return over, over

    def _addresses(
        self, move: ChunkMove
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Of every run: in the cache, in host memory, and its bytes."""
        found = [runs.of(np.asarray(move.blocks[runs.group])) for runs in self._runs]
        cache = np.concatenate([one for one, _ in found])
        payload = np.concatenate([runs.payload for runs in self._runs])
        sizes = np.concatenate([width for _, width in found])
        for cut in move.cuts:
            cache, payload, sizes = _split(cache, payload, sizes, cut)
        return cache, payload + np.uint64(move.address), sizes


class _Runs:
    """The dense runs of a leg."""

    def __init__(self, leg: Leg) -> None:
        self.group = leg.group
        self._cache, chunk = leg.src, leg.dst
        blocks = np.arange(chunk.num_blocks, dtype=np.int64)
        self.payload = _starts(leg.places, chunk, blocks)
        self._width = np.full(len(self.payload), chunk.width, dtype=np.uint64)

    def of(self, blocks: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Addresses and bytes of the runs of a chunk that has these blocks."""
        return _starts(self._cache.bases, self._cache, blocks), self._width


def _starts(bases: Sequence[int], plane: Plane, blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Where the runs of these blocks begin: row, block, token, head."""
    at = blocks // plane.split * plane.block_stride + blocks % plane.split * plane.split_stride
    tokens = np.arange(plane.block_tokens) * plane.token_stride
    heads = np.arange(plane.num_heads) * plane.head_stride
    inner = (at[:, None, None] + tokens[:, None] + heads).reshape(-1).astype(np.uint64)
    rows = np.array(bases, dtype=np.uint64)
    return (rows[:, None] + inner).reshape(-1)


def _split(
    cache: NDArray[np.uint64], payload: NDArray[np.uint64], sizes: NDArray[np.uint64], cut: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """No run goes on across ``cut``, a place in the payload."""
    at = np.uint64(cut)
    (across,) = np.nonzero((payload < at) & (at < payload + sizes))
    before = at - payload[across]
    cache = np.append(cache, cache[across] + before)
    payload = np.append(payload, payload[across] + before)
    sizes = np.append(sizes, sizes[across] - before)
    sizes[across] = before
    return cache, payload, sizes
