"""Planes: the one way this package describes where the bytes of a KV cache lie.

A plane is an affine piece of a cache::

    address(row, block, token, head) = bases[row] + (block // split) * block_stride
                                     + (block % split) * split_stride
                                     + token * token_stride + head * head_stride

with ``width`` dense bytes at each such address. A row is one (layer, K-or-V) pair, so the table of
bases absorbs every outer axis and only block, token and head remain. ``split`` is 1 for a plain
cache; it lets one list of ids name the tokens of pages, or the blocks of several chunks. All
quantities are bytes.
Strides are read from real tensors and never recomputed, so padded, permuted and sliced caches need
no code of their own. This module is pure: no torch, no I/O.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from .errors import LayoutError

MAX_UNIT = 16
"""Widest single memory access in bytes (one 128-bit load on every NVIDIA GPU since Kepler)."""

_DEVICE = re.compile(r"cpu|(?!cpu)[a-z]+:\d+")

MAX_BLOCKS = (1 << 31) - 1
"""Block ids have 31 bits."""


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
        split: block ids that lie ``split_stride`` apart before ``block_stride`` takes the next step.
        split_stride: meaningful where ``split`` is above 1.

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
    split: int = 1
    split_stride: int = 0

    def __post_init__(self) -> None:
        if not self.bases:
            raise LayoutError("plane.bases: expected at least one row, got none")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise LayoutError(
                f"plane.device: expected a form such as cpu or cuda:0, got {self.device!r}"
            )
        for name in ("num_blocks", "block_tokens", "num_heads", "width", "split"):
            if getattr(self, name) < 1:
                raise LayoutError(f"plane.{name}: expected >= 1, got {getattr(self, name)}")
        if self.num_blocks > MAX_BLOCKS:
            raise LayoutError(
                f"plane.num_blocks: expected at most {MAX_BLOCKS}, got {self.num_blocks}"
            )
        if self.num_blocks % self.split:
            raise LayoutError(
                f"plane.split: expected a divisor of {self.num_blocks} blocks, got {self.split}"
            )
        used = [
            (getattr(self, name), extent, name)
            for name, extent in (
                ("block_stride", self.outer_blocks),
                ("split_stride", self.split),
                ("token_stride", self.block_tokens),
                ("head_stride", self.num_heads),
            )
            if extent > 1
        ]
        taken = self.width
        for stride, extent, name in sorted(used):
            if stride < taken:
                raise LayoutError(
                    f"plane.{name}: expected >= {taken} so that bytes do not overlap, got {stride}"
                )
            taken = stride * (extent - 1) + taken

    @property
    def rows(self) -> int:
        return len(self.bases)

    @property
    def outer_blocks(self) -> int:
        """How many places ``block_stride`` apart there are."""
        return self.num_blocks // self.split

    @property
    def block_bytes(self) -> int:
        """Payload of one block of one row."""
        return self.block_tokens * self.num_heads * self.width

    def block_offset(self, block: int) -> int:
        """Bytes from a base to token 0, head 0 of a block of its row."""
        outer, inner = divmod(block, self.split)
        return outer * self.block_stride + inner * self.split_stride

    @property
    def span(self) -> int:
        """Bytes from a base to the end of the last addressed byte of its row."""
        return (
            (self.outer_blocks - 1) * self.block_stride
            + (self.split - 1) * self.split_stride
            + (self.block_tokens - 1) * self.token_stride
            + (self.num_heads - 1) * self.head_stride
            + self.width
        )

    def narrow_heads(self, start: int, count: int) -> Plane:
        """The same plane with heads ``start`` to ``start + count`` only: one rank's share.

        Raises:
            LayoutError: heads that do not exist.
        """
        if start < 0 or count < 1 or start + count > self.num_heads:
            raise LayoutError(
                f"heads {start} to {start + count}: expected a part of 0 to {self.num_heads}"
            )
        moved = tuple(base + start * self.head_stride for base in self.bases)
        return replace(self, bases=moved, num_heads=count)

    def by_token(self) -> Plane:
        """The same bytes addressed by token slot: id ``block * block_tokens + token``.

        Raises:
            LayoutError: blocks that are split already and whose tokens are not evenly spaced.
        """
        tokens = self.block_tokens
        if tokens == 1:
            return self
        if self.split > 1 and self.split_stride != tokens * self.token_stride:
            raise LayoutError(
                f"plane.split_stride: expected {tokens * self.token_stride} so that tokens are "
                f"evenly spaced, got {self.split_stride}"
            )
        return replace(
            self,
            num_blocks=self.num_blocks * tokens,
            block_tokens=1,
            split=self.split * tokens,
            split_stride=self.token_stride,
        )

    def repeated(self, count: int, stride: int) -> Plane:
        """``count`` such planes, ``stride`` bytes apart: id ``which * num_blocks + block``.

        Raises:
            LayoutError: blocks that are split already, or a stride at which the planes overlap.
        """
        if self.split > 1:
            raise LayoutError(f"plane.split: expected 1, got {self.split}: blocks split already")
        return replace(
            self,
            num_blocks=count * self.num_blocks,
            split=self.num_blocks,
            block_stride=stride,
            split_stride=self.block_stride,
        )


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Planes that share block ids: one KV-cache group of an engine.

    Attributes:
        planes: the planes; each has one entry per block id.
        block_tokens: tokens one block id stands for.
        dtype: name of the element type; part of the identity of what is stored, never of a copy.
        opaque: empty for affine pages. Otherwise a tag that names a page format whose inside is not
            affine; such planes have one token and one head, whole blocks move, and only pages of an
            equal tag and block size are interchangeable.
        tokens_per_state: tokens that one token slot of the planes of affine pages stands for; above
            1 in caches that keep one state for several tokens.
    """

    planes: tuple[Plane, ...]
    block_tokens: int
    dtype: str
    opaque: str = ""
    tokens_per_state: int = 1

    def __post_init__(self) -> None:
        if not self.planes:
            raise LayoutError("group.planes: expected at least one plane, got none")
        for name in ("block_tokens", "tokens_per_state"):
            if getattr(self, name) < 1:
                raise LayoutError(f"group.{name}: expected >= 1, got {getattr(self, name)}")
        if self.block_tokens % self.tokens_per_state:
            raise LayoutError(
                f"group.block_tokens: expected a multiple of {self.tokens_per_state} tokens a "
                f"state, got {self.block_tokens}"
            )
        expected = 1 if self.opaque else self.block_tokens // self.tokens_per_state
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
                (plane.block_stride, plane.outer_blocks),
                (plane.split_stride, plane.split),
                (plane.token_stride, plane.block_tokens),
                (plane.head_stride, plane.num_heads),
            )
            if extent > 1
        ]
    return math.gcd(*numbers)
