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

LAYERS, BATCH = 32, 32
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
    device: str, layers: int = LAYERS, shapes: Sequence[tuple[int, int]] = LLAMA_8B_SHAPES
) -> Steps:
    """The matrix products of a decode step of Llama-3-8B: every weight is read once a step."""
    weights = [
        torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) / sqrt(inputs)
        for _ in range(layers)
        for inputs, outputs in shapes
    ]
    tokens = torch.randn(BATCH, shapes[0][0], dtype=torch.bfloat16, device=device)

    def run() -> None:
        hidden = tokens
        for weight in weights:
            hidden = torch.nn.functional.linear(hidden[:, : weight.shape[1]], weight)

    nbytes = sum(weight.numel() * weight.element_size() for weight in weights)
    return Steps(run, nbytes, graph_steps=8)


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
