"""Caches as engines allocate them, hostile by default, and an oracle that finds their bytes by the
engine's own indexing and shares no code with the library. The rows stand in ``layout_table``."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from cachekit import POISON

import lmcache_kernels.views

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_kernels import CacheGroup

SIZES = {"L": 2, "NB": 7, "BS": 4, "NH": 3, "HS": 16}
"""Layers, blocks, tokens a block, heads, elements of a head."""

CHUNK_ALIGN = 512
"""Where the planes of a chunk start."""


@dataclass(frozen=True)
class Part:
    """What becomes one plane.

    ``at(c, i, k, b, t, h)`` is how the engine indexes its caches ``c`` by layer, K or V, block, token
    and head: a view of the elements, in the order that a chunk has them.
    """

    at: Callable[..., torch.Tensor]
    kv: int = 1
    heads: str = "1"
    tokens: str = "BS"
    layers: str = "L"


@dataclass(frozen=True)
class Row:
    """One layout.

    Attributes:
        name: the engine, and which of its caches.
        what: lists and shape, such as ``L x [NB, BS, HS]``; the innermost list may be a tuple of
            several shapes.
        call: how a user describes ``caches``.
        parts: its planes.
        memory: the axes in the order of memory, slowest first, where that is not the shape's.
        solid: axes behind which no padding may lie.
        dtypes: of each shape.
        sizes: what :data:`SIZES` does not say, or says otherwise.
    """

    name: str
    what: str
    call: str
    parts: tuple[Part, ...]
    memory: str = ""
    solid: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float16,)
    sizes: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def line(self) -> str:
        """The row as ``docs/layouts.md`` has it; a bar would end a cell of its table."""
        call = self.call.replace("|", r"\|")
        memory = f", in memory [{self.memory}]" if self.memory else ""
        return f"| {self.name} | `{self.what}`{memory} | `{call}` |"


@dataclass
class Caches:
    """The tensors of one engine with all memory around them poisoned."""

    row: Row
    sizes: dict[str, int]
    pad: int
    tensors: Any  # in lists, as the row has them
    storages: list[torch.Tensor]  # uint8, whole

    def group(self) -> CacheGroup:
        """What the row's call makes of the tensors."""
        names = {**vars(lmcache_kernels), **vars(lmcache_kernels.views), **self.sizes}
        names["caches"] = self.tensors
        return eval(self.row.call, names)

    def fill_random(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for storage in self.storages:
            storage.copy_(
                torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=generator)
            )

    def on_host(self) -> Caches:
        """An equal copy in host memory."""
        twin = make_caches(self.row, blocks=self.sizes["NB"], pad=self.pad)
        for here, there in zip(twin.storages, self.storages, strict=True):
            here.copy_(there)
        return twin


def make_caches(
    row: Row, *, blocks: int = SIZES["NB"], pad: int = 1, device: str = "cpu"
) -> Caches:
    """``pad``: extent of the poison behind every axis that may have some."""
    sizes = {**SIZES, **row.sizes, "NB": blocks}
    *lists, innermost = row.what.split(" x ")
    shapes = [shape.split(", ") for shape in re.findall(r"\[(.*?)\]", innermost)]
    storages: list[torch.Tensor] = []

    def leaf() -> Any:
        tensors = []
        for shape, dtype in zip(shapes, itertools.cycle(row.dtypes), strict=False):
            tensor, storage = _allocate(row, shape, sizes, pad, dtype, device)
            tensors.append(tensor)
            storages.append(storage)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def nest(extents: list[str]) -> Any:
        return [nest(extents[1:]) for _ in range(sizes.get(extents[0], 2))] if extents else leaf()

    return Caches(row, sizes, pad, nest(lists), storages)


def _allocate(
    row: Row, shape: list[str], sizes: dict[str, int], pad: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    extent = [extent_of(axis, sizes) for axis in shape]
    memory = row.memory.split(", ") if row.memory else shape
    stride, step = [0] * len(shape), 1
    for axis in reversed(memory):
        position = shape.index(axis)
        stride[position] = step
        step *= extent[position] + (0 if axis in row.solid else pad)
    lead = 64 // dtype.itemsize
    storage = torch.full(((lead + step) * dtype.itemsize,), POISON, dtype=torch.uint8).to(device)
    return storage.view(dtype).as_strided(extent, stride, lead), storage


def extent_of(axis: str, sizes: dict[str, int]) -> int:
    """``"NH*HS"`` in numbers."""
    return int(eval(axis, {}, sizes))


def runs(caches: Caches, part: Part, ids: list[int]) -> list[torch.Tensor]:
    """The elements of these blocks in the order of a chunk: layer, K or V, token, head."""
    return [
        part.at(caches.tensors, layer, kv, block, token, head)
        for layer, kv, block, token, head in itertools.product(
            range(extent_of(part.layers, caches.sizes)),
            range(part.kv),
            ids,
            range(extent_of(part.tokens, caches.sizes)),
            range(extent_of(part.heads, caches.sizes)),
        )
    ]


def expected_chunk(caches: Caches, ids: list[int]) -> torch.Tensor:
    """Bytes of the canonical chunk of these blocks; poison between its planes."""
    planes: list[torch.Tensor] = []
    for part in caches.row.parts:
        gap = -sum(plane.numel() for plane in planes) % CHUNK_ALIGN
        planes.append(torch.full((gap,), POISON, dtype=torch.uint8))
        planes += [run.contiguous().view(-1).view(torch.uint8) for run in runs(caches, part, ids)]
    return torch.cat(planes)


def write_blocks(target: Caches, to: list[int], source: Caches, ids: list[int]) -> None:
    """What a scatter should do, by indexing alone."""
    for part in target.row.parts:
        for there, here in zip(runs(target, part, to), runs(source, part, ids), strict=True):
            there.copy_(here)
