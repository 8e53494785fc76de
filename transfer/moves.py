"""What a mover is asked to do: which chunk in host memory goes with which blocks of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.ids import ABSENT, pack_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from lmcache_kernels.chunk_copy import Layers
    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.copy_plan import Side
    from lmcache_kernels.plane import CacheGroup

    Steps: TypeAlias = Sequence[tuple[int, "Completion"]]


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
        fingerprints: of the moves' payloads, in order; only once ``done`` is over.
        layers: of a scatter by layers: (place in the order, when all layers up to it are there).
    """

    cache_free: Completion
    done: Completion
    fingerprints: Callable[[], list[int]]
    layers: Steps = ()


class Mover(Protocol):
    """Moves chunks between one engine's cache and host memory.

    Both calls queue the moves; a synchronous mover has done them on return.
    """

    synchronous: bool

    def ready(self) -> Completion | None:
        """A point after everything the caller has queued on the device so far."""
        ...

    def gather(self, moves: Sequence[ChunkMove], after: Completion | None) -> Moved:
        """Cache to host."""
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


class Over:
    """The completion of work that is over."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> bool:
        return True


def check_block_ids(
    block_ids: Sequence[Sequence[int]],
    groups: Sequence[CacheGroup],
    layout: ChunkLayout,
    chunks: int,
    *,
    loading: bool,
) -> None:
    """Check the block ids of a store or load of ``chunks`` chunks, per group, before anything moves.

    Ids behind the last whole chunk are ignored.

    Raises:
        LayoutError: not one list a group, too few ids, an id out of range, or, when loading, a
            block that would be written twice.
    """
    if len(block_ids) != len(groups):
        raise LayoutError(
            f"block_ids: expected one list for each of {len(groups)} groups, got {len(block_ids)}"
        )
    for index, (ids, group, per_chunk) in enumerate(
        zip(block_ids, groups, layout.blocks_per_chunk, strict=True)
    ):
        needed = chunks * per_chunk
        if len(ids) < needed:
            raise LayoutError(
                f"block_ids[{index}]: {chunks} chunks need {needed} blocks, got {len(ids)}"
            )
        pack_ids(ids[:needed], group.num_blocks, f"block_ids[{index}]", loading)


def blocks_of(
    block_ids: Sequence[Sequence[int]], layout: ChunkLayout, chunk: int, skip_tokens: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Per group, the block ids of chunk number ``chunk``.

    Blocks before ``skip_tokens`` (counted from the first chunk, rounded down to whole blocks) are
    ``ABSENT``.
    """
    blocks = []
    for ids, per_chunk in zip(block_ids, layout.blocks_per_chunk, strict=True):
        first = chunk * per_chunk
        skipped = min(max(skip_tokens * per_chunk // layout.chunk_tokens - first, 0), per_chunk)
        blocks.append((ABSENT,) * skipped + tuple(ids[first + skipped : first + per_chunk]))
    return tuple(blocks)


def pair_ids(
    layout: ChunkLayout, move: ChunkMove, chunk_side: Side
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Per group, (destination, source) ids of a move."""
    pairs: list[tuple[Sequence[int], Sequence[int]]] = [
        (range(per_chunk), blocks)
        for per_chunk, blocks in zip(layout.blocks_per_chunk, move.blocks, strict=True)
    ]
    return pairs if chunk_side == "dst" else [pair[::-1] for pair in pairs]
