"""What is measured: KV caches of real models in the layouts of real engines."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

_DTYPES = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True)
class Model:
    """The cache of one rank. ``dim`` is elements of K (or V) of a head, or of a latent vector."""

    name: str
    layers: int
    heads: int
    dim: int
    block_tokens: int = 16
    element_bytes: int = 2


@dataclass(frozen=True)
class Layout:
    """``axes`` as the shape of a tensor has them; ``physical`` the order in memory, slowest first."""

    name: str
    axes: str
    physical: str = ""
    fused: bool = False  # K and V of a head side by side in dim


KV_FIRST = Layout("[2,B,N,H,D]", "kv block token head dim")
BLOCK_FIRST = Layout("[B,2,N,H,D]", "block kv token head dim")
KV_FIRST_HND = Layout("[2,B,H,N,D]", "kv block head token dim")
BLOCK_FIRST_HND = Layout("[B,2,H,N,D]", "block kv head token dim")
FUSED_NHD = Layout("[B,N,H,2D]", "block token head dim", fused=True)
FUSED_HND = Layout("[B,H,N,2D]", "block head token dim", fused=True)
FUSED_VIEW = Layout(
    "[B,H,N,2D] stored NHD", "block head token dim", "block token head dim", fused=True
)
LATENT = Layout("[B,N,D]", "block token dim")
CROSS_LAYER = Layout("[B,L,2,N,H,D]", "block layer kv token head dim")

LAYOUTS = (
    *(KV_FIRST, BLOCK_FIRST, KV_FIRST_HND, BLOCK_FIRST_HND),
    *(FUSED_NHD, FUSED_HND, FUSED_VIEW, LATENT, CROSS_LAYER),
)

LLAMA_8B = Model("Llama-3-8B", 32, 8, 128)
LLAMA_70B_TP4 = Model("Llama-3-70B TP4", 80, 2, 128)
LLAMA_70B_TP8 = Model("Llama-3-70B TP8", 80, 1, 128)
GPT_OSS = Model("gpt-oss-120b", 36, 8, 64)
MLA_64 = Model("DeepSeek-V3 MLA 64", 61, 1, 576, block_tokens=64)
MLA_16 = Model("DeepSeek-V3 MLA 16", 61, 1, 576)
FP8_DS_MLA = Model("DeepSeek-V3.2 fp8_ds_mla", 61, 1, 656, block_tokens=64, element_bytes=1)


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    model: Model
    layout: Layout

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.layout.name}"

    @property
    def axes(self) -> str:
        return self.layout.axes

    @property
    def block_tokens(self) -> int:
        return self.model.block_tokens

    @property
    def kv_size(self) -> int:
        return 2 if "kv" in self.axes.split() else 1

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        extents = self._extents(1)
        return (
            self.model.layers
            * self.kv_size
            * self.model.element_bytes
            * (extents["token"] * extents["head"] * extents["dim"])
        )

    def blocks_for(self, nbytes: int, per_chunk: int = 1) -> int:
        """Fewest blocks of at least ``nbytes``, a multiple of ``per_chunk``."""
        needed = -(-nbytes // self.block_bytes)
        return -(-needed // per_chunk) * per_chunk

    def tensors(self, blocks: int, device: str) -> list[torch.Tensor]:
        """Random bytes: a tensor for each layer, or one for all of them."""
        extents = self._extents(blocks)
        axes = self.axes.split()
        stored = (self.layout.physical or self.axes).split()
        shape = [extents[axis] for axis in stored]
        count = 1 if "layer" in axes else self.model.layers
        nbytes = prod(shape) * self.model.element_bytes
        return [
            torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
            .view(_DTYPES[self.model.element_bytes])
            .view(shape)
            .permute([stored.index(axis) for axis in axes])
            for _ in range(count)
        ]

    def layer_views(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Per layer, the same memory as [kv, block, token, head, dim]."""
        axes = self.axes.split()
        if "layer" in axes:
            tensors = list(tensors[0].unbind(axes.index("layer")))
            axes.remove("layer")
        views = []
        for tensor in tensors:
            there = [axis for axis in ("kv", "block", "token", "head", "dim") if axis in axes]
            view = tensor.permute([axes.index(axis) for axis in there])
            for position, axis in enumerate(("kv", "block", "token", "head")):
                if axis not in axes:
                    view = view.unsqueeze(position)
            views.append(view)
        return views

    def _extents(self, blocks: int) -> dict[str, int]:
        return {
            "layer": self.model.layers,
            "kv": 2,
            "block": blocks,
            "token": self.model.block_tokens,
            "head": self.model.heads,
            "dim": self.model.dim * (2 if self.layout.fused else 1),
        }


CASES = (
    *(Case(LLAMA_8B, layout) for layout in (KV_FIRST, BLOCK_FIRST, KV_FIRST_HND, BLOCK_FIRST_HND)),
    *(Case(LLAMA_8B, layout) for layout in (FUSED_NHD, FUSED_HND, FUSED_VIEW, CROSS_LAYER)),
    Case(LLAMA_70B_TP4, KV_FIRST),
    Case(LLAMA_70B_TP8, KV_FIRST),
    Case(GPT_OSS, KV_FIRST),
    Case(MLA_64, LATENT),
    Case(MLA_16, LATENT),
    Case(FP8_DS_MLA, LATENT),
)
