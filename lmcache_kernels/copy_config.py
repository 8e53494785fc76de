"""How to cut a block copy into tiles: a pure function from a description to numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .plane import MAX_UNIT

if TYPE_CHECKING:
    from .plane import Plane

MAX_GRID = (1 << 31) - 1
"""Most programs CUDA launches along one axis."""

TILE_BYTES = 4 * 1024
"""Bytes of one program when the grid may be as large as it likes, of a single warp: many small
programs keep HBM busiest. 0.98-1.00 of a plain copy, read and write, gather and scatter, for runs
of 256 B (NHD <-> HND) to 73 KB (512 MiB, random ids). H200, driver 580.159, torch 2.11, Triton 3.6,
30 November 2026."""

BOUNDED_TILE_BYTES = 16 * 1024
"""The same when the grid is bounded: few programs must each have more bytes under way."""


@dataclass(frozen=True, slots=True)
class CopyConfig:
    """Tile shape and launch size.

    Attributes:
        tokens, heads: (token, head) runs in one tile; powers of two.
        units: access units of each run in one tile; a power of two.
        num_warps: warps of one program.
        programs: most programs of one launch; each takes further tiles until none is left.
    """

    tokens: int
    heads: int
    units: int
    num_warps: int
    programs: int


def choose_config(plane: Plane, unit: int, max_programs: int | None) -> CopyConfig:
    """Pick the tile for copying blocks like those of ``plane`` (already coalesced).

    Args:
        plane: either side; only the axes and the width matter.
        unit: bytes of one access.
        max_programs: bound on the grid; None: one program a tile.
    """
    tile_units = (TILE_BYTES if max_programs is None else BOUNDED_TILE_BYTES) // MAX_UNIT
    units = min(tile_units, _power_of_two_at_least(plane.width // unit))
    heads = min(tile_units // units, _power_of_two_at_least(plane.num_heads))
    tokens = min(tile_units // units // heads, _power_of_two_at_least(plane.block_tokens))
    num_warps = 1 if max_programs is None else max(1, min(8, units * heads * tokens // 128))
    return CopyConfig(tokens, heads, units, num_warps, max_programs or MAX_GRID)


def _power_of_two_at_least(number: int) -> int:
    return 1 << (number - 1).bit_length()
