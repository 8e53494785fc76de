"""How parts of chunks lie in a slice, and which copies bring them there or away. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_kernels.chunk_copy import ChunkPart

    from .moves import ChunkMove

ALIGN = 512
"""Of pieces in a slice: enough for any access width."""

NEAR_BYTES = 8192
"""Between two parts, of neighbouring slots or beside a group that is left out: a load reads so much for nothing rather than begin a copy, for a
new one costs the link some 3 us, or 180 KB (H200, 30 November 2026)."""


class Piece(NamedTuple):
    """A part of one chunk of a run."""

    chunk: int
    move: ChunkMove
    part: ChunkPart

    def size(self) -> int:
        """What it takes of a slice."""
        return aligned(self.part.nbytes)

    def room(self) -> int:
        """The same, and what may lie between it and the next."""
        return self.size() + NEAR_BYTES

    def begin(self) -> int:
        """Where it lies in host memory."""
        return self.move.address + self.part.offset

    def end(self) -> int:
        """Where it ends in the payload."""
        return self.part.offset + self.part.nbytes

    def region(self) -> int:
        """The registration in which it begins."""
        return self.move.region + sum(cut <= self.part.offset for cut in self.move.cuts)

    def last_region(self) -> int:
        """The registration in which it ends."""
        return self.move.region + sum(cut < self.end() for cut in self.move.cuts)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Its range of the payload, cut where no single copy may go on."""
        first, end = self.part.offset, self.end()
        cuts = (cut for cut in self.move.cuts if first < cut < end)
        return itertools.pairwise((first, *cuts, end))


class Contents(NamedTuple):
    """Pieces in a slice.

    Attributes:
        gaps: between each two of them, bytes that one copy takes along; None where it may not.
        starts: where the payload of each would begin for its part to lie where it does.
    """

    pieces: list[Piece]
    gaps: list[int | None]
    starts: list[int]

    @classmethod
    def at(cls, address: int, pieces: list[Piece], *, storing: bool) -> Contents:
        """In the slice at ``address``, one behind the other.

        A part is as far from the last as in host memory, where one copy brings both.
        """
        most = 0 if storing else NEAR_BYTES
        gaps = [_gap(*pair, most) for pair in itertools.pairwise(pieces)]
        starts = []
        for piece, gap in zip(pieces, (*gaps, None), strict=True):
            starts.append(address - piece.part.offset)
            address += piece.size() if gap is None else piece.part.nbytes + gap
        return cls(pieces, gaps, starts)

    def end(self) -> int:
        """The address behind them."""
        return self.starts[-1] + self.pieces[-1].end()

    def copies(self) -> list[tuple[int, int, int]]:
        """Address in the slice, address in host memory and bytes of every copy."""
        copies: list[tuple[int, int, int]] = []
        for piece, gap, start in zip(self.pieces, (None, *self.gaps), self.starts, strict=True):
            for first, end in piece.ranges():
                if gap is not None and first == piece.part.offset:
                    here, there, nbytes = copies[-1]
                    copies[-1] = here, there, nbytes + gap + end - first
                else:
                    copies.append((start + first, piece.move.address + first, end - first))
        return copies


def _gap(before: Piece, piece: Piece, most: int) -> int | None:
    """Bytes between two parts that one copy may take along; None if there can be no one copy of both."""
    one_copy = before.last_region() == piece.region()
    if not (one_copy and before.move.reachable and piece.move.reachable):
        return None
    gap = piece.begin() - (before.begin() + before.part.nbytes)
    return gap if 0 <= gap <= most and gap % ALIGN == -before.part.nbytes % ALIGN else None


def aligned(nbytes: int) -> int:
    """The next multiple of :data:`ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN
