"""How to cut a block copy into tiles: a pure function from a description to numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plane import Plane

MAX_GRID = (1 << 31) - 1
"""Most programs CUDA launches along one axis."""

TILE_BYTES = 4 * 1024
"""Bytes of one tile when the grid may be as large as it likes, of a single warp: many small
programs keep HBM busiest. 0.94-0.96 of a plain copy, read and write, gather and scatter, for runs
of 256 B (NHD <-> HND) to 73 KB (256 MiB, random ids). H200, driver 580.159, torch 2.11, Triton 3.6,
30 November 2026."""

BOUNDED_TILE_BYTES = 64 * 1024
"""The same, of 8 warps, when the grid is bounded: few programs must each have many bytes under way.
16 programs of 132 multiprocessors then reach 0.13-0.25 of a plain copy."""

SHORT_RUN = 1024
"""Runs below this many bytes need so many addresses that registers become scarce, and half the tile
is faster: 0.125 of a plain copy against 0.100 for runs of 512 B and 16 programs, and with a
fingerprint 0.87 against 0.79 for runs of 256 B."""

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


def choose_config(
    plane: Plane, unit: int, max_programs: int | None, *, fingerprint: bool = False
) -> CopyConfig:
    """Pick the tile for copying blocks like those of ``plane`` (already coalesced).

    Args:
        plane: either side; only the axes and the width matter.
        unit: bytes of one access.
        max_programs: bound on the grid; None: one program a tile.
        fingerprint: whether the copy also computes one.
    """
    short = plane.width < SHORT_RUN and plane.block_tokens * plane.num_heads > 1
    if max_programs is None:
        tile_bytes, num_warps = TILE_BYTES // 2 if short and fingerprint else TILE_BYTES, 1
    else:
        tile_bytes, num_warps = BOUNDED_TILE_BYTES // 2 if short else BOUNDED_TILE_BYTES, 8
    # A tile of narrow accesses holds as many of them, not as many bytes.
    room = tile_bytes // 16
    units = _units(plane.width // unit, room)
    heads = min(room // units, _power_of_two_at_least(plane.num_heads))
    tokens = min(room // units // heads, _power_of_two_at_least(plane.block_tokens))
    blocks = room // units // heads // tokens
    return CopyConfig(blocks, tokens, heads, units, num_warps, max_programs or MAX_GRID)


def _units(run_units: int, room: int) -> int:
    units = min(room, _power_of_two_at_least(run_units))
    while units > LONG_UNITS and (-(-run_units // units) * units - run_units) * WASTE > run_units:
        units //= 2
    return units


def _power_of_two_at_least(number: int) -> int:
    return 1 << (number - 1).bit_length()
