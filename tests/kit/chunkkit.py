"""Chunks in poisoned memory, and caches of a hybrid model to fill them from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from cachekit import BY_NAME, POISON, make_cache
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from lmcache_kernels.chunk_layout import ChunkLayout

FULL = settings.get_current_profile_name() == "full"


def examples(usual: int, full: int = 10_000) -> settings:
    return settings(
        max_examples=full if FULL else usual,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


many_examples = examples(300)
# Nearly every plan is compiled anew where there is a GPU.
many_plans = examples(60 if torch.cuda.is_available() else 300)


def chunk_memory(layout: ChunkLayout, chunks: int, device: str, gap: int = 512):
    """(memory, planes of each group, stride): chunks with poison around and between them."""
    stride = layout.nbytes + gap
    memory = torch.full((gap + chunks * stride,), POISON, dtype=torch.uint8).to(device)
    planes = layout.planes_at(memory.data_ptr() + gap, device, chunks=chunks, stride=stride)
    return memory, planes, stride


def payload(memory: torch.Tensor, layout: ChunkLayout, chunk: int, gap: int = 512) -> bytes:
    start = gap + chunk * (layout.nbytes + gap)
    return memory[start : start + layout.nbytes].cpu().numpy().tobytes()


def hybrid(device, seed):
    """Caches of two groups: other heads, other widths, other block tables."""
    caches = [
        make_cache(BY_NAME["kv_first_hnd"], blocks=7, heads=3, dim=8, device=device),
        make_cache(BY_NAME["latent"], layers=3, blocks=9, dim=40, device=device),
    ]
    for index, cache in enumerate(caches):
        cache.fill_random(seed + index)
    return caches


def without_gaps(data: bytes, layout: ChunkLayout) -> bytes:
    """Padding between planes counts as zero; the test's memory holds poison there."""
    clean = bytearray(len(data))
    for planes in layout.groups:
        for plane in planes:
            size = plane.rows * plane.num_blocks * plane.block_bytes
            clean[plane.bases[0] : plane.bases[0] + size] = data[plane.bases[0] :][:size]
    return bytes(clean)
