"""What a mover is asked to do: which chunk in host memory goes with which blocks of the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lmcache_kernels.errors import LayoutError, TransferFailed
from lmcache_kernels.ids import ABSENT, pack_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from lmcache_kernels.chunk_copy import Layers
    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.copy_plan import Side
    from lmcache_kernels.plane import CacheGroup

    Steps: TypeAlias = Sequence[tuple[int, "Completion"]]
    Fingerprints: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One chunk between host memory and the cache.

    Attributes:
        address: of the chunk's payload in host memory.
        blocks: per group, the cache's blocks of the chunk, in order; ``ABSENT`` in a scatter for
            those that are left out.
        cuts: offsets inside the payload that no single copy may span.
        region: number of the registration in which the payload begins; every cut begins another. One
            copy may span neighbouring payloads of one registration.
        reachable: kernels find the payload at this address too, as it is pinned.
    """

    address: int
    blocks: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...] = ()
    reachable: bool = False
    region: int = 0

    def wanted(self) -> tuple[bool, ...]:
        """Per group, whether a scatter writes any of its blocks: the payload of others need not move."""
        return tuple([any(block != ABSENT for block in blocks) for blocks in self.blocks])


class Completion(Protocol):
    """A point in a device's work that can be waited for."""

    def done(self) -> bool: ...

    def wait(self, timeout: float) -> bool:
        """True once the work before this point is over, False when ``timeout`` seconds passed."""
        ...


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of queued moves.

    Attributes:
        cache_free: the cache's blocks are read (gather) or written (scatter).
        done: so is everything else.
        fingerprints: per move, in order, what each group's part of the payload adds to its fingerprint;
            None for a group that was left out altogether. Only once ``done`` is over.
        note: which way they go, and why, in a few words.
        layers: of a scatter by layers: (place in the order, when all layers up to it are there).
    """

    cache_free: Completion
    done: Completion
    fingerprints: Callable[[], list[Fingerprints]]
    note: str = ""
    layers: Steps = ()


def is_as_stored(found: Fingerprints, stored: Sequence[int]) -> bool:
    """Whether what was loaded of a chunk is what its slot says was stored, group by group."""
    return all(got is None or got == want for got, want in zip(found, stored, strict=False))


class LayerMarks(Protocol):
    """How far an engine is with the layers of blocks that are gathered while it computes them.

    Attributes:
        order: when the engine writes which layer.
    """

    order: Layers

    def wait(self, place: int) -> Completion | None:
        """Until the engine has queued what writes the layers up to a place in the order.

        Returns:
            The point behind which they are written.

        Raises:
            KVTransferError: that will not be, or did not come in time.
        """
        ...


class Mover(Protocol):
    """Moves chunks between one engine's cache and host memory.

    Both calls queue the moves; a synchronous mover has done them on return.

    Attributes:
        decoding: the engine says whether it decodes at present. Then its memory and multiprocessors are
            left alone, where a transfer would otherwise be a little faster.
    """

    synchronous: bool
    decoding: bool

    def prepare(self) -> None:
        """Make ready what the first transfer would otherwise wait for.

        Raises:
            CapacityError: no device memory for it.
        """
        ...

    def ready(self) -> Completion | None:
        """A point after everything the caller has queued on the device so far."""
        ...

    def join(self, point: Completion) -> None:
        """What the caller queues on the device from now on comes after this point."""
        ...

    def gather(
        self,
        moves: Sequence[ChunkMove],
        after: Completion | None,
        layers: LayerMarks | None = None,
    ) -> Moved:
        """Cache to host.

        Args:
            layers: read a layer not before its mark; the call waits for the last one's.

        Raises:
            KVTransferError: also what waiting for a mark raises; nothing is read any more then.
        """
        ...

    def scatter(
        self,
        moves: Sequence[ChunkMove],
        after: Completion | None,
        layers: Layers | None = None,
    ) -> Moved:
        """Host to cache.

        Args:
            layers: load in this order, and say in ``Moved.layers`` when which are there.
        """
        ...

    def close(self) -> None: ...


class All:
    """The completion of several."""

    def __init__(self, points: Sequence[Completion]) -> None:
        self._points = points

    def done(self) -> bool:
        return all(point.done() for point in self._points)

    def wait(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        return all(point.wait(max(0.0, end - time.monotonic())) for point in self._points)


class StillMovingError(TransferFailed):
    """A call of a mover failed half-way, and the device did not finish what it had been given.

    Attributes:
        done: when it has.
    """

    def __init__(self, message: str, done: Completion) -> None:
        super().__init__(message)
        self.done = done


class Over:
    """The completion of work that is over."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> bool:
        return True


def copy_block_ids(block_ids: Sequence[Any], layout: ChunkLayout, chunks: int) -> list[Any]:
    """The caller's block ids of ``chunks`` whole chunks, per group, as they are now.

    Costs one copy a list; what the ids are is for :func:`check_block_ids` to see.

    Raises:
        LayoutError: not one list a group, or too few ids.
    """
    per_chunk = layout.blocks_per_chunk
    if len(block_ids) != len(per_chunk):
        raise LayoutError(
            f"block_ids: expected one list for each of {len(per_chunk)} groups, "
            f"got {len(block_ids)}"
        )
    copied = []
    for index, (ids, count) in enumerate(zip(block_ids, per_chunk, strict=True)):
        needed = chunks * count
        if not hasattr(ids, "__len__") or len(ids) < needed:
            found = f"{len(ids)}" if hasattr(ids, "__len__") else type(ids).__name__
            raise LayoutError(
                f"block_ids[{index}]: {chunks} chunks need {needed} blocks, got {found}"
            )
        some = ids[:needed]
        if not isinstance(some, (list, tuple, range)):  # of an array that is a view
            some = _host_array(some, f"block_ids[{index}]").copy()
        copied.append(some)
    return copied


def _host_array(ids: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(ids)
    except (TypeError, RuntimeError) as error:
        raise LayoutError(f"{name}: expected ids in host memory: {error}") from error


def check_block_ids(
    block_ids: Sequence[Any], groups: Sequence[CacheGroup], *, loading: bool
) -> list[tuple[int, ...]]:
    """The ids, per group, once each is known to be one that can be stored from or loaded into.

    Raises:
        LayoutError: something that is no integer, an id out of range, or, when loading, a block
            that would be written twice.
    """
    checked = []
    for index, (ids, group) in enumerate(zip(block_ids, groups, strict=True)):
        packed = pack_ids(ids, group.num_blocks, f"block_ids[{index}]", loading)
        checked.append(tuple(ids) if isinstance(ids, (list, tuple)) else tuple(packed))
    return checked


def leave_out(
    block_ids: Sequence[tuple[int, ...]], layout: ChunkLayout, skip_tokens: int
) -> list[tuple[int, ...]]:
    """The ids with ``ABSENT`` for blocks of the first ``skip_tokens``, rounded down to blocks."""
    skipped = [
        min(max(skip_tokens, 0) * per_chunk // layout.chunk_tokens, len(ids))
        for ids, per_chunk in zip(block_ids, layout.blocks_per_chunk, strict=True)
    ]
    return [(ABSENT,) * n + ids[n:] for n, ids in zip(skipped, block_ids, strict=True)]


def blocks_of(
    block_ids: Sequence[tuple[int, ...]], layout: ChunkLayout, chunk: int
) -> tuple[tuple[int, ...], ...]:
    """Per group, the block ids of chunk number ``chunk``."""
    return tuple(
        [
            ids[chunk * count : (chunk + 1) * count]
            for ids, count in zip(block_ids, layout.blocks_per_chunk, strict=True)
        ]
    )


def pair_ids(
    layout: ChunkLayout, move: ChunkMove, chunk_side: Side
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Per group, (destination, source) ids of a move."""
    pairs: list[tuple[Sequence[int], Sequence[int]]] = [
        (range(per_chunk), blocks)
        for per_chunk, blocks in zip(layout.blocks_per_chunk, move.blocks, strict=True)
    ]
    return pairs if chunk_side == "dst" else [pair[::-1] for pair in pairs]
