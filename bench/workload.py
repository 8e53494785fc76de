"""A trial made ready on a device: an engine's cache, chunks of it, ids, and what must come out.

What must come out is found with torch's own indexing, which shares no code with the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.plane import coalesce
from lmcache_kernels.views import group_of

from .trials import CHUNK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lmcache_kernels.plane import Plane

    from .trials import Trial

POISON = 0xA5


@dataclass(frozen=True)
class Workload:
    """Attributes:
    views: per layer, the cache as [kv, block, token, head, dim].
    chunk: the chunks one behind the other, uint8.
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
        return CHUNK_TOKENS // self.trial.case.block_tokens

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
        kv, _, tokens, heads, dim = self.views[0].shape
        whole = self.chunk.view(self.views[0].dtype)
        return whole.view(-1, len(self.views), kv, self.blocks_per_chunk, tokens, heads, dim)[
            :, layer
        ]

    def poison(self) -> None:
        """Spoil whatever a copy is to write."""
        for tensor in [self.chunk] if self.gathers else self.caches:
            tensor.view(torch.uint8).fill_(POISON)

    def is_exact(
        self, blocks: int | None = None, chunk_view: Callable[[int], torch.Tensor] | None = None
    ) -> bool:
        """Do the chunks hold the blocks ``ids``, or the first of them, in every layer?

        ``chunk_view`` finds a layer in other chunks than this workload's own.
        """
        count = len(self.ids) if blocks is None else blocks
        where = self.id_tensor()[:count]
        for layer, view in enumerate(self.views):
            in_chunks = (chunk_view or self.chunk_view)(layer).transpose(0, 1).flatten(1, 2)
            if not torch.equal(in_chunks[:, :count], view.index_select(1, where)):
                return False
        return True

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


def set_up(trial: Trial, device: str) -> Workload:
    """Allocate and describe both sides; every block of the cache is named once."""
    case = trial.case
    per_chunk = CHUNK_TOKENS // case.block_tokens
    blocks = case.blocks_for(trial.nbytes, per_chunk)
    caches = case.tensors(blocks, device)
    group = group_of(caches, case.axes)
    layout = ChunkLayout.of([group], CHUNK_TOKENS)
    count = blocks // per_chunk
    chunk = torch.randint(0, 256, (count * layout.nbytes,), dtype=torch.uint8, device=device)
    ((chunks,),) = layout.planes_at(chunk.data_ptr(), group.device, chunks=count)
    order = list(range(blocks))
    if trial.ids == "random":
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()
    return Workload(
        trial=trial,
        device=device,
        caches=caches,
        views=case.layer_views(caches),
        chunk=chunk,
        pool=group.planes[0],
        chunks=chunks,
        ids=order,
    )
