"""vLLM's Triton kernel for swapping blocks, fed with an address for each run.

vLLM itself uses it from the host to the GPU and for pages below 28 KB; here it moves the same runs
inside the GPU, with its own grid of 12 programs. Its one file is executed by itself: the two names
it imports from vLLM are Triton, and an operator that is only called for fewer than 16 runs.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .base import Baseline, NotApplicable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.workload import Workload

FILE = "v1/kv_offload/cpu/swap_blocks_triton.py"
MAX_TILE_BYTES = 8192
WORD_BYTES = 8


def prepare(work: Workload) -> Baseline:
    if work.device == "cpu":
        raise NotApplicable("needs a CUDA device")
    swap = _module()
    to, origin, width = work.runs(len(work.ids))
    if width % WORD_BYTES:
        raise NotApplicable(f"moves words of {WORD_BYTES} bytes; a run has {width}")
    if len(to) < swap.MIN_N:
        raise NotApplicable(f"takes at least {swap.MIN_N} runs, got {len(to)}")
    sizes = np.full(len(to), width, dtype=np.int64)
    pinned = [torch.from_numpy(numbers).pin_memory() for numbers in (origin, to, sizes)]
    tile = min(1 << (width - 1).bit_length(), MAX_TILE_BYTES)

    return Baseline(
        run=lambda: swap.swap_blocks_batch(*pinned, bytes_per_chunk=tile),
        moved=work.moved,
        poison=work.poison,
        is_exact=work.is_exact,
    )


@cache
def _module() -> Any:
    package = importlib.util.find_spec("vllm")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / FILE
        if path.exists():
            spec = importlib.util.spec_from_file_location("vllm_swap_alone", path)
            if spec is None or spec.loader is None:
                continue
            module = importlib.util.module_from_spec(spec)
            try:
                with _standing_in():
                    spec.loader.exec_module(module)
            except ImportError as error:
                raise NotApplicable(f"vLLM's {FILE} does not load: {error}") from error
            return module
    raise NotApplicable("vLLM is not installed, or has no Triton swap")


@contextmanager
def _standing_in() -> Iterator[None]:
    """For the length of an import, modules under vLLM's names that hold what the file wants."""
    import triton
    import triton.language

    package, triton_utils = ModuleType("vllm"), ModuleType("vllm.triton_utils")
    operators = ModuleType("vllm._custom_ops")
    triton_utils.__dict__.update(triton=triton, tl=triton.language)
    package.__dict__.update(_custom_ops=operators, triton_utils=triton_utils)
    theirs = {module.__name__: module for module in (package, triton_utils, operators)}
    before = {name: sys.modules.get(name) for name in theirs}
    sys.modules.update(theirs)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
