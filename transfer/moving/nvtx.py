"""Ranges that profilers of GPUs show."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SWITCH = "LMCACHE_KERNELS_NVTX"
"""The environment variable that turns them on: 1."""


def nvtx_ranges(device: str) -> Callable[[str], AbstractContextManager[Any]]:
    """What makes a range of a name; of work for a CPU, and unless it is switched on, nothing."""
    if device == "cpu" or os.environ.get(SWITCH) != "1":
        return lambda name: nullcontext()
    import torch

    return torch.cuda.nvtx.range
