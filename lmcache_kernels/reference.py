"""The plain meaning of a block copy: loops, one run at a time. Tests and benchmarks compare with it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from .plane import check_compatible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .plane import Plane


def copy_blocks_ref(dst: Plane, dst_ids: Sequence[int], src: Plane, src_ids: Sequence[int]) -> None:
    """``dst[row, dst_ids[i], t, h, :] = src[row, src_ids[i], t, h, :]`` in host memory."""
    check_compatible(dst, src)
    for to, origin in zip(dst_ids, src_ids, strict=True):
        for row in range(dst.rows):
            for token in range(dst.block_tokens):
                for head in range(dst.num_heads):
                    ctypes.memmove(
                        _address(dst, row, to, token, head),
                        _address(src, row, origin, token, head),
                        dst.width,
                    )


def _address(plane: Plane, row: int, block: int, token: int, head: int) -> int:
    return (
        plane.bases[row]
        + plane.block_offset(block)
        + token * plane.token_stride
        + head * plane.head_stride
    )


def fingerprint_ref(payload: bytes) -> int:
    """The fingerprint of a whole payload, word by word; see :mod:`lmcache_kernels.fingerprint`."""
    total = 0
    for place in range(0, len(payload), 4):
        mixed = place // 4 * 0x9E3779B97F4A7C15 % (1 << 64)
        key = (mixed ^ mixed >> 32) | 1
        total += int.from_bytes(payload[place : place + 4], "little") * key
    return total % (1 << 64)
