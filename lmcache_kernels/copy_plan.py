"""What a prepared copy has worked out about its planes. Pure: no torch, no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from .errors import LayoutError
from .fingerprint import MAX_PAYLOAD
from .plane import Plane, access_unit, check_compatible, coalesce

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_EXTENT = (1 << 31) - 1
"""The kernel counts inside a block in 32 bits."""

Side: TypeAlias = Literal["dst", "src"]


@dataclass(frozen=True, slots=True)
class Leg:
    """Two coalesced planes between which blocks of one group move.

    Attributes:
        dst, src: the planes.
        group: whose block ids apply.
        places: per row, its offset in the payload of a chunk.
    """

    dst: Plane
    src: Plane
    group: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """All legs of a copy.

    Attributes:
        legs: in order of groups.
        groups: how many lists of block ids on either side.
        unit: bytes of one access, for all legs.
        chunk_side: the side that holds whole chunks whose fingerprints are wanted, or None.
    """

    legs: tuple[Leg, ...]
    groups: int
    unit: int
    chunk_side: Side | None

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[tuple[Plane, Plane]]], chunk_side: Side | None
    ) -> CopyPlan:
        """Plan for groups of (destination, source) planes.

        Raises:
            LayoutError: no plane, planes that do not fit each other or lie on several devices, or a
                chunk side whose blocks are not dense.
        """
        if chunk_side not in (None, "dst", "src"):
            raise LayoutError(f"chunk_side: expected dst, src or None, got {chunk_side!r}")
        pairs = [pair for group in groups for pair in group]
        if not pairs or not all(groups):
            raise LayoutError("groups: expected at least one pair of planes in each")
        for plane in (plane for pair in pairs for plane in pair):
            if not isinstance(plane, Plane):
                raise LayoutError(
                    f"expected a Plane, got {type(plane).__name__}; a group has its planes in .planes"
                )
        for dst, src in pairs:
            check_compatible(dst, src)
        for side in (0, 1):
            devices = sorted({pair[side].device for pair in pairs})
            if len(devices) > 1:
                raise LayoutError(f"planes of one side: expected one device, got {devices}")
        for dst, _ in pairs:
            if len(set(dst.bases)) != dst.rows:
                raise LayoutError("destination: two rows of one plane lie at the same address")
        start = 0
        if chunk_side is not None:
            chunks = [pair[0 if chunk_side == "dst" else 1] for pair in pairs]
            for chunk in chunks:
                _check_dense(chunk)
            if len({_whereabouts(chunk) for chunk in chunks}) > 1:
                raise LayoutError("chunk side: expected planes of the same chunks, as far apart")
            start = min(min(chunk.bases) for chunk in chunks)
            end = max(max(chunk.bases) + _inner_span(chunk) for chunk in chunks)
            if end - start > MAX_PAYLOAD:
                raise LayoutError(
                    f"chunk side: expected a payload of at most {MAX_PAYLOAD} bytes, "
                    f"got {end - start}"
                )
        legs = []
        for index, group in enumerate(groups):
            for pair in group:
                chunk = pair[0 if chunk_side == "dst" else 1]
                places = tuple(base - start for base in chunk.bases)
                legs.append(Leg(*coalesce(*pair), index, places))
        for leg in legs:
            if max(leg.dst.width, leg.dst.block_tokens, leg.dst.num_heads) > MAX_EXTENT:
                raise LayoutError(
                    f"planes: expected runs of at most {MAX_EXTENT} bytes and as many tokens and "
                    f"heads, got {leg.dst.width}, {leg.dst.block_tokens} and {leg.dst.num_heads}"
                )
        unit = access_unit(*(plane for leg in legs for plane in (leg.dst, leg.src)))
        return cls(tuple(legs), len(groups), unit, chunk_side)

    @property
    def rows(self) -> int:
        """Rows of all legs."""
        return sum(leg.dst.rows for leg in self.legs)

    def planes(self, group: int, side: Side) -> list[Plane]:
        """The planes of one side to which one list of block ids applies."""
        return [getattr(leg, side) for leg in self.legs if leg.group == group]


def _whereabouts(chunk: Plane) -> tuple[int, int]:
    """How many chunks there are, and how far apart."""
    chunks = chunk.outer_blocks
    return chunks, chunk.block_stride if chunks > 1 else 0


def _inner_span(chunk: Plane) -> int:
    """Bytes of one row of one chunk."""
    return (chunk.split - 1) * chunk.split_stride + chunk.block_bytes


def _check_dense(chunk: Plane) -> None:
    tokens_apart = chunk.num_heads * chunk.width
    if (chunk.num_heads > 1 and chunk.head_stride != chunk.width) or (
        chunk.block_tokens > 1 and chunk.token_stride != tokens_apart
    ):
        raise LayoutError(
            f"chunk side: expected dense blocks, token after token, got token stride "
            f"{chunk.token_stride} and head stride {chunk.head_stride} for {chunk.num_heads} heads "
            f"of {chunk.width} bytes"
        )
