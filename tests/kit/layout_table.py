"""The layouts of real engines. ``docs/layouts.md`` shows each row, and the call that stands there is
the one that is tested.

L layers, NB blocks, BS tokens a block, NH heads of a rank, HS elements of a head; ``2`` is K and V.
``c[...]`` is how the engine itself indexes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from layoutkit import SIZES, Part, Row

if TYPE_CHECKING:
    from collections.abc import Callable

BS, NH, HS = (SIZES[name] for name in ("BS", "NH", "HS"))


def split(at: Callable[..., torch.Tensor]) -> tuple[Part, ...]:
    """K and V apart."""
    return (Part(at, kv=2, heads="NH"),)


def fused(at: Callable[..., torch.Tensor]) -> tuple[Part, ...]:
    """One entry for each head: K and V side by side in it, or one of the two only."""
    return (Part(at, heads="NH"),)


def latent(*ats: Callable[..., torch.Tensor]) -> tuple[Part, ...]:
    """One entry for each token, in one plane or several."""
    return tuple(Part(at) for at in ats)


def whole(*ats: Callable[..., torch.Tensor]) -> tuple[Part, ...]:
    """One entry for each block."""
    return tuple(Part(at, tokens="1") for at in ats)


def pool(name: str, memory: str) -> Row:
    """One of the orders in memory that vLLM gives one logical shape."""
    return Row(
        f"vLLM {name}",
        "[L, NB, NH, BS, 2*HS]",
        'group_of(caches, "layer block head token dim")',
        fused(lambda c, i, k, b, t, h: c[i, b, h, t]),
        memory=memory,
    )


def blocked(c: torch.Tensor, block: int, skip: int, width: int, token: int) -> torch.Tensor:
    """Token ``token`` of the array that begins ``skip`` bytes into a page."""
    return c[block].view(-1)[skip + token * width :][:width]


VLLM = [
    Row(
        "vLLM >= 0.29, HND",
        "L x [NB, NH, BS, 2*HS]",
        'group_of(caches, "block head token dim")',
        fused(lambda c, i, k, b, t, h: c[i][b, h, t]),
    ),
    Row(
        "vLLM >= 0.29, NHD",
        "L x [NB, NH, BS, 2*HS]",
        'group_of(caches, "block head token dim")',
        fused(lambda c, i, k, b, t, h: c[i][b, h, t]),
        memory="NB, BS, NH, 2*HS",
    ),
    pool("LBHNC", ""),
    pool("LBNHC", "L, NB, BS, NH, 2*HS"),
    pool("LHBNC", "L, NH, NB, BS, 2*HS"),
    pool("BLHNC", "NB, L, NH, BS, 2*HS"),
    pool("BLNHC", "NB, L, BS, NH, 2*HS"),
    pool("BHLNC", "NB, NH, L, BS, 2*HS"),
    Row(
        "vLLM, fused, NHD shape",
        "L x [NB, BS, NH, 2*HS]",
        'group_of(caches, "block token head dim")',
        fused(lambda c, i, k, b, t, h: c[i][b, t, h]),
    ),
    Row(
        "the same, K and V an axis, HND",
        "L x [NB, NH, BS, 2, HS]",
        'group_of(caches, "block head token dim dim")',
        fused(lambda c, i, k, b, t, h: c[i][b, h, t]),
        solid=("HS",),
    ),
    Row(
        "the same, K and V an axis, NHD",
        "L x [NB, BS, NH, 2, HS]",
        'group_of(caches, "block token head dim dim")',
        fused(lambda c, i, k, b, t, h: c[i][b, t, h]),
        solid=("HS",),
    ),
    Row(
        "vLLM <= 0.28 FlashAttention",
        "L x [2, NB, BS, NH, HS]",
        'group_of(caches, "kv block token head dim")',
        split(lambda c, i, k, b, t, h: c[i][k, b, t, h]),
    ),
    Row(
        "vLLM <= 0.28 FlashInfer, Triton",
        "L x [NB, 2, BS, NH, HS]",
        'group_of(caches, "block kv token head dim")',
        split(lambda c, i, k, b, t, h: c[i][b, k, t, h]),
    ),
    Row(
        "vLLM <= 0.28 FlashAttention, HND",
        "L x [2, NB, NH, BS, HS]",
        'group_of(caches, "kv block head token dim")',
        split(lambda c, i, k, b, t, h: c[i][k, b, h, t]),
    ),
    Row(
        "vLLM <= 0.28 FlashInfer, HND",
        "L x [NB, 2, NH, BS, HS]",
        'group_of(caches, "block kv head token dim")',
        split(lambda c, i, k, b, t, h: c[i][b, k, h, t]),
    ),
    Row(
        "vLLM <= 0.28, all layers",
        "[NB, L, 2, BS, NH, HS]",
        'group_of(caches, "block layer kv token head dim")',
        split(lambda c, i, k, b, t, h: c[b, i, k, t, h]),
    ),
    Row(
        "vLLM, FP8 cache",
        "L x [2, NB, BS, NH, HS]",
        'group_of(caches, "kv block token head dim")',
        split(lambda c, i, k, b, t, h: c[i][k, b, t, h]),
        dtypes=(torch.float8_e4m3fn,),
    ),
    Row(
        "vLLM, INT8 with scales for each token and head",
        "L x ([2, NB, BS, NH, HS], [2, NB, BS, NH, 1])",
        'group_of(caches, "layer plane | kv block token head dim")',
        (
            *split(lambda c, i, k, b, t, h: c[i][0][k, b, t, h]),
            *split(lambda c, i, k, b, t, h: c[i][1][k, b, t, h]),
        ),
        dtypes=(torch.int8, torch.float32),
    ),
    Row(
        "paged attention v1, ROCm",
        "L x ([NB, NH, HS/x, BS, x], [NB, NH, HS, BS])",
        'CacheGroup((plane_of([k for k, _ in caches], "block head head token dim"), '
        'plane_of([v for _, v in caches], "block head head token")), BS, "float16")',
        (
            *fused(lambda c, i, k, b, t, h: c[i][0][b, h, :, t]),
            *fused(lambda c, i, k, b, t, h: c[i][1][b, h, :, t]),
        ),
        solid=("HS/x", "HS"),
        sizes={"x": 8},
    ),
    Row(
        "blocks of r kernel pages",
        "L x [NB, r, NH, BS, HS]",
        'group_of(caches, "block block head token dim")',
        fused(lambda c, i, k, b, t, h: c[i][b // 3, b % 3, h, t]),
        sizes={"r": 3},
    ),
    Row(
        "layers of unequal heads",
        "([NB, BS, NH, HS], [NB, BS, NH, 2*HS])",
        'group_of(caches, "block token head dim")',
        (
            Part(lambda c, i, k, b, t, h: c[0][b, t, h], heads="NH", layers="1"),
            Part(lambda c, i, k, b, t, h: c[1][b, t, h], heads="NH", layers="1"),
        ),
    ),
    Row(
        "pages of vLLM's CPU attention",
        "L x [NB, NH, BS, 2*HS]",
        'opaque_group_of(caches, BS, "cpu_attn x86_64 amx heads=3 dim=16")',
        whole(lambda c, i, k, b, t, h: c[i][b].transpose(1, 2)),
        memory="NB, NH, 2*HS, BS",
        solid=("2*HS", "BS"),
    ),
]

LATENT = [
    Row(
        "vLLM MLA; SGLang MLA",
        "L x [NB, BS, HS]",
        'group_of(caches, "block token dim")',
        latent(lambda c, i, k, b, t, h: c[i][b, t]),
    ),
    Row(
        "MLA, rank 4",
        "L x [NB, BS, 1, HS]",
        'group_of(caches, "block token 1 dim")',
        latent(lambda c, i, k, b, t, h: c[i][b, t, 0]),
    ),
    Row(
        "vLLM >= 0.29 MLA",
        "L x [NB, 1, BS, HS]",
        'group_of(caches, "block head token dim")',
        latent(lambda c, i, k, b, t, h: c[i][b, 0, t]),
    ),
    Row(
        "fp8_ds_mla",
        "L x [NB, BS, 656]",
        'group_of(caches, "block token dim")',
        latent(lambda c, i, k, b, t, h: c[i][b, t]),
        dtypes=(torch.uint8,),
    ),
    Row(
        "nvfp4_ds_mla",
        "L x [NB, BS*352]",
        'opaque_group_of(caches, BS, "nvfp4_ds_mla")',
        whole(lambda c, i, k, b, t, h: c[i][b]),
        dtypes=(torch.uint8,),
    ),
    Row(
        "DSA indexer: [BS x 128] values, [BS x 4] scales",
        "L x [NB, BS, 132]",
        "blocked_group_of(caches, BS, (128, 4))",
        latent(
            lambda c, i, k, b, t, h: blocked(c[i], b, 0, 128, t),
            lambda c, i, k, b, t, h: blocked(c[i], b, BS * 128, 4, t),
        ),
        solid=("132",),
        dtypes=(torch.uint8,),
    ),
    Row(
        "DeepSeek-V4: [BS x 576], [BS x 8], padded to P bytes",
        "L x [NB, P]",
        "blocked_group_of(caches, BS, (576, 8))",
        latent(
            lambda c, i, k, b, t, h: blocked(c[i], b, 0, 576, t),
            lambda c, i, k, b, t, h: blocked(c[i], b, BS * 576, 8, t),
        ),
        dtypes=(torch.uint8,),
        sizes={"P": 2880},
    ),
    Row(
        "the same, one state for four tokens",
        "L x [NB, BS/4, 584]",
        "blocked_group_of(caches, BS, (576, 8), tokens_per_state=4)",
        (
            Part(lambda c, i, k, b, t, h: blocked(c[i], b, 0, 576, t), tokens="BS/4"),
            Part(lambda c, i, k, b, t, h: blocked(c[i], b, 2 * 576, 8, t), tokens="BS/4"),
        ),
        solid=("584",),
        dtypes=(torch.uint8,),
        sizes={"BS": 8},
    ),
    Row(
        "NVFP4 pages, scales tiled",
        "L x [NB, P]",
        'opaque_group_of(caches, BS, "nvfp4 heads=3 dim=16")',
        whole(lambda c, i, k, b, t, h: c[i][b]),
        dtypes=(torch.uint8,),
        sizes={"P": 432},
    ),
    Row(
        "Mamba: convolution and SSM states",
        "L x ([NB, 24, 3], [NB, 4, 8, 16])",
        'opaque_group_of(caches, BS, "mamba2 conv=24x3 ssm=4x8x16")',
        whole(lambda c, i, k, b, t, h: c[i][0][b], lambda c, i, k, b, t, h: c[i][1][b]),
        solid=("3", "8", "16"),
        dtypes=(torch.bfloat16, torch.float32),
    ),
    Row(
        "GDN, KDA: convolution and temporal states",
        "L x ([NB, 3, 24], [NB, 4, 16, 8])",
        'opaque_group_of(caches, BS, "gdn conv=3x24 temporal=4x16x8")',
        whole(lambda c, i, k, b, t, h: c[i][0][b], lambda c, i, k, b, t, h: c[i][1][b]),
        solid=("24", "16", "8"),
        dtypes=(torch.bfloat16, torch.bfloat16),
    ),
]

OTHERS = [
    Row(
        "SGLang MHA pool, page size 1",
        "2 x L x [NB, NH, HS]",
        'group_of(caches, "kv layer | block head dim")',
        (Part(lambda c, i, k, b, t, h: c[k][i][b, h], kv=2, heads="NH", tokens="1"),),
    ),
    Row(
        "SGLang MHA pool",
        "2 x L x [NB*BS, NH, HS]",
        'group_of(caches, "kv layer | (block token) head dim", token=BS)',
        split(lambda c, i, k, b, t, h: c[k][i][b * BS + t, h]),
    ),
    Row(
        "SGLang MHA, paged",
        "2 x L x [NB, BS, NH, HS]",
        'group_of(caches, "kv layer | block token head dim")',
        split(lambda c, i, k, b, t, h: c[k][i][b, t, h]),
    ),
    Row(
        "SGLang MLA pool",
        "L x [NB*BS, 1, HS]",
        'group_of(caches, "(block token) 1 dim", token=BS)',
        latent(lambda c, i, k, b, t, h: c[i][b * BS + t, 0]),
    ),
    Row(
        "SGLang unified",
        "L x [NB, BS, NH, HS]",
        'group_of(caches, "block token head dim")',
        fused(lambda c, i, k, b, t, h: c[i][b, t, h]),
    ),
    Row(
        "SGLang host, layer_first",
        "[2, L, NB*BS, NH, HS]",
        'group_of(caches, "kv layer (block token) head dim", token=BS)',
        split(lambda c, i, k, b, t, h: c[k, i, b * BS + t, h]),
    ),
    Row(
        "SGLang host, page_first",
        "[2, NB*BS, L, NH, HS]",
        'group_of(caches, "kv (block token) layer head dim", token=BS)',
        split(lambda c, i, k, b, t, h: c[k, b * BS + t, i, h]),
    ),
    Row(
        "SGLang host, page_head",
        "[2, NB, NH, BS, L, HS]",
        'group_of(caches, "kv block head token layer dim")',
        split(lambda c, i, k, b, t, h: c[k, b, h, t, i]),
    ),
    Row(
        "SGLang host, page_unified, heads in G groups",
        "[NB, G, L, 2, BS, NH, HS]",
        'group_of(caches, "block plane layer kv token head dim")',
        (
            *split(lambda c, i, k, b, t, h: c[b, 0, i, k, t, h]),
            *split(lambda c, i, k, b, t, h: c[b, 1, i, k, t, h]),
        ),
        sizes={"G": 2},
    ),
    Row(
        "TensorRT-LLM pool",
        "[NB, L, 2, NH*BS*HS]",
        'group_of(caches, "block layer kv (head token dim)", head=NH, token=BS)',
        split(lambda c, i, k, b, t, h: c[b, i, k].view(NH, BS, HS)[h, t]),
    ),
    Row(
        "TensorRT-LLM pool, unfolded",
        "[NB, L, 2, NH, BS, HS]",
        'group_of(caches, "block layer kv head token dim")',
        split(lambda c, i, k, b, t, h: c[b, i, k, h, t]),
    ),
    Row(
        "TPU, XPU: K and V are tensors",
        "L x 2 x [NB, BS, NH, HS]",
        'group_of(caches, "layer kv | block token head dim")',
        split(lambda c, i, k, b, t, h: c[i][k][b, t, h]),
    ),
    Row(
        "K and V of unequal heads",
        "L x ([NB, BS, NH, HS], [NB, BS, NH, 2*HS])",
        'group_of(caches, "layer kv | block token head dim")',
        (
            *fused(lambda c, i, k, b, t, h: c[i][0][b, t, h]),
            *fused(lambda c, i, k, b, t, h: c[i][1][b, t, h]),
        ),
    ),
    Row(
        "Ascend MLA, DSA",
        "L x ([NB, BS, 1, 64], [NB, BS, 1, 8], [NB, BS, 1, 16])",
        'group_of(caches, "layer plane | block token 1 dim")',
        latent(
            lambda c, i, k, b, t, h: c[i][0][b, t, 0],
            lambda c, i, k, b, t, h: c[i][1][b, t, 0],
            lambda c, i, k, b, t, h: c[i][2][b, t, 0],
        ),
    ),
    Row(
        "RBLN",
        "L x [2, NB, NH, 1, BS, HS]",
        'group_of(caches, "kv block head 1 token dim")',
        split(lambda c, i, k, b, t, h: c[i][k, b, h, 0, t]),
    ),
    Row(
        "Dynamo universal blocks",
        "[NB, NH, L, 2, BS, HS]",
        'group_of(caches, "block head layer kv token dim")',
        split(lambda c, i, k, b, t, h: c[b, h, i, k, t]),
    ),
    Row(
        "FlexKV LAYERFIRST",
        "[L, 2, NB, BS, NH, HS]",
        'group_of(caches, "layer kv block token head dim")',
        split(lambda c, i, k, b, t, h: c[i, k, b, t, h]),
    ),
    Row(
        "AIBrix LCND",
        "[NB, L, 2, BS, NH*HS]",
        'group_of(caches, "block layer kv token (head dim)", head=NH)',
        split(lambda c, i, k, b, t, h: c[b, i, k, t].view(NH, HS)[h]),
    ),
    Row(
        "AIBrix NCLD",
        "[NB, BS, 2, L, NH*HS]",
        'group_of(caches, "block token kv layer (head dim)", head=NH)',
        split(lambda c, i, k, b, t, h: c[b, t, k, i].view(NH, HS)[h]),
    ),
    Row(
        "LMCache object",
        "[2, L, NB*BS, NH*HS]",
        'group_of(caches, "kv layer (block token) (head dim)", token=BS, head=NH)',
        split(lambda c, i, k, b, t, h: c[k, i, b * BS + t].view(NH, HS)[h]),
    ),
]

ROWS = [*VLLM, *LATENT, *OTHERS]
