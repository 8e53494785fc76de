"""The block-copy kernel: paged blocks to chunks, chunks to blocks, blocks to blocks.

Moves ``len(ids) * rows * block_bytes`` bytes once through registers: that many read, that many
written. Both sides are planes, so gather and scatter are one kernel with the sides exchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from .copy_config import CopyConfig
    from .plane import Plane

_WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_RUNTIME = [
    *("num_ids", "num_rows", "num_tokens", "num_heads", "run_units"),
    *("dst_block_stride", "dst_token_stride", "dst_head_stride"),
    *("src_block_stride", "src_token_stride", "src_head_stride"),
]


# Sizes and strides are not specialised, so one binary serves every layout of a unit: Triton would
# otherwise compile again for 1, for multiples of 16 and for values beyond 32 bits.
@triton.jit(do_not_specialize=_RUNTIME)
def block_copy_kernel(
    dst_bases,
    src_bases,
    dst_ids,
    src_ids,
    num_ids: tl.int32,
    num_rows: tl.int32,
    num_tokens: tl.int32,
    num_heads: tl.int32,
    run_units: tl.int32,
    dst_block_stride: tl.int64,
    dst_token_stride: tl.int64,
    dst_head_stride: tl.int64,
    src_block_stride: tl.int64,
    src_token_stride: tl.int64,
    src_head_stride: tl.int64,
    WORD: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """``dst[row, dst_ids[i], t, h, :] = src[row, src_ids[i], t, h, :]``

    grid = (programs,), each program takes every ``programs``-th tile of
    (row, id, TOKENS tokens, HEADS heads, UNITS units). ``*_bases`` int64[rows] addresses; ``*_ids``
    int32 or int64[num_ids]; strides in units of UNIT bytes; a unit is LANES words of type WORD.
    """
    unit_tiles = tl.cdiv(run_units, UNITS)
    head_tiles = tl.cdiv(num_heads, HEADS)
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    tiles = num_rows * num_ids * token_tiles * head_tiles * unit_tiles
    # A power of two, so that the runs of a tile need no division.
    run = tl.arange(0, TOKENS * HEADS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        unit_tile = tile % unit_tiles
        rest = tile // unit_tiles
        head_tile = rest % head_tiles
        rest = rest // head_tiles
        token_tile = rest % token_tiles
        rest = rest // token_tiles
        index = rest % num_ids
        row = rest // num_ids

        # Without the hint a base loaded from a table gives scalar accesses.
        dst_base = tl.multiple_of(tl.load(dst_bases + row), UNIT)
        src_base = tl.multiple_of(tl.load(src_bases + row), UNIT)
        dst_block = tl.load(dst_ids + index).to(tl.int64) * dst_block_stride
        src_block = tl.load(src_ids + index).to(tl.int64) * src_block_stride

        token = token_tile * TOKENS + run // HEADS
        head = head_tile * HEADS + run % HEADS
        word = unit_tile * (UNITS * LANES) + tl.arange(0, UNITS * LANES)
        inside = (token < num_tokens) & (head < num_heads)
        mask = inside[:, None] & (word < run_units * LANES)[None, :]
        token = token.to(tl.int64)
        head = head.to(tl.int64)

        dst_run = (dst_block + token * dst_token_stride + head * dst_head_stride) * LANES
        src_run = (src_block + token * src_token_stride + head * src_head_stride) * LANES
        dst_ptr = dst_base.to(tl.pointer_type(WORD)) + dst_run[:, None] + word[None, :]
        src_ptr = src_base.to(tl.pointer_type(WORD)) + src_run[:, None] + word[None, :]
        tl.store(dst_ptr, tl.load(src_ptr, mask=mask), mask=mask)


def launch_block_copy(
    dst: Plane,
    dst_bases: torch.Tensor,
    dst_ids: torch.Tensor,
    src: Plane,
    src_bases: torch.Tensor,
    src_ids: torch.Tensor,
    *,
    unit: int,
    config: CopyConfig,
) -> None:
    """Launch on the current stream. Planes are coalesced and compatible, ids checked by the caller.

    Args:
        dst_bases, src_bases: int64[rows], the planes' base tables on the device.
        dst_ids, src_ids: int32 or int64[n] on the device.
        unit: ``access_unit(dst, src)``.
    """
    word = min(unit, 4)
    tiles = (
        dst.rows
        * dst_ids.numel()
        * -(-dst.block_tokens // config.tokens)
        * -(-dst.num_heads // config.heads)
        * -(-(dst.width // unit) // config.units)
    )
    block_copy_kernel[(min(tiles, config.programs),)](
        dst_bases,
        src_bases,
        dst_ids,
        src_ids,
        num_ids=dst_ids.numel(),
        num_rows=dst.rows,
        num_tokens=dst.block_tokens,
        num_heads=dst.num_heads,
        run_units=dst.width // unit,
        dst_block_stride=dst.block_stride // unit,
        dst_token_stride=dst.token_stride // unit,
        dst_head_stride=dst.head_stride // unit,
        src_block_stride=src.block_stride // unit,
        src_token_stride=src.token_stride // unit,
        src_head_stride=src.head_stride // unit,
        WORD=_WORDS[word],
        LANES=unit // word,
        UNIT=unit,
        TOKENS=config.tokens,
        HEADS=config.heads,
        UNITS=config.units,
        num_warps=config.num_warps,
    )
