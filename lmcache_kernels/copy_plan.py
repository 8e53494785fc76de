"""What a prepared copy has worked out about its planes. Pure: no torch, no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from .errors import LayoutError
from .fingerprint import MAX_PAYLOAD
from .plane import Plane, access_unit, check_compatible, coalesce

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        pairs = [pair for group in groups for pair in group]
        if not pairs or not all(groups):
            raise LayoutError("groups: expected at least one pair of planes in each")
        for dst, src in pairs:
            check_compatible(dst, src)
        for side in (0, 1):
            devices = sorted({pair[side].device for pair in pairs})
            if len(devices) > 1:
                raise LayoutError(f"planes of one side: expected one device, got {devices}")
        start = 0
        if chunk_side is not None:
            chunks = [pair[0 if chunk_side == "dst" else 1] for pair in pairs]
            for chunk in chunks:
                _check_dense(chunk)
            start = min(min(chunk.bases) for chunk in chunks)
            end = max(max(chunk.bases) + chunk.split * chunk.block_bytes for chunk in chunks)
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
        unit = access_unit(*(plane for leg in legs for plane in (leg.dst, leg.src)))
        return cls(tuple(legs), len(groups), unit, chunk_side)

    @property
    def rows(self) -> int:
        """Rows of all legs."""
        return sum(leg.dst.rows for leg in self.legs)

    def planes(self, group: int, side: Side) -> list[Plane]:
        """The planes of one side to which one list of block ids applies."""
        return [getattr(leg, side) for leg in self.legs if leg.group == group]


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
