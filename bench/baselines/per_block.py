"""One copy call for each block of each row: what the first offloading connectors did.

A call costs microseconds on the host, so only a few blocks are moved; the rate is of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Baseline

if TYPE_CHECKING:
    from bench.workload import Workload

MAX_CALLS = 512


def prepare(work: Workload) -> Baseline:
    blocks = min(len(work.ids), max(1, MAX_CALLS // work.pool.rows))
    pairs = []
    for layer, view in enumerate(work.views):
        chunk = work.chunk_view(layer)
        for kv in range(view.shape[0]):
            for position, block in enumerate(work.ids[:blocks]):
                outer, inner = divmod(position, work.blocks_per_chunk)
                pair = (chunk[outer, kv, inner], view[kv, block])
                pairs.append(pair if work.gathers else pair[::-1])

    def run() -> None:
        for dst, src in pairs:
            dst.copy_(src, non_blocking=True)

    return Baseline(
        run=run,
        moved=blocks * work.trial.case.block_bytes,
        poison=work.poison,
        is_exact=lambda: work.is_exact(blocks),
    )
