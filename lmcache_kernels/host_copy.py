"""The block copy in host memory: numpy moves one run of blocks of one row at a time."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from .fingerprint import fingerprint, signed
from .ids import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from .copy_plan import CopyPlan, Leg
    from .ids import IdBuffer
    from .plane import Plane

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}


class HostCopy:
    """Carries out a plan whose planes lie in this process's memory."""

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan

    def copy(self, ids: Sequence[tuple[IdBuffer, IdBuffer]], sums: torch.Tensor | None) -> None:
        row = 0
        for leg in self._plan.legs:
            dst_ids, src_ids = (side.tolist() for side in ids[leg.group])
            _copy_leg(leg, dst_ids, src_ids, self._plan.unit)
            if sums is not None:
                if self._plan.chunk_side == "dst":
                    chunk, blocks = leg.dst, [block for block in dst_ids if block != ABSENT]
                else:
                    chunk, blocks = leg.src, src_ids
                _add_fingerprints(
                    sums.numpy()[:, row : row + chunk.rows], chunk, leg.places, blocks
                )
            row += leg.dst.rows


def _copy_leg(leg: Leg, dst_ids: list[int], src_ids: list[int], unit: int) -> None:
    segments = list(_segments(dst_ids, _evenly_apart(leg.dst), src_ids, _evenly_apart(leg.src)))
    for row in range(leg.dst.rows):
        to, origin = _row(leg.dst, row, unit), _row(leg.src, row, unit)
        for dst_at, dst_first, src_at, src_first, count in segments:
            to[dst_at, dst_first : dst_first + count] = origin[
                src_at, src_first : src_first + count
            ]


def _evenly_apart(plane: Plane) -> int:
    """So many neighbouring ids lie one stride apart."""
    return plane.num_blocks if plane.split == 1 else plane.split


def _segments(
    dst_ids: list[int], dst_even: int, src_ids: list[int], src_even: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Stretches where both sides go up by one without a jump: each is one numpy copy."""
    start = 0
    for i in range(1, len(dst_ids) + 1):
        goes_on = (
            i < len(dst_ids)
            and dst_ids[i] == dst_ids[i - 1] + 1
            and src_ids[i] == src_ids[i - 1] + 1
            and dst_ids[i] % dst_even
            and src_ids[i] % src_even
        )
        if not goes_on:
            if dst_ids[start] != ABSENT:
                yield (
                    *divmod(dst_ids[start], dst_even),
                    *divmod(src_ids[start], src_even),
                    i - start,
                )
            start = i


def _row(plane: Plane, row: int, unit: int) -> NDArray[Any]:
    """[place, block, token, head, word] of one row."""
    word = np.dtype(_WORDS[unit])
    memory = memoryview((ctypes.c_char * plane.span).from_address(plane.bases[row])).cast("B")
    even = _evenly_apart(plane)
    view: NDArray[Any] = np.ndarray(
        shape=(
            plane.num_blocks // even,
            even,
            plane.block_tokens,
            plane.num_heads,
            plane.width // word.itemsize,
        ),
        dtype=word,
        buffer=memory,
        strides=(
            plane.block_stride,
            plane.block_stride if plane.split == 1 else plane.split_stride,
            plane.token_stride,
            plane.head_stride,
            word.itemsize,
        ),
    )
    return view


def _add_fingerprints(
    sums: NDArray[np.int64], chunk: Plane, places: Sequence[int], blocks: Sequence[int]
) -> None:
    """Blocks of the chunk side are dense, so neighbours often are one stretch of its payload."""
    stretches = list(_stretches(blocks, chunk.split, chunk.split_stride == chunk.block_bytes))
    for row, (base, place) in enumerate(zip(chunk.bases, places, strict=True)):
        for first, count in stretches:
            which, inside = divmod(first, chunk.split)
            memory = (ctypes.c_char * (count * chunk.block_bytes)).from_address(
                base + chunk.block_offset(first)
            )
            part = fingerprint(memoryview(memory).cast("B"), place + inside * chunk.split_stride)
            sums[which, row] = signed(int(sums[which, row]) + part)


def _stretches(blocks: Sequence[int], split: int, dense: bool) -> Iterator[tuple[int, int]]:
    """(first, count) of blocks that follow each other inside one chunk."""
    first = count = 0
    for block in blocks:
        if count and dense and block == first + count and block % split:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count
