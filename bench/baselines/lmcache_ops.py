"""LMCache's kernel ``multi_layer_block_kv_transfer`` between the cache and chunks.

The chunks lie where those of the workload do: in GPU memory, or in pinned memory that the kernel
reaches over the link. Only its compiled module is loaded, from wherever a wheel of LMCache lies on the path; the package
around it is not imported. It is driven as LMCache drives it: ids uploaded once, then one launch for
four objects of 256 tokens. An object is [K/V, layer, token, heads * dim]; fused pages count as one
tensor of doubled dim, and latent ones as one of one head.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from array import array
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import cases

from .base import Baseline, NotApplicable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    launcher = launcher_for(work, work.chunk)
    return Baseline(
        run=lambda: launcher(work.ids),
        moved=work.moved,
        poison=work.poison,
        is_exact=lambda: work.is_exact(layer_of=partial(layer_of, work)),
    )


def layer_of(work: Workload, objects: torch.Tensor, layer: int) -> torch.Tensor:
    """One layer of LMCache's objects as [object, kv, block, token, head, dim]."""
    kv, _, tokens, heads, dim = work.views[0].shape
    shape = (len(objects), kv, len(work.views), work.blocks_per_chunk, tokens, heads, dim)
    return objects.view(work.views[0].dtype).view(shape)[:, :, layer]


class Launcher:
    """Moves blocks between the cache of a workload and ``objects``, uint8 [object, byte]."""

    def __init__(self, work: Workload, objects: torch.Tensor, ops: Any, format_name: str) -> None:
        kv, blocks, tokens, heads, dim = work.views[0].shape
        shape = ops.PageBufferShapeDesc()
        shape.kv_size, shape.nl, shape.nb, shape.bs = kv, len(work.views), blocks, tokens
        shape.nh, shape.hs = heads, dim
        shape.element_size = work.views[0].element_size()
        device = torch.device(work.device)
        self._objects = objects
        self.per_object = work.blocks_per_chunk
        self._pages = torch.tensor([c.data_ptr() for c in work.caches], dtype=torch.int64).to(
            device
        )
        self._ids = torch.empty(len(work.ids), dtype=torch.int64, device=device)
        self._addresses = [one.data_ptr() for one in objects]
        direction = ops.TransferDirection.D2H if work.gathers else ops.TransferDirection.H2D
        self._call: Callable[..., None] = ops.multi_layer_block_kv_transfer
        self._behind = (
            *(device, direction, shape, work.trial.chunk_tokens),
            getattr(ops.EngineKVFormat, format_name),
            0,
        )

    def __call__(self, ids: list[int]) -> None:
        """The first ``len(ids) / blocks an object`` objects and the blocks ``ids``."""
        for first, some in self.batches(ids):
            self.launch(first, some)

    def batches(self, ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The ids on the device, uploaded at once, and then as (first object, ids) of a launch."""
        here = torch.frombuffer(array("q", ids), dtype=torch.int64)
        there = self._ids[: len(ids)]
        there.copy_(here, non_blocking=True)
        for number, some in enumerate(there.split(OBJECTS_A_LAUNCH * self.per_object)):
            yield number * OBJECTS_A_LAUNCH, some

    def launch(self, first: int, ids: torch.Tensor) -> None:
        """Queue the objects from number ``first`` on that these blocks make."""
        objects = self._addresses[first : first + len(ids) // self.per_object]
        self._call(self._pages, objects, ids, *self._behind)


def launcher_for(work: Workload, objects: torch.Tensor) -> Launcher:
    """What moves ``objects`` for this workload.

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
    return Launcher(work, objects, ops, name)


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
