"""A trial made ready on a device: an engine's cache, chunks of it, ids, and what must come out.

Chunks lie on the device one behind the other, or wherever a ``Memory`` puts them. What must come
out is found with torch's own indexing, which shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.plane import coalesce
from lmcache_kernels.views import group_of

from .trials import DIRECTIONS, Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lmcache_kernels.plane import Plane

    from .cases import Case

POISON = 0xA5

Memory: TypeAlias = Callable[[int, int], torch.Tensor]
"""Given a number of chunks and the bytes of one: their payloads, uint8 [chunk, byte], random. Rows may
lie apart."""


@dataclass(frozen=True)
class Workload:
    """Attributes:
    views: per layer, the cache as [kv, block, token, head, dim].
    chunk: the chunks, uint8 [chunk, byte]; rows may lie apart, and in host memory.
    pool, chunks: the two sides as planes; block ``i`` of ``chunks`` pairs with ``ids[i]``.
    """

    trial: Trial
    device: str
    caches: list[torch.Tensor]
    views: list[torch.Tensor]
    chunk: torch.Tensor
    pool: Plane
    chunks: Plane
    ids: list[int]

    @property
    def gathers(self) -> bool:
        return self.trial.direction == "gather"

    @property
    def dst(self) -> Plane:
        return self.chunks if self.gathers else self.pool

    @property
    def src(self) -> Plane:
        return self.pool if self.gathers else self.chunks

    @property
    def dst_ids(self) -> Sequence[int]:
        return range(len(self.ids)) if self.gathers else self.ids

    @property
    def src_ids(self) -> Sequence[int]:
        return self.ids if self.gathers else range(len(self.ids))

    @property
    def moved(self) -> int:
        return len(self.ids) * self.trial.case.block_bytes

    @property
    def blocks_per_chunk(self) -> int:
        return self.trial.chunk_tokens // self.trial.case.block_tokens

    @cached_property
    def run_bytes(self) -> int:
        """What lies dense in one piece on both sides."""
        return coalesce(self.dst, self.src)[0].width

    def id_tensor(self) -> torch.Tensor:
        """The ids on the device, uploaded now."""
        here = torch.tensor(self.ids, pin_memory=self.device != "cpu")
        return here.to(self.device, non_blocking=True)

    def chunk_view(self, layer: int) -> torch.Tensor:
        """One layer of the chunks as [chunk, kv, block, token, head, dim]."""
        return self.layer_of(self.chunk, layer)

    def layer_of(self, chunk: torch.Tensor, layer: int) -> torch.Tensor:
        """The same of other chunks in the library's own order, uint8 [chunk, byte]."""
        kv, _, tokens, heads, dim = self.views[0].shape
        shape = (len(chunk), len(self.views), kv, self.blocks_per_chunk, tokens, heads, dim)
        return chunk.view(self.views[0].dtype).view(shape)[:, layer]

    def poison(self) -> None:
        """Spoil whatever a copy is to write."""
        for tensor in [self.chunk] if self.gathers else self.caches:
            tensor.view(torch.uint8).fill_(POISON)

    def is_exact(
        self,
        blocks: int | None = None,
        chunk: torch.Tensor | None = None,
        layer_of: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    ) -> bool:
        """Do the chunks hold the blocks ``ids``, or the first of them, in every layer?

        Asked about other chunks than this workload's own, and about chunks in another order, if
        ``layer_of`` finds a layer in them.
        """
        count = len(self.ids) if blocks is None else blocks
        where = self.id_tensor()[:count]
        here = self._on_device(self.chunk if chunk is None else chunk)
        for layer, view in enumerate(self.views):
            in_chunks = (layer_of or self.layer_of)(here, layer).transpose(0, 1).flatten(1, 2)
            if not torch.equal(in_chunks[:, :count], view.index_select(1, where)):
                return False
        return True

    def _on_device(self, chunk: torch.Tensor) -> torch.Tensor:
        device = self.views[0].device
        return chunk if chunk.device == device else torch.stack([row.to(device) for row in chunk])

    def runs(self, blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """(destination addresses, source addresses, bytes of each) of the first ``blocks`` blocks."""
        dst, src = coalesce(self.dst, self.src)
        return (
            _addresses(dst, self.dst_ids[:blocks]),
            _addresses(src, self.src_ids[:blocks]),
            dst.width,
        )


def _addresses(plane: Plane, ids: Sequence[int]) -> NDArray[np.int64]:
    """Of every run: row, id, token, head."""
    offsets = np.array([plane.block_offset(block) for block in ids], dtype=np.int64)
    tokens = np.arange(plane.block_tokens, dtype=np.int64) * plane.token_stride
    heads = np.arange(plane.num_heads, dtype=np.int64) * plane.head_stride
    inside = (tokens[:, None] + heads).ravel()
    bases = np.array(plane.bases, dtype=np.int64)
    grid: NDArray[np.int64] = (bases[:, None, None] + offsets[:, None] + inside).ravel()
    return grid


def set_up(trial: Trial, device: str, memory: Memory | None = None) -> Workload:
    """Allocate and describe both sides; every block of the cache is named once."""
    blocks = trial.case.blocks_for(trial.nbytes, trial.chunk_tokens // trial.case.block_tokens)
    order = list(range(blocks))
    if trial.ids == "random":
        order = _shuffled(blocks)
    return over(trial, device, trial.case.tensors(blocks, device), order, memory)


def set_up_both(
    case: Case, nbytes: int, device: str, memory: Memory | None = None
) -> tuple[Workload, Workload]:
    """Gather and scatter of at least ``nbytes`` each, in the halves of one cache."""
    gather, scatter = (Trial(case, direction, nbytes) for direction in DIRECTIONS)
    blocks = case.blocks_for(nbytes, gather.chunk_tokens // case.block_tokens)
    caches, order = case.tensors(2 * blocks, device), _shuffled(2 * blocks)
    return (
        over(gather, device, caches, order[:blocks], memory),
        over(scatter, device, caches, order[blocks:], memory),
    )


def over(
    trial: Trial,
    device: str,
    caches: list[torch.Tensor],
    ids: list[int],
    memory: Memory | None = None,
) -> Workload:
    """Those blocks of a cache that is there, with chunks of their own."""
    group = group_of(caches, trial.case.axes)
    layout = ChunkLayout.of([group], trial.chunk_tokens)
    (per_chunk,) = layout.blocks_per_chunk
    chunk = (memory or partial(_on, device))(len(ids) // per_chunk, layout.nbytes)
    ((chunks,),) = layout.planes_at(
        chunk.data_ptr(), group.device, chunks=len(chunk), stride=chunk.stride(0)
    )
    return Workload(
        trial=trial,
        device=device,
        caches=caches,
        views=trial.case.layer_views(caches),
        chunk=chunk,
        pool=group.planes[0],
        chunks=chunks,
        ids=ids,
    )


def _on(device: str, chunks: int, nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (chunks, nbytes), dtype=torch.uint8, device=device)


def _shuffled(blocks: int) -> list[int]:
    order: list[int] = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()
    return order
