"""What the kernel reads about a copy: pure functions from planes and ids to integers.

``legs`` int64[legs, LEG_WORDS] and ``rows`` int64[rows, ROW_WORDS] describe the planes and are made
once; ``call`` int32[legs * CALL_WORDS + ids] describes one copy. Strides are in units.

======= ====================================================================================
table   words
======= ====================================================================================
leg     first row, rows, tokens, heads, units of a run; then of the destination and of the
        source: split, block stride, split stride, token stride, head stride; how many tiles of
        one group of ids lie in the legs before it
row     address of the destination, of the source; place in the payload of a chunk, bytes
call    first tile, ids, where the destination's ids stand (the source's stand behind them), 0
======= ====================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .copy_config import CopyConfig
    from .plane import Plane

LEG_WORDS = 16
ROW_WORDS = 3
CALL_WORDS = 4

INLINE_IDS = 16
"""Ids of a side that fit in the arguments of a launch: the blocks of 16 tokens of a usual chunk."""

NO_TILE = (1 << 31) - 1
"""First tile of a leg that is not there."""


def leg_table(
    legs: Sequence[tuple[Plane, Plane]], unit: int, config: CopyConfig, slots: int
) -> list[int]:
    """The ``legs`` table of coalesced (destination, source) pairs, filled up to ``slots``."""
    words: list[int] = []
    first = tiles = 0
    for dst, src in legs:
        words += [first, dst.rows, dst.block_tokens, dst.num_heads, dst.width // unit]
        words += [*_side(dst, unit), *_side(src, unit), tiles]
        first += dst.rows
        tiles += config.tiles(dst, config.blocks, unit)
    nothing = [0] * (LEG_WORDS - 1) + [NO_TILE]
    return words + nothing * (slots - len(legs))


def _side(plane: Plane, unit: int) -> tuple[int, ...]:
    strides = (plane.block_stride, plane.split_stride, plane.token_stride, plane.head_stride)
    return (plane.split, *(stride // unit for stride in strides))


def row_table(legs: Sequence[tuple[Plane, Plane]], places: Sequence[int]) -> list[int]:
    """The ``rows`` table; ``places`` are the rows' offsets in a chunk's payload, over all legs."""
    rows = [pair for dst, src in legs for pair in zip(dst.bases, src.bases, strict=True)]
    return [word for row, place in zip(rows, places, strict=True) for word in (*row, place)]
