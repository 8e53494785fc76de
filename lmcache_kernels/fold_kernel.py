"""Adds up the parts of fingerprints on the device, so that 8 bytes a chunk cross the link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

_ROWS = 256
"""Parts a program loads at a time; their order does not matter."""


# fmt: off
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["sums", "totals"])
def _fold_kernel(sums, totals, num_rows: tl.int32, ROWS: tl.constexpr):
    """``totals[i] = sum(sums[i])`` modulo 2**64, then ``sums[i] = 0``; grid = (chunks,)"""
    chunk = tl.program_id(0)
    sums += chunk.to(tl.int64) * num_rows
    total = tl.zeros([ROWS], dtype=tl.int64)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        total += tl.load(sums + row, mask=row < num_rows, other=0)
        tl.store(sums + row, tl.zeros([ROWS], dtype=tl.int64), mask=row < num_rows)
    tl.store(totals + chunk, tl.sum(total, axis=0))
# fmt: on


def fold_sums(sums: torch.Tensor, totals: torch.Tensor) -> None:
    """Queue ``totals[i] = sum(sums[i])`` on the current stream and leave zeros in ``sums``.

    Args:
        sums: contiguous int64[chunks, rows] on the device.
        totals: contiguous int64[chunks], on the device or pinned: written over the link there.
    """
    chunks, rows = sums.shape
    if chunks:
        _fold_kernel[(chunks,)](sums, totals, rows, ROWS=_ROWS, num_warps=1)
