"""What an engine's GPU does between transfers: loops captured in CUDA graphs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import torch

from .saturation import Window
from .timing import IDLE_CYCLES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LLAMA_8B_SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""Inputs and outputs of a layer's products: q, k and v; attention's output; gate and up; down."""

LAYERS, BATCH, HEAD_DIM = 32, 32, 128
CONTEXT_TOKENS = 128
"""That each request of the batch attends to: 0.5 GiB of K and V."""

GEMM_SIZE = 8192
LEAD_CYCLES = 10 * IDLE_CYCLES
"""For which the device waits, about 10 ms, so that a window is queued before it begins."""

REPLAYS = 3


@dataclass(frozen=True)
class Steps:
    """Attributes:
    run: queues one step on the current stream.
    nbytes: that a step cannot do without reading; 0 where that is not its limit.
    graph_steps: how many steps become one graph, so that launching it costs next to nothing.
    """

    run: Callable[[], object]
    nbytes: int
    graph_steps: int


def decode_steps(
    device: str,
    layers: int = LAYERS,
    shapes: Sequence[tuple[int, int]] = LLAMA_8B_SHAPES,
    context: int = CONTEXT_TOKENS,
    head_dim: int = HEAD_DIM,
    joined: bool = True,
) -> Steps:
    """A decode step of Llama-3-8B: its products, norms, attention and activation.

    Every weight, and the K and V of every token of the context, are read once a step.

    Args:
        joined: q, k and v are one product, and gate and up are; False: five, as checkpoints have
            them.
    """
    (hidden, qkv), (width, _), (_, gate_up), _ = shapes
    heads, kv_heads = width // head_dim, (qkv - width) // 2 // head_dim
    weights = [
        [
            torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) / sqrt(inputs)
            for inputs, outputs in shapes
        ]
        for _ in range(layers)
    ]
    cache = torch.randn(
        layers, 2, BATCH, kv_heads, context, head_dim, dtype=torch.bfloat16, device=device
    )
    scale = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    tokens = torch.randn(BATCH, hidden, dtype=torch.bfloat16, device=device)
    if not joined:
        weights = [
            [
                *into_heads.split((width, kv_heads * head_dim, kv_heads * head_dim)),
                out_of_heads,
                *up.split(gate_up // 2),
                down,
            ]
            for into_heads, out_of_heads, up, down in weights
        ]
    linear, norm = torch.nn.functional.linear, torch.nn.functional.rms_norm

    def run() -> None:
        state = tokens
        for layer, (keys, values) in zip(weights, cache, strict=True):
            *into_heads, out_of_heads = layer[: -2 if joined else -3]
            *up, down = layer[-2 if joined else -3 :]
            normed = norm(state, (hidden,), scale)
            query, *_ = [linear(normed, weight) for weight in into_heads]
            query = query[:, :width]
            # The queries of a K/V head stand where a prefill has tokens.
            query = query.reshape(BATCH, kv_heads, heads // kv_heads, head_dim)
            found = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
            state = state + linear(found.reshape(BATCH, width), out_of_heads)
            normed = norm(state, (hidden,), scale)
            ups = [linear(normed, weight) for weight in up]
            gate, rest = ups if len(ups) > 1 else ups[0].split(gate_up // 2, dim=1)
            state = state + linear(torch.nn.functional.silu(gate) * rest, down)

    nbytes = sum(weight.numel() for layer in weights for weight in layer) + cache.numel()
    return Steps(run, nbytes * cache.element_size(), graph_steps=8)


def gemm_steps(device: str, size: int = GEMM_SIZE) -> Steps:
    """A large matrix product, as prefill has them: limited by arithmetic."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return Steps(lambda: torch.mm(left, right, out=product), 0, graph_steps=16)


class GraphLoop:
    """Steps in a CUDA graph that is replayed on a stream of the default priority."""

    def __init__(self, steps: Steps, device: str) -> None:
        self._steps = steps
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            steps.run()  # libraries allocate on their first call, which no graph can hold
        self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for _ in range(steps.graph_steps):
                steps.run()

    def window(self) -> Window:
        """Time :data:`REPLAYS` of the graph, which the device has before it begins the first."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(LEAD_CYCLES)
            start.record(self._stream)
            for _ in range(REPLAYS):
                self._graph.replay()
            end.record(self._stream)
        end.synchronize()
        ended = time.perf_counter()
        seconds = start.elapsed_time(end) / 1e3
        return Window(seconds / (REPLAYS * self._steps.graph_steps), ended - seconds, ended)
