"""The block-copy kernel: paged blocks to chunks, chunks to blocks, blocks to blocks.

Moves ``ids * rows * block_bytes`` bytes of every leg once through registers: that many read, that
many written. Both sides are planes, so gather and scatter are one kernel with the sides exchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .copy_tables import CALL_WORDS, INLINE_IDS, LEG_WORDS, ROW_WORDS
from .fingerprint import KEY_MULTIPLIER, KEY_SHIFT

WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint32, 16: tl.uint32}
"""Element type of an access of so many bytes; wider accesses are several of them side by side."""

_CALL_WORDS = tl.constexpr(CALL_WORDS)
_LEG_WORDS = tl.constexpr(LEG_WORDS)
_ROW_WORDS = tl.constexpr(ROW_WORDS)
_MULTIPLIER = tl.constexpr(KEY_MULTIPLIER)
_SHIFT = tl.constexpr(KEY_SHIFT)


# What a staged store writes to a slice shall stay in the L2 cache until the copy engine has read it, the
# cache's blocks shall not. What a copy engine wrote does not stay there anyway. By FINGERPRINT.
_LOAD_HINTS = tl.constexpr(("", "evict_first", ""))
_STORE_HINTS = tl.constexpr(("", "evict_last", ""))

_ROWS = tl.constexpr(256)  # parts of a fingerprint that are added up at a time


@triton.jit
def _block_offset(ids, side):
    """The outer index of blocks, and the units of their outer and of their inner step.

    ``side`` points at a plane's split, block stride and split stride.
    """
    # Dividing 32 bits is cheap; multiplying takes 64, as a pool may hold more than 2**31 units.
    split = tl.load(side).to(tl.uint32)
    ids = ids.to(tl.uint32)
    outer = ids // split
    inner = ids - outer * split
    return outer, outer.to(tl.int64) * tl.load(side + 1), inner.to(tl.int64) * tl.load(side + 2)


@triton.jit
def _products(value, start, byte, WORD_BYTES: tl.constexpr):
    """Per word, its product with the key of its place (see fingerprint).

    ``value`` [runs, words]; ``start`` int64[runs], where runs begin in the payload; ``byte``
    int32[words], where words begin in a run; both in bytes.
    """
    if WORD_BYTES == 4:
        place = (start >> 2).to(tl.uint32)[:, None] + (byte >> 2).to(tl.uint32)[None, :]
        value = value.to(tl.uint64)
    else:
        position = start[:, None] + byte[None, :]
        place = (position >> 2).to(tl.uint32)
        value = value.to(tl.uint64) << ((position & 3) * 8).to(tl.uint64)
    key = place.to(tl.uint64) * _MULTIPLIER
    return value * ((key ^ (key >> _SHIFT)) | 1)


@triton.jit
def _pick(index, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15):
    """The ``index``-th of 16 values: an array of arguments, which Triton does not have."""
    low = tl.where(index < 2, tl.where(index == 0, v0, v1), tl.where(index == 2, v2, v3))
    high = tl.where(index < 6, tl.where(index == 4, v4, v5), tl.where(index == 6, v6, v7))
    first = tl.where(index < 4, low, high)
    low = tl.where(index < 10, tl.where(index == 8, v8, v9), tl.where(index == 10, v10, v11))
    high = tl.where(index < 14, tl.where(index == 12, v12, v13), tl.where(index == 14, v14, v15))
    return tl.where(index < 8, first, tl.where(index < 12, low, high))


@triton.jit
def _total(sums, num_rows, total_at):
    """The last program of a launch to get here writes the sum of ``sums`` and leaves zeros there.

    So 8 bytes a chunk cross the link, and no kernel more is launched for them. Behind the sums lies
    a counter of programs, zero before and after.
    """
    tl.debug_barrier()  # all warps have added to the sums
    counter = sums + num_rows
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        total = tl.zeros([_ROWS], dtype=tl.int64)
        for first in range(0, num_rows, _ROWS):
            row = first + tl.arange(0, _ROWS)
            inside = row < num_rows
            total += tl.load(sums + row, mask=inside, other=0, cache_modifier=".cg")
            tl.debug_barrier()  # where there are more threads than rows, several load the same
            tl.store(sums + row, tl.zeros([_ROWS], dtype=tl.int64), mask=inside)
        tl.store(counter, tl.zeros([], dtype=tl.int64))
        tl.store(total_at.to(tl.pointer_type(tl.int64)), tl.sum(total, axis=0))


_RUNTIME = ["num_rows", "shift", "total_at", "first_tile", "end_tile", "num_inline"]
_RUNTIME += [f"{side}{i}" for side in ("to", "from") for i in range(INLINE_IDS)]


# Sizes and strides lie in tables, so one binary serves every layout of a unit and a tile shape.
# fmt: off
@triton.jit(
    do_not_specialize=_RUNTIME,
    do_not_specialize_on_alignment=["call", "legs", "rows", "sums"],
)
def block_copy_kernel(
    call,
    legs,
    rows,
    sums,
    num_rows: tl.int32,
    shift: tl.int64,
    total_at: tl.int64,
    first_tile: tl.int32,
    end_tile: tl.int32,
    num_inline: tl.int32,
    to0, to1, to2, to3, to4, to5, to6, to7,
    to8, to9, to10, to11, to12, to13, to14, to15,
    from0, from1, from2, from3, from4, from5, from6, from7,
    from8, from9, from10, from11, from12, from13, from14, from15,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    LEGS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
    FINGERPRINT: tl.constexpr,
    STAGED: tl.constexpr,
    WRITES: tl.constexpr,
    INLINE: tl.constexpr,
):
    """``dst[row, dst_ids[i], t, h, :] = src[row, src_ids[i], t, h, :]`` for every leg

    grid = (programs,), each program takes every ``programs``-th tile of
    (leg, row, BLOCKS ids, TOKENS tokens, HEADS heads, UNITS units). ``call`` int32, of this copy;
    ``legs`` and ``rows`` int64, of the planes: see copy_tables. INLINE: all legs have the same ids,
    and these are the arguments ``to*`` and ``from*`` instead. Strides are in units of UNIT bytes.
    Nothing is written for a destination id below 0. FINGERPRINT 0: none; 1, 2: the destination's or
    source's planes are chunks, ``shift`` bytes behind where the tables say, whose parts of a
    fingerprint ``sums`` int64[chunks, rows] gains. ``total_at`` not 0: ``sums`` are of one
    chunk, this launch is the last that adds to them, and writes their total there; behind them lies a
    counter.
    """
    LANES: tl.constexpr = UNIT // WORD_BYTES
    # Powers of two, so that the runs of a tile need no division.
    run = tl.arange(0, BLOCKS * TOKENS * HEADS)
    for tile in range(first_tile + tl.program_id(0), end_tile, tl.num_programs(0)):
        # Where the tiles of each leg begin, and which leg this one is of.
        slot = tl.arange(0, LEGS)
        if INLINE:
            num_ids = num_inline
            starts = tl.load(legs + slot * _LEG_WORDS + 15) * tl.cdiv(num_inline, BLOCKS)
        else:
            starts = tl.load(call + slot * _CALL_WORDS).to(tl.int64)
        which = tl.sum((starts <= tile).to(tl.int32), axis=0) - 1
        rest = tile - tl.max(tl.where(starts <= tile, starts, 0), axis=0).to(tl.int32)
        leg = legs + which * _LEG_WORDS
        if not INLINE:
            num_ids = tl.load(call + which * _CALL_WORDS + 1)
            ids = call + tl.load(call + which * _CALL_WORDS + 2)
        num_tokens = tl.load(leg + 2).to(tl.int32)
        num_heads = tl.load(leg + 3).to(tl.int32)
        run_units = tl.load(leg + 4).to(tl.int32)

        unit_tiles = tl.cdiv(run_units, UNITS)
        head_tiles = tl.cdiv(num_heads, HEADS)
        token_tiles = tl.cdiv(num_tokens, TOKENS)
        id_tiles = tl.cdiv(num_ids, BLOCKS)
        unit_tile = rest % unit_tiles
        rest = rest // unit_tiles
        head_tile = rest % head_tiles
        rest = rest // head_tiles
        token_tile = rest % token_tiles
        rest = rest // token_tiles
        id_tile = rest % id_tiles
        row = tl.load(leg) + rest // id_tiles

        # Without the hint, and on the pointer, a base from a table gives scalar accesses.
        dst_base = tl.load(rows + row * _ROW_WORDS)
        src_base = tl.load(rows + row * _ROW_WORDS + 1)
        if FINGERPRINT == 1:
            dst_base += shift
        elif FINGERPRINT == 2:
            src_base += shift
        dst_base = tl.multiple_of(dst_base.to(tl.pointer_type(WORD)), UNIT)
        src_base = tl.multiple_of(src_base.to(tl.pointer_type(WORD)), UNIT)
        token = token_tile * TOKENS + run // HEADS % TOKENS
        head = head_tile * HEADS + run % HEADS
        inside = (token < num_tokens) & (head < num_heads)
        if BLOCKS == 1:
            index = id_tile
            present = True
        else:
            index = id_tile * BLOCKS + run // (HEADS * TOKENS)
            present = index < num_ids
            inside = inside & present
        if INLINE:
            dst_id = _pick(
                index, to0, to1, to2, to3, to4, to5, to6, to7,
                to8, to9, to10, to11, to12, to13, to14, to15,
            )
            src_id = _pick(
                index, from0, from1, from2, from3, from4, from5, from6, from7,
                from8, from9, from10, from11, from12, from13, from14, from15,
            )
        else:
            dst_id = tl.load(ids + index, mask=present, other=-1)
            src_id = tl.load(ids + num_ids + index, mask=present, other=0)
        written = tl.where(dst_id >= 0, inside, False)
        dst_outer, dst_jump, dst_inner = _block_offset(tl.maximum(dst_id, 0), leg + 5)
        src_outer, src_jump, src_inner = _block_offset(src_id, leg + 10)
        token = token.to(tl.int64)
        head = head.to(tl.int64)
        dst_inner = dst_inner + token * tl.load(leg + 8) + head * tl.load(leg + 9)
        src_inner = src_inner + token * tl.load(leg + 13) + head * tl.load(leg + 14)

        word = unit_tile * (UNITS * LANES) + tl.arange(0, UNITS * LANES)
        fits = (word < run_units * LANES)[None, :]
        dst_run = (dst_jump + dst_inner) * LANES
        src_run = (src_jump + src_inner) * LANES
        dst_ptr = dst_base + dst_run[:, None] + word[None, :]
        src_ptr = src_base + src_run[:, None] + word[None, :]
        # A source chunk is read whole for its fingerprint, also where nothing is written.
        read = inside if FINGERPRINT == 2 else written
        FROM: tl.constexpr = _LOAD_HINTS[FINGERPRINT if STAGED else 0]
        TO: tl.constexpr = _STORE_HINTS[FINGERPRINT if STAGED else 0]
        value = tl.load(src_ptr, mask=read[:, None] & fits, other=0, eviction_policy=FROM)
        if WRITES:
            tl.store(dst_ptr, value, mask=written[:, None] & fits, eviction_policy=TO)

        if FINGERPRINT:
            # A chunk's payload is one outer step of its side.
            outer, start = (dst_outer, dst_inner) if FINGERPRINT == 1 else (src_outer, src_inner)
            start = start * UNIT + tl.load(rows + row * _ROW_WORDS + 2)
            products = _products(value, start, word * WORD_BYTES, WORD_BYTES)
            target = sums + outer.to(tl.int64) * num_rows + row
            if BLOCKS == 1:
                total = tl.sum(products).to(tl.int64, bitcast=True)
                tl.atomic_add(target, total, sem="relaxed")
            else:
                totals = tl.sum(products, axis=1).to(tl.int64, bitcast=True)
                tl.atomic_add(target, totals, mask=inside, sem="relaxed")

    if FINGERPRINT:  # noqa: SIM102 - one is known when this is compiled, the other when it is launched
        if total_at != 0:
            _total(sums, num_rows, total_at)
# fmt: on
