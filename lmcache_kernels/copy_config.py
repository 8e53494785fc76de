"""How to cut a block copy into tiles: a pure function from a description to numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plane import Plane

MAX_GRID = (1 << 31) - 1
"""Most programs CUDA launches along one axis."""

TILE_BYTES, TILE_WARPS = 4 * 1024, 1
"""One tile where the grid may be as large as it likes: many small programs keep HBM busiest. 0.92-0.97
of a plain copy, read and write, gather and scatter, with a fingerprint too, for runs of 256 B (NHD <->
HND) to 73 KB; 2 to 16 KiB are within 0.03 of it (256 MiB, random ids). H200, driver 580.159, torch
2.11, Triton 3.6, 30 November 2026."""

BOUNDED_TILE_BYTES, BOUNDED_TILE_WARPS = 64 * 1024, 16
"""The same where the grid is bounded: few programs must each have many bytes under way. 16 programs of
132 multiprocessors reach 0.21-0.30 of a plain copy, 16 KiB tiles 0.10-0.12. Measured likewise."""

WASTE = 8
"""At most one part in so many of a long run's tiles may lie behind its end."""

LONG_UNITS = 128
"""Units of a tile below which wasted lanes cost less than more tiles would."""


@dataclass(frozen=True, slots=True)
class CopyConfig:
    """Tile shape and launch size.

    Attributes:
        blocks, tokens, heads: (block, token, head) runs in one tile; powers of two.
        units: access units of each run in one tile; a power of two.
        num_warps: warps of one program.
        programs: most programs of one launch; each takes further tiles until none is left.
    """

    blocks: int
    tokens: int
    heads: int
    units: int
    num_warps: int
    programs: int

    def tile_bytes(self, unit: int) -> int:
        """Most payload of one tile."""
        return self.blocks * self.tokens * self.heads * self.units * unit

    def tiles(self, plane: Plane, ids: int, unit: int) -> int:
        """Tiles of ``ids`` blocks of a coalesced plane."""
        return (
            plane.rows
            * -(-ids // self.blocks)
            * -(-plane.block_tokens // self.tokens)
            * -(-plane.num_heads // self.heads)
            * -(-(plane.width // unit) // self.units)
        )


def choose_config(plane: Plane, unit: int, max_programs: int | None) -> CopyConfig:
    """Pick the tile for copying blocks like those of ``plane`` (already coalesced).

    Args:
        plane: either side; only the axes and the width matter.
        unit: bytes of one access.
        max_programs: bound on the grid; None: one program a tile.
    """
    if max_programs is None:
        return tile_of(plane, unit, TILE_BYTES, TILE_WARPS, MAX_GRID)
    return tile_of(plane, unit, BOUNDED_TILE_BYTES, BOUNDED_TILE_WARPS, max_programs)


def tile_of(plane: Plane, unit: int, tile_bytes: int, num_warps: int, programs: int) -> CopyConfig:
    """The tile of a given size: as much of a run as fits, then heads, tokens and blocks."""
    # A tile of narrow accesses holds as many of them, not as many bytes.
    room = tile_bytes // 16
    units = _units(plane.width // unit, room)
    heads = min(room // units, _power_of_two_at_least(plane.num_heads))
    tokens = min(room // units // heads, _power_of_two_at_least(plane.block_tokens))
    blocks = room // units // heads // tokens
    return CopyConfig(blocks, tokens, heads, units, num_warps, programs)


def _units(run_units: int, room: int) -> int:
    units = min(room, _power_of_two_at_least(run_units))
    while units > LONG_UNITS and (-(-run_units // units) * units - run_units) * WASTE > run_units:
        units //= 2
    return units


def _power_of_two_at_least(number: int) -> int:
    return 1 << (number - 1).bit_length()
