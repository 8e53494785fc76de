"""Paged caches of every layout for tests, hostile by default, and an oracle that shares no code with
the library: it indexes the tensors the way an engine does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

POISON = 0xA5


@dataclass(frozen=True)
class Layout:
    """``axes`` as the tensor's shape has them; ``physical`` the order in memory, slowest first."""

    name: str
    axes: str
    physical: str = ""
    fused: bool = False  # K and V side by side in dim
    latent: bool = False  # no heads, no K/V
    pad: dict[str, int] = field(default_factory=dict, hash=False)  # extra extent behind an axis


LAYOUTS = [
    Layout("kv_first_nhd", "kv block token head dim"),
    Layout("block_first_nhd", "block kv token head dim"),
    Layout("kv_first_hnd", "kv block head token dim"),
    Layout("block_first_hnd", "block kv head token dim"),
    Layout("fused_nhd", "block token head dim", fused=True),
    Layout("fused_hnd", "block head token dim", fused=True),
    Layout("fused_view_of_nhd", "block head token dim", "block token head dim", fused=True),
    Layout("latent", "block token dim", latent=True),
    Layout("cross_layer", "block layer kv token head dim"),
    Layout("padded_blocks", "kv block token head dim", pad={"block": 3, "kv": 1}),
    Layout("sliced_heads", "block token head dim", fused=True, pad={"head": 2, "token": 1}),
    Layout("padded_dim", "kv block token head dim", pad={"dim": 4}),
]
BY_NAME = {layout.name: layout for layout in LAYOUTS}


@dataclass
class Cache:
    """Tensors of one cache with all memory around them poisoned."""

    layout: Layout
    tensors: list[torch.Tensor]
    storages: list[torch.Tensor]  # uint8, whole

    @property
    def axes(self) -> str:
        return self.layout.axes

    def fill_random(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for storage in self.storages:
            storage.copy_(
                torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=generator)
            )

    def fill(self, value: int) -> None:
        for storage in self.storages:
            storage.fill_(value)

    def snapshot(self) -> list[torch.Tensor]:
        return [storage.cpu().clone() for storage in self.storages]


def make_cache(
    layout: Layout,
    *,
    layers: int = 2,
    blocks: int = 7,
    tokens: int = 4,
    heads: int = 3,
    dim: int = 8,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    shift: int = 0,
) -> Cache:
    """``shift``: bytes by which every base is moved off its natural alignment (a whole number of
    elements)."""
    element = torch.empty(0, dtype=dtype).element_size()
    extent = {
        "block": blocks,
        "token": tokens,
        "head": heads,
        "dim": dim * (2 if layout.fused else 1),
        "kv": 2,
        "layer": layers,
    }
    axes = layout.axes.split()
    order = (layout.physical or layout.axes).split()
    stride, step = {}, 1
    for axis in reversed(order):
        stride[axis] = step
        step *= extent[axis] + layout.pad.get(axis, 0)
    lead = 64 // element + shift // element  # poison in front
    tensors, storages = [], []
    for _ in range(1 if "layer" in axes else layers):
        storage = torch.full(((lead + step) * element + 128,), POISON, dtype=torch.uint8).to(device)
        typed = storage[: (lead + step) * element].view(dtype)
        tensors.append(typed.as_strided([extent[a] for a in axes], [stride[a] for a in axes], lead))
        storages.append(storage)
    return Cache(layout, tensors, storages)


def run_bytes(cache: Cache, layer: int, kv: int, block: int, token: int, head: int) -> torch.Tensor:
    """The uint8 view of one (layer, kv, token, head) run, found by indexing as an engine would."""
    axes = cache.axes.split()
    index = {"layer": layer, "kv": kv, "block": block, "token": token, "head": head}
    tensor = cache.tensors[0 if "layer" in axes else layer]
    for position in range(len(axes) - 2, -1, -1):
        tensor = tensor.select(position, index[axes[position]])
    return tensor.view(torch.uint8)


def row_count(cache: Cache) -> tuple[int, int]:
    axes = cache.axes.split()
    layers = cache.tensors[0].shape[axes.index("layer")] if "layer" in axes else len(cache.tensors)
    return layers, 2 if "kv" in axes else 1


def oracle_chunk(cache: Cache, ids: list[int]) -> torch.Tensor:
    """Bytes of the canonical chunk of these blocks: layer, kv, token, head."""
    axes = cache.axes.split()
    layers, kvs = row_count(cache)
    shape = cache.tensors[0].shape
    tokens = shape[axes.index("token")]
    heads = shape[axes.index("head")] if "head" in axes else 1
    runs = [
        run_bytes(cache, layer, kv, block, token, head).cpu()
        for layer, kv, block, token, head in itertools.product(
            range(layers), range(kvs), ids, range(tokens), range(heads)
        )
    ]
    return torch.cat(runs)


def untouched_outside(cache: Cache, before: list[torch.Tensor], ids: list[int]) -> bool:
    """True when only bytes of the blocks ``ids`` differ from the snapshot."""
    layers, kvs = row_count(cache)
    axes = cache.axes.split()
    shape = cache.tensors[0].shape
    tokens = shape[axes.index("token")]
    heads = shape[axes.index("head")] if "head" in axes else 1
    after = cache.snapshot()
    for block, layer, kv, token, head in itertools.product(
        ids, range(layers), range(kvs), range(tokens), range(heads)
    ):
        which = 0 if "layer" in axes else layer
        run = run_bytes(cache, layer, kv, block, token, head)
        start = run.data_ptr() - cache.storages[which].data_ptr()
        after[which][start : start + run.numel()] = before[which][start : start + run.numel()]
    return all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def poisoned_bytes(
    nbytes: int, device: str, lead: int = 64, tail: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole, inner): a buffer of poison and the view of its middle."""
    whole = torch.full((lead + nbytes + tail,), POISON, dtype=torch.uint8).to(device)
    return whole, whole[lead : lead + nbytes]
