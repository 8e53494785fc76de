"""Adds up the parts of fingerprints on the device, so that 8 bytes a chunk cross the link."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

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


def fold_sums(sums: torch.Tensor, totals: torch.Tensor, stream: int) -> None:
    """Queue ``totals[i] = sum(sums[i])`` and leave zeros in ``sums``.

    Args:
        sums: contiguous int64[chunks, rows] on the device.
        totals: contiguous int64[chunks], on the device or pinned: written over the link there.
        stream: handle; its device must be the current one. The interpreter needs none.
    """
    chunks, rows = sums.shape
    if not chunks:
        return
    if not sums.is_cuda:
        _fold_kernel[(chunks,)](sums, totals, rows, ROWS=_ROWS)
        return
    kernel = _compiled(sums.device.index)
    kernel.run(
        *(chunks, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None),
        *(sums.data_ptr(), totals.data_ptr(), rows, _ROWS),
    )


@cache
def _compiled(device: int) -> Any:
    """The kernel, loaded on a device: without Triton's look at every argument, see launching."""
    with torch.cuda.device(device):
        kernel = _fold_kernel.warmup(
            torch.int64, torch.int64, 1, ROWS=_ROWS, grid=(1,), num_warps=1
        )
        kernel.run  # noqa: B018 - loads the binary
    return kernel
