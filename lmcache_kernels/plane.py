"""Planes: the one way this package describes where the bytes of a KV cache lie.

A plane is an affine piece of a cache::

    address(row, block, token, head) = bases[row] + block * block_stride
                                     + token * token_stride + head * head_stride

with ``width`` dense bytes at each such address. A row is one (layer, K-or-V) pair, so the table of
bases absorbs every outer axis and only block, token and head remain. All quantities are bytes.
Strides are read from real tensors and never recomputed, so padded, permuted and sliced caches need
no code of their own. This module is pure: no torch, no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .errors import LayoutError

MAX_UNIT = 16
"""Widest single memory access in bytes (one 128-bit load on every NVIDIA GPU since Kepler)."""


@dataclass(frozen=True, slots=True)
class Plane:
    """An affine piece of a paged cache; every stride and width in bytes.

    Attributes:
        bases: address of block 0, token 0, head 0 of each row.
        num_blocks: blocks that exist behind each base.
        block_tokens: token slots in one block.
        num_heads: heads of one token.
        width: dense bytes of one head of one token.
        block_stride, token_stride, head_stride: distance between neighbours.
        device: where the addresses are valid, as torch spells it (``"cpu"``, ``"cuda:0"``).

    Raises:
        LayoutError: a count or width below 1, no row, or a negative or overlapping stride.
    """

    bases: tuple[int, ...]
    num_blocks: int
    block_tokens: int
    num_heads: int
    width: int
    block_stride: int
    token_stride: int
    head_stride: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.bases:
            raise LayoutError("plane.bases: expected at least one row, got none")
        for name in ("num_blocks", "block_tokens", "num_heads", "width"):
            if getattr(self, name) < 1:
                raise LayoutError(f"plane.{name}: expected >= 1, got {getattr(self, name)}")
        for name, extent in (
            ("block_stride", self.num_blocks),
            ("token_stride", self.block_tokens),
            ("head_stride", self.num_heads),
        ):
            stride = getattr(self, name)
            if stride < 0 or (extent > 1 and stride < self.width):
                raise LayoutError(
                    f"plane.{name}: expected >= width ({self.width}) so that bytes do not overlap, "
                    f"got {stride}"
                )

    @property
    def rows(self) -> int:
        return len(self.bases)

    @property
    def block_bytes(self) -> int:
        """Payload of one block of one row."""
        return self.block_tokens * self.num_heads * self.width

    @property
    def span(self) -> int:
        """Bytes from a base to the end of the last addressed byte of its row."""
        return (
            (self.num_blocks - 1) * self.block_stride
            + (self.block_tokens - 1) * self.token_stride
            + (self.num_heads - 1) * self.head_stride
            + self.width
        )


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Planes that share block ids: one KV-cache group of an engine.

    Attributes:
        planes: the planes; each has one entry per block id.
        block_tokens: tokens one block id stands for.
        dtype: name of the element type; part of the identity of what is stored, never of a copy.
        opaque: empty for affine pages, where every plane's ``block_tokens`` equals the group's.
            Otherwise a tag that names a page format whose inside is not affine; such planes have
            one token and one head, whole blocks move, and only pages of an equal tag and block
            size are interchangeable.
    """

    planes: tuple[Plane, ...]
    block_tokens: int
    dtype: str
    opaque: str = ""

    def __post_init__(self) -> None:
        if not self.planes:
            raise LayoutError("group.planes: expected at least one plane, got none")
        if self.block_tokens < 1:
            raise LayoutError(f"group.block_tokens: expected >= 1, got {self.block_tokens}")
        expected = 1 if self.opaque else self.block_tokens
        for index, plane in enumerate(self.planes):
            if plane.block_tokens != expected:
                raise LayoutError(
                    f"group.planes[{index}].block_tokens: expected {expected}, "
                    f"got {plane.block_tokens}"
                )
            if plane.device != self.planes[0].device:
                raise LayoutError(
                    f"group.planes[{index}].device: expected {self.planes[0].device}, "
                    f"got {plane.device}: one group lies on one device"
                )

    @property
    def device(self) -> str:
        return self.planes[0].device

    @property
    def num_blocks(self) -> int:
        """Block ids that are valid in every plane."""
        return min(plane.num_blocks for plane in self.planes)


def check_compatible(dst: Plane, src: Plane) -> None:
    """Raise LayoutError unless one block of ``src`` fits one block of ``dst``; strides never matter."""
    for name in ("rows", "block_tokens", "num_heads", "width"):
        want, got = getattr(dst, name), getattr(src, name)
        if want != got:
            raise LayoutError(f"planes differ in {name}: destination has {want}, source has {got}")


def coalesce(dst: Plane, src: Plane) -> tuple[Plane, Plane]:
    """Fold the head and token axes into the width wherever *both* sides are dense.

    The results pair the same bytes with fewer, longer runs. An axis that is dense on one side only
    stays an axis. Either order of folding works, because a run only has to be laid out alike on
    both sides: token-major pages fold head first, head-major pages token first.
    """
    for axis in ("head", "token", "head"):
        count = getattr(dst, _EXTENT[axis])
        if count == 1 or all(getattr(p, f"{axis}_stride") == p.width for p in (dst, src)):
            dst, src = (_fold(plane, axis, count) for plane in (dst, src))
    return dst, src


_EXTENT = {"head": "num_heads", "token": "block_tokens"}


def _fold(plane: Plane, axis: str, count: int) -> Plane:
    width = plane.width * count
    changed: dict[str, int] = {"width": width, _EXTENT[axis]: 1, f"{axis}_stride": width}
    return replace(plane, **changed)  # type: ignore[arg-type]


def access_unit(*planes: Plane) -> int:
    """Largest power of two <= 16 that divides every base, stride and width of all planes.

    A stride whose axis has extent 1 is never used and so does not count.
    """
    numbers = [MAX_UNIT]
    for plane in planes:
        numbers += [*plane.bases, plane.width]
        numbers += [
            stride
            for stride, extent in (
                (plane.block_stride, plane.num_blocks),
                (plane.token_stride, plane.block_tokens),
                (plane.head_stride, plane.num_heads),
            )
            if extent > 1
        ]
    return math.gcd(*numbers)
