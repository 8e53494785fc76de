"""Which heads a rank of a tensor-parallel engine needs from chunks that ranks of another one stored.

With ``tp`` ranks and at least as many heads, rank ``r`` holds ``heads / tp`` heads from
``r * heads / tp`` on. With more ranks than heads every head is held by ``tp / heads`` ranks. Caches
without heads (MLA) are the same on every rank and need none of this. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import LayoutError


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Heads that both have: ``count`` from ``start`` in the chunk of ``rank``, and from ``here`` in mine.

    Use as ``prepare_copy(mine.narrow_heads(here, count), chunk.narrow_heads(start, count))``.
    """

    rank: int
    start: int
    here: int
    count: int


def heads_of(heads: int, tp: int, rank: int) -> range:
    """Of all ``heads`` of the model, those that one of ``tp`` ranks holds.

    Raises:
        LayoutError: sizes that no engine can have: neither divides the other, or no such rank.
    """
    if heads < 1 or tp < 1 or (heads % tp and tp % heads):
        raise LayoutError(f"tensor parallelism: {heads} heads cannot lie on {tp} ranks evenly")
    if not 0 <= rank < tp:
        raise LayoutError(f"rank: expected 0 <= rank < {tp}, got {rank}")
    count = max(1, heads // tp)
    start = rank * heads // tp
    return range(start, start + count)


def head_slices(heads: int, *, tp: int, rank: int, stored_tp: int) -> list[HeadSlice]:
    """Where a rank finds its heads among the chunks of ``stored_tp`` ranks, each head once.

    Args:
        heads: KV heads of the whole model.
        tp, rank: this engine's ranks, and which of them asks.
        stored_tp: ranks of the engine that stored.

    Raises:
        LayoutError: see :func:`heads_of`.
    """
    mine = heads_of(heads, tp, rank)
    stored = [heads_of(heads, stored_tp, other) for other in range(max(1, stored_tp))]
    slices = []
    missing = mine.start
    for other, theirs in enumerate(stored):
        end = min(mine.stop, theirs.stop)
        if theirs.start <= missing < end:
            count = end - missing
            slices.append(HeadSlice(other, missing - theirs.start, missing - mine.start, count))
            missing = end
    return slices
