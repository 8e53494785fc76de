"""The canonical form of a stored chunk: what every engine of one model agrees on.

A chunk holds ``chunk_tokens`` tokens of every group. Its payload is, group after group and plane
after plane, ``row, token, head, width`` with nothing in between but padding of each plane's start to
``PLANE_ALIGN`` bytes. It depends on no stride and no block size, so engines that page their caches
differently share chunks. Opaque pages are the exception: they are kept whole, in order of tokens.
Pure: bytes and addresses only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from .errors import LayoutError
from .plane import CacheGroup, Plane

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT_VERSION = 1
"""Raised by one whenever the meaning of a chunk's bytes changes."""

MAX_GROUPS = 48
"""For the fingerprints of so many there is room beside a stored chunk."""

PLANE_ALIGN = 512
"""Each plane starts on a multiple of this: enough for any access width and any copy engine."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where each plane of each group lies inside a chunk.

    Attributes:
        chunk_tokens: tokens of one chunk.
        groups: per group and plane, the chunk side as a plane over address 0; one chunk has
            ``blocks_per_chunk`` blocks of the group.
        blocks_per_chunk: per group.
        nbytes: payload of one chunk.
        fingerprint: 32 bytes; equal exactly for chunks whose bytes mean the same.
    """

    chunk_tokens: int
    groups: tuple[tuple[Plane, ...], ...]
    blocks_per_chunk: tuple[int, ...]
    nbytes: int
    fingerprint: bytes

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], chunk_tokens: int) -> ChunkLayout:
        """The layout of chunks of these groups.

        Raises:
            LayoutError: no group, more than :data:`MAX_GROUPS`, or ``chunk_tokens`` is not a multiple of a group's block size.
        """
        if not groups:
            raise LayoutError("groups: expected at least one, got none")
        if len(groups) > MAX_GROUPS:
            raise LayoutError(f"groups: expected at most {MAX_GROUPS}, got {len(groups)}")
        offset = 0
        laid: list[tuple[Plane, ...]] = []
        for index, group in enumerate(groups):
            if chunk_tokens < 1 or chunk_tokens % group.block_tokens:
                raise LayoutError(
                    f"chunk size {chunk_tokens} tokens: expected a multiple of the block size "
                    f"{group.block_tokens} of group {index}"
                )
            blocks = chunk_tokens // group.block_tokens
            planes = []
            for plane in group.planes:
                offset = -(-offset // PLANE_ALIGN) * PLANE_ALIGN
                planes.append(_dense(plane, blocks, offset))
                offset += plane.rows * blocks * plane.block_bytes
            laid.append(tuple(planes))
        return cls(
            chunk_tokens=chunk_tokens,
            groups=tuple(laid),
            blocks_per_chunk=tuple(chunk_tokens // g.block_tokens for g in groups),
            nbytes=offset,
            fingerprint=_fingerprint(groups, chunk_tokens),
        )

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Of each group in a chunk, padding left out."""
        return tuple(
            sum(plane.rows * plane.num_blocks * plane.block_bytes for plane in planes)
            for planes in self.groups
        )

    def planes_at(
        self, address: int, device: str, *, chunks: int = 1, stride: int | None = None
    ) -> tuple[tuple[Plane, ...], ...]:
        """Per group, the planes of chunks whose payloads start at ``address`` and every ``stride``.

        Args:
            address: of the first payload.
            device: where that is.
            chunks: how many there are. Block ``i`` of chunk ``c`` has the id
                ``c * blocks_per_chunk + i``.
            stride: bytes from one payload to the next; None: no gap.
        """
        step = self.nbytes if stride is None else stride
        return tuple(
            tuple(
                replace(
                    plane, bases=tuple(address + base for base in plane.bases), device=device
                ).repeated(chunks, step)
                for plane in planes
            )
            for planes in self.groups
        )


def _dense(plane: Plane, blocks: int, offset: int) -> Plane:
    row_bytes = blocks * plane.block_bytes
    return Plane(
        bases=tuple(offset + row * row_bytes for row in range(plane.rows)),
        num_blocks=blocks,
        block_tokens=plane.block_tokens,
        num_heads=plane.num_heads,
        width=plane.width,
        block_stride=plane.block_bytes,
        token_stride=plane.num_heads * plane.width,
        head_stride=plane.width,
    )


def _fingerprint(groups: Sequence[CacheGroup], chunk_tokens: int) -> bytes:
    meaning = [
        "lmcache-kernels chunk",
        FORMAT_VERSION,
        "group plane row token head width",
        chunk_tokens,
        [
            [
                group.dtype,
                [[plane.rows, plane.num_heads, plane.width] for plane in group.planes],
                group.tokens_per_state,
                # A page that is kept whole only means something at its own size and format.
                [group.opaque, group.block_tokens] if group.opaque else [],
            ]
            for group in groups
        ],
    ]
    return blake3(msgspec.msgpack.encode(meaning)).digest()
