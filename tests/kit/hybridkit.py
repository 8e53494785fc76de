"""Small caches of hybrid models: windows, recurrent states, interleaved layers."""

from __future__ import annotations

import torch

from lmcache_kernels.transfer.kv_groups import KVGroup

BLOCKS = 24


def attention(layers, device, *, heads, dim, tokens=4):
    shape = (2, BLOCKS, tokens, heads, dim)
    return [torch.randn(shape, dtype=torch.float16, device=device) for _ in range(layers)]


def states(layers, device):
    return [
        [
            torch.randn(BLOCKS, 3, 24, dtype=torch.float16, device=device),
            torch.randn(BLOCKS, 2, 4, 8, device=device),
        ]
        for _ in range(layers)
    ]


def gemma(device="cpu"):
    """One layer with full attention after two with a window, of other heads.

    Caches by group and layer, the groups, and when the engine needs each layer of each group.
    """
    window = attention(4, device, heads=1, dim=8)
    full = attention(2, device, heads=2, dim=16)
    groups = [KVGroup.of(one, "kv block token head dim") for one in (window, full)]
    return [window, full], groups, [[0, 1, 3, 4], [2, 5]]


def qwen3_next(device="cpu", tokens=16):
    """One layer with attention after three with states; a block of either has as many tokens."""
    state, full = states(3, device), attention(1, device, heads=1, dim=16, tokens=tokens)
    groups = [
        KVGroup.of_pages(state, tokens, "gdn conv=3x24 temporal=2x4x8"),
        KVGroup.of(full, "kv block token head dim"),
    ]
    return [state, full], groups, [[0, 1, 2], [3]]


def block_bytes(caches, group, layer, block):
    """What a block of a layer holds."""
    cache = caches[group][layer]
    parts = cache if isinstance(cache, list) else [cache.movedim(0, 1)]
    return b"".join(part[block].contiguous().cpu().numpy().tobytes() for part in parts)
