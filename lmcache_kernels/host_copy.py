"""The block copy in host memory: numpy moves one run of blocks of one row at a time."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .plane import Plane

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}


def copy_blocks_host(
    dst: Plane, dst_ids: Sequence[int], src: Plane, src_ids: Sequence[int], *, unit: int
) -> None:
    """``dst[row, dst_ids[i]] = src[row, src_ids[i]]``; checks are the caller's.

    Planes are coalesced and compatible and lie in this process's memory; ``unit`` divides all their
    numbers and sets the word that numpy moves.
    """
    segments = list(_segments(dst_ids, src_ids))
    for row in range(dst.rows):
        to, origin = _row(dst, row, unit), _row(src, row, unit)
        for dst_start, src_start, count in segments:
            to[dst_start : dst_start + count] = origin[src_start : src_start + count]


def _segments(dst_ids: Sequence[int], src_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(dst, src, count) of the stretches where both sides go up by one: those are one numpy copy."""
    start = 0
    for i in range(1, len(dst_ids) + 1):
        if (
            i == len(dst_ids)
            or dst_ids[i] != dst_ids[i - 1] + 1
            or src_ids[i] != src_ids[i - 1] + 1
        ):
            yield dst_ids[start], src_ids[start], i - start
            start = i


def _row(plane: Plane, row: int, unit: int) -> NDArray[Any]:
    word = np.dtype(_WORDS[unit])
    memory = memoryview((ctypes.c_char * plane.span).from_address(plane.bases[row])).cast("B")
    view: NDArray[Any] = np.ndarray(
        shape=(
            plane.num_blocks,
            plane.block_tokens,
            plane.num_heads,
            plane.width // word.itemsize,
        ),
        dtype=word,
        buffer=memory,
        strides=(plane.block_stride, plane.token_stride, plane.head_stride, word.itemsize),
    )
    return view
