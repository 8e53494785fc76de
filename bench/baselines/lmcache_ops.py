"""LMCache's kernel ``multi_layer_block_kv_transfer`` between the cache and chunks in GPU memory.

Only its compiled module is loaded, from wherever a wheel of LMCache lies on the path; the package
around it is not imported. It is driven as LMCache drives it: ids uploaded once, then one launch for
four objects of 256 tokens. An object is [K/V, layer, token, heads * dim]; fused pages count as one
tensor of doubled dim, and latent ones as one of one head.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from array import array
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import cases
from bench.trials import CHUNK_TOKENS
from bench.workload import POISON

from .base import Baseline, NotApplicable

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.workload import Workload

MAX_HEADS = 32
OBJECTS_A_LAUNCH = 4

FORMATS = {
    cases.KV_FIRST: "NL_X_TWO_NB_BS_NH_HS",
    cases.BLOCK_FIRST: "NL_X_NB_TWO_BS_NH_HS",
    cases.KV_FIRST_HND: "NL_X_TWO_NB_NH_BS_HS",
    cases.BLOCK_FIRST_HND: "NL_X_NB_TWO_NH_BS_HS",
    cases.FUSED_NHD: "NL_X_NB_BS_NH_TWO_HS",
    cases.FUSED_HND: "NL_X_NB_NH_BS_TWO_HS",
    cases.FUSED_VIEW: "NL_X_NB_BS_NH_TWO_HS",
    cases.LATENT: "NL_X_NB_BS_HS",
    cases.CROSS_LAYER: "NB_NL_TWO_BS_NH_HS",
}


def prepare(work: Workload) -> Baseline:
    launcher = launcher_for(work)
    objects = launcher.objects
    chunks, per_chunk = len(objects), work.blocks_per_chunk
    kv, _, tokens, heads, dim = work.views[0].shape
    shape = (chunks, kv, len(work.views), per_chunk, tokens, heads, dim)
    whole = objects.view(work.views[0].dtype).view(shape)
    return Baseline(
        run=lambda: launcher(work.ids),
        moved=work.moved,
        poison=(lambda: objects.fill_(POISON)) if work.gathers else work.poison,
        is_exact=lambda: work.is_exact(chunk_view=lambda layer: whole[:, :, layer]),
    )


class Launcher:
    """Moves blocks between the cache of a workload and ``objects``, uint8 [chunk, bytes]."""

    def __init__(self, work: Workload, ops: Any, format_name: str) -> None:
        kv, blocks, tokens, heads, dim = work.views[0].shape
        shape = ops.PageBufferShapeDesc()
        shape.kv_size, shape.nl, shape.nb, shape.bs = kv, len(work.views), blocks, tokens
        shape.nh, shape.hs = heads, dim
        shape.element_size = work.views[0].element_size()
        device = torch.device(work.device)
        self.objects = torch.randint_like(
            work.chunk.view(len(work.ids) // work.blocks_per_chunk, -1), 256
        )
        self._per_chunk = work.blocks_per_chunk
        self._pages = torch.tensor([c.data_ptr() for c in work.caches], dtype=torch.int64).to(
            device
        )
        self._ids = torch.empty(len(work.ids), dtype=torch.int64, device=device)
        self._addresses = [one.data_ptr() for one in self.objects]
        direction = ops.TransferDirection.D2H if work.gathers else ops.TransferDirection.H2D
        self._call: Callable[..., None] = ops.multi_layer_block_kv_transfer
        self._behind = (
            *(device, direction, shape, CHUNK_TOKENS),
            getattr(ops.EngineKVFormat, format_name),
            0,
        )

    def __call__(self, ids: list[int]) -> None:
        """The first ``len(ids) / blocks a chunk`` objects and the blocks ``ids``."""
        here = torch.frombuffer(array("q", ids), dtype=torch.int64)
        there = self._ids[: len(ids)]
        there.copy_(here, non_blocking=True)
        step = OBJECTS_A_LAUNCH * self._per_chunk
        for start in range(0, len(ids), step):
            first = start // self._per_chunk
            some = there[start : start + step]
            objects = self._addresses[first : first + len(some) // self._per_chunk]
            self._call(self._pages, objects, some, *self._behind)


def launcher_for(work: Workload) -> Launcher:
    """
    Raises:
        NotApplicable: no LMCache here, or none that can read this cache.
    """
    if work.device == "cpu":
        raise NotApplicable("needs a CUDA device")
    if work.trial.case.model.heads > MAX_HEADS:
        raise NotApplicable(f"takes at most {MAX_HEADS} heads")
    ops = _compiled_module()
    name = FORMATS.get(work.trial.case.layout)
    if name is None or not hasattr(ops.EngineKVFormat, name):
        raise NotApplicable(f"knows no format for {work.trial.case.layout.name}")
    return Launcher(work, ops, name)


@cache
def _compiled_module() -> Any:
    package = importlib.util.find_spec("lmcache")
    for folder in (package and package.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("c_ops*.so")):
            # The last part of the name is the one that the module was compiled under.
            loader = importlib.machinery.ExtensionFileLoader("lmcache_alone.c_ops", str(path))
            spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
            if spec is None:
                continue
            try:
                module = importlib.util.module_from_spec(spec)
                loader.exec_module(module)
            except ImportError as error:
                raise NotApplicable(f"lmcache's c_ops does not load: {error}") from error
            return module
    raise NotApplicable("lmcache is not installed")
