"""How to cut a block copy into tiles: a pure function from a description to numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plane import Plane

TILE_BYTES = 16 * 1024
"""Bytes one program holds in registers at a time: with 8 warps, 64 B a thread in four 16-byte
loads. H200, torch 2.11, Triton 3.6, November 2026."""

PROGRAMS_PER_SM = 8
"""Programs that are resident together on one SM; more only adds launch tail. H200, as above."""


@dataclass(frozen=True, slots=True)
class CopyConfig:
    """Tile shape and launch size.

    Attributes:
        runs: (token, head) runs in one tile; a power of two.
        units: access units of each run in one tile; a power of two.
        num_warps: warps of one program.
        programs: most programs of one launch; each takes further tiles until none is left.
    """

    runs: int
    units: int
    num_warps: int
    programs: int


def choose_config(plane: Plane, unit: int, sm_count: int, max_programs: int | None) -> CopyConfig:
    """Pick the tile for copying blocks like those of ``plane`` (already coalesced).

    Args:
        plane: either side; only the axes and the width matter.
        unit: bytes of one access.
        sm_count: multiprocessors of the device.
        max_programs: bound on the grid; None: as many as fill the device.
    """
    tile_units = TILE_BYTES // 16
    units = min(tile_units, _power_of_two_at_least(plane.width // unit))
    runs = min(tile_units // units, _power_of_two_at_least(plane.block_tokens * plane.num_heads))
    num_warps = max(1, min(8, units * runs // 128))
    programs = sm_count * PROGRAMS_PER_SM
    return CopyConfig(runs, units, num_warps, min(programs, max_programs or programs))


def _power_of_two_at_least(number: int) -> int:
    return 1 << (number - 1).bit_length()
