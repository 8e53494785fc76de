"""What a mover is asked to do: which chunk in host memory goes with which blocks of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.ids import ABSENT, pack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.plane import CacheGroup

Pairs: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Per group, (blocks inside a chunk, block ids of the cache), equally long."""


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One chunk between host memory and the cache.

    Attributes:
        address: of the chunk's payload in host memory.
        pairs: which blocks of the chunk are which blocks of the cache.
        cuts: offsets inside the payload that no single copy may span.
    """

    address: int
    pairs: Pairs
    cuts: tuple[int, ...] = ()


class Completion(Protocol):
    """A point in a device's work that can be waited for."""

    def done(self) -> bool: ...

    def wait(self, timeout: float) -> bool:
        """True once the work before this point is over, False when ``timeout`` seconds passed."""
        ...


class Mover(Protocol):
    """Moves chunks between one engine's cache and host memory.

    Both calls queue the moves and return completions; a synchronous mover is done on return.
    """

    synchronous: bool

    def ready(self) -> Completion | None:
        """A point after everything the caller has queued on the device so far."""
        ...

    def gather(
        self, moves: Sequence[ChunkMove], after: Completion | None
    ) -> tuple[Completion, Completion]:
        """Cache to host. Returns (the cache's blocks are read, the host memory is written)."""
        ...

    def scatter(self, moves: Sequence[ChunkMove], after: Completion | None) -> Completion:
        """Host to cache. Returns (the cache's blocks are written)."""
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


def pair_blocks(
    block_ids: Sequence[Sequence[int]], layout: ChunkLayout, chunk: int, skip_tokens: int = 0
) -> Pairs:
    """Per group, which blocks inside chunk number ``chunk`` go with which block ids.

    Blocks before ``skip_tokens`` (counted from the first chunk, rounded down to whole blocks) and
    absent ones are left out.
    """
    pairs = []
    for ids, per_chunk in zip(block_ids, layout.blocks_per_chunk, strict=True):
        first = chunk * per_chunk
        skip = skip_tokens // (layout.chunk_tokens // per_chunk)
        kept = [
            (inside, ids[first + inside])
            for inside in range(per_chunk)
            if first + inside >= skip and ids[first + inside] != ABSENT
        ]
        pairs.append((tuple(i for i, _ in kept), tuple(b for _, b in kept)))
    return tuple(pairs)
