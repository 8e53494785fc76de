"""CUDA's own batched copy, ``cudaMemcpyBatchAsync``: one call, one entry for each run.

Called in the library that torch has loaded, with arrays, because a binding that takes Python lists
would spend longer converting them than the driver spends copying. An entry costs about a
microsecond, so only as many blocks are moved as make a bounded number of entries.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .base import Baseline, NotApplicable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bench.workload import Workload

MAX_ENTRIES = 8192
_SOURCE_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes of CUDA 13; the hints matter for managed memory only."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def prepare(work: Workload) -> Baseline:
    call = _function(work.device)
    per_block = work.pool.rows * _entries_of_a_row(work)
    blocks = min(len(work.ids), max(1, MAX_ENTRIES // per_block))
    to, origin, width = work.runs(blocks)
    sizes = np.full(len(to), width, dtype=np.uint64)
    attributes, first = _Attributes(source_order=_SOURCE_IN_STREAM_ORDER), ctypes.c_size_t(0)

    def run() -> None:
        status = call(
            _pointer(to),
            _pointer(origin),
            _pointer(sizes),
            ctypes.c_size_t(len(to)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            # The default stream is refused; whoever measures has made another one current.
            ctypes.c_void_p(torch.cuda.current_stream(work.device).cuda_stream),
        )
        if status:
            raise RuntimeError(f"cudaMemcpyBatchAsync: error {status}")

    return Baseline(
        run=run,
        moved=blocks * work.trial.case.block_bytes,
        poison=work.poison,
        is_exact=lambda: work.is_exact(blocks),
    )


def _entries_of_a_row(work: Workload) -> int:
    return work.pool.block_bytes // work.run_bytes


def _function(device: str) -> Any:
    if device == "cpu":
        raise NotApplicable("needs a CUDA device")
    version = str(torch.version.cuda)
    if not version.startswith("13."):
        raise NotApplicable(f"the call has other arguments before CUDA 13; this is {version}")
    try:
        call = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        raise NotApplicable(f"no cudaMemcpyBatchAsync: {error}") from error
    call.restype = ctypes.c_int
    return call


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
