"""What is measured: KV caches of real models in the layouts of real engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Case:
    """One layout of one model: ``shape`` of a layer, "B" standing for the number of blocks.

    ``run_bytes``: what lies dense on both sides between the engine's pages and a chunk.
    """

    name: str
    axes: str
    shape: tuple[int | str, ...]
    layers: int
    run_bytes: int
    block_tokens: int = 16

    def blocks_for(self, nbytes: int, per_chunk: int = 1) -> int:
        """Fewest blocks of at least ``nbytes``, a multiple of ``per_chunk``."""
        needed = -(-nbytes // self.block_bytes)
        return -(-needed // per_chunk) * per_chunk

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        size = 2 * self.layers
        for extent in self.shape:
            size *= extent if isinstance(extent, int) else 1
        return size

    def tensors(self, blocks: int, device: str) -> list[torch.Tensor]:
        """One random tensor for each layer, of 2-byte elements."""
        shape = [blocks if extent == "B" else int(extent) for extent in self.shape]
        return list(self._random(shape, device))

    def _random(self, shape: list[int], device: str) -> Iterator[torch.Tensor]:
        for _ in range(self.layers):
            yield torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)


KV, BLOCK_KV = "kv block token head dim", "block kv token head dim"
CASES = (
    Case("Llama-3-8B [2,B,N,H,D]", KV, (2, "B", 16, 8, 128), 32, 32768),
    Case("Llama-3-8B [B,2,N,H,D]", BLOCK_KV, ("B", 2, 16, 8, 128), 32, 32768),
    Case("Llama-3-8B HND [2,B,H,N,D]", "kv block head token dim", (2, "B", 8, 16, 128), 32, 256),
    Case("Llama-3-8B HND [B,2,H,N,D]", "block kv head token dim", ("B", 2, 8, 16, 128), 32, 256),
    Case("Llama-3-8B fused NHD [B,N,H,2D]", "block token head dim", ("B", 16, 8, 256), 32, 65536),
    Case("Llama-3-8B fused HND [B,H,N,2D]", "block head token dim", ("B", 8, 16, 256), 32, 512),
    Case("Llama-3-70B TP4 [2,B,N,H,D]", KV, (2, "B", 16, 2, 128), 80, 8192),
    Case("Llama-3-70B TP8 [2,B,N,H,D]", KV, (2, "B", 16, 1, 128), 80, 4096),
    Case("DeepSeek-V3 MLA [B,64,576]", "block token dim", ("B", 64, 576), 61, 73728, 64),
    Case("DeepSeek-V3 MLA [B,16,576]", "block token dim", ("B", 16, 576), 61, 18432),
)
