"""How parts of chunks lie in a slice, and which copies bring them there or away. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_kernels.chunk_copy import ChunkPart

    from .moves import ChunkMove

ALIGN = 512
"""Of pieces in a slice: enough for any access width."""

MAX_APART = (1 << 31) - 1
"""Between the beginnings of two rows: cudaDevAttrMaxPitch of an H200, 30 November 2026."""


class Piece(NamedTuple):
    """A part of one chunk of a run."""

    chunk: int
    move: ChunkMove
    part: ChunkPart

    def size(self) -> int:
        """What it takes of a slice."""
        return aligned(self.part.nbytes)

    def begin(self) -> int:
        """Where it lies in host memory."""
        return self.move.address + self.part.offset

    def end(self) -> int:
        """Where it ends in the payload."""
        return self.part.offset + self.part.nbytes

    def region(self) -> int:
        """The registration in which it begins."""
        return self.move.region + sum(cut <= self.part.offset for cut in self.move.cuts)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Its range of the payload, cut where no single copy may go on."""
        first, end = self.part.offset, self.end()
        cuts = (cut for cut in self.move.cuts if first < cut < end)
        return itertools.pairwise((first, *cuts, end))


class Rows(NamedTuple):
    """What one call copies: stretches of equal size, evenly spaced in the slice and in host memory.

    Attributes:
        here, there: where the first begins in the slice and in host memory.
        nbytes: of each.
        region: the registration in which all of them lie.
        times: how many there are.
        here_apart, there_apart: from the beginning of one to that of the next, if there are several.
    """

    here: int
    there: int
    nbytes: int
    region: int
    times: int = 1
    here_apart: int = 0
    there_apart: int = 0


class Contents(NamedTuple):
    """Pieces in a slice.

    Attributes:
        starts: where the payload of each would begin for its part to lie where it does.
    """

    pieces: list[Piece]
    starts: list[int]

    @classmethod
    def at(cls, address: int, pieces: list[Piece]) -> Contents:
        """In the slice at ``address``, one behind the other."""
        starts = []
        for piece in pieces:
            starts.append(address - piece.part.offset)
            address += piece.size()
        return cls(pieces, starts)

    def end(self) -> int:
        """The address behind them."""
        return self.starts[-1] + self.pieces[-1].end()

    def stretches(self) -> list[Rows]:
        """All that is to be copied, as stretches that are dense on both sides."""
        found: list[Rows] = []
        for piece, start in zip(self.pieces, self.starts, strict=True):
            for region, (first, end) in enumerate(piece.ranges(), piece.region()):
                one = Rows(start + first, piece.move.address + first, end - first, region)
                if found and _goes_on(found[-1], one):
                    before = found.pop()
                    one = before._replace(nbytes=before.nbytes + one.nbytes)
                found.append(one)
        return found


def in_rows(stretches: Sequence[Rows]) -> list[Rows]:
    """The same with as many in one call as follow each other evenly."""
    found = []
    first, count = 0, len(stretches)
    while first < count:
        one, last = stretches[first], first + 1
        if last < count and (apart := _apart(one, stretches[last])):
            while last < count and _apart(stretches[last - 1], stretches[last]) == apart:
                last += 1
            one = Rows(one.here, one.there, one.nbytes, one.region, last - first, *apart)
        found.append(one)
        first = last
    return found


def _goes_on(before: Rows, one: Rows) -> bool:
    """Whether a stretch begins where another one ends, on both sides."""
    return (
        one.region == before.region
        and one.here == before.here + before.nbytes
        and one.there == before.there + before.nbytes
    )


def _apart(before: Rows, one: Rows) -> tuple[int, int] | None:
    """How far a stretch is from the one before; None if no call can copy both."""
    here, there = one.here - before.here, one.there - before.there
    alike = one.region == before.region and one.nbytes == before.nbytes
    fit = before.nbytes <= here <= MAX_APART and before.nbytes <= there <= MAX_APART
    return (here, there) if alike and fit else None


def aligned(nbytes: int) -> int:
    """The next multiple of :data:`ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN
