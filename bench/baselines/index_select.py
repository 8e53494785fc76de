"""What a few lines of torch do: pick the blocks layer by layer, then put them where they belong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Baseline

if TYPE_CHECKING:
    from bench.workload import Workload


def prepare(work: Workload) -> Baseline:
    layers = [(view, work.chunk_view(layer)) for layer, view in enumerate(work.views)]
    chunks = len(work.ids) // work.blocks_per_chunk

    def gather() -> None:
        ids = work.id_tensor()
        for view, chunk in layers:
            picked = view.index_select(1, ids).unflatten(1, (chunks, work.blocks_per_chunk))
            chunk.copy_(picked.transpose(0, 1))

    def scatter() -> None:
        ids = work.id_tensor()
        for view, chunk in layers:
            view.index_copy_(1, ids, chunk.transpose(0, 1).flatten(1, 2))

    return Baseline(
        run=gather if work.gathers else scatter,
        moved=work.moved,
        poison=work.poison,
        is_exact=work.is_exact,
    )
