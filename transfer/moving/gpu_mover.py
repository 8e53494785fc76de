"""Moves chunks between a GPU's cache and host memory, each call on the path that suits it best."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

import torch

from lmcache_kernels.chunk_copy import ChunkCopy, pair_planes
from lmcache_kernels.copy_plan import CopyPlan
from lmcache_kernels.errors import CapacityError, ConfigError, TransferFailed
from lmcache_kernels.ids import ABSENT

from .batch_path import BatchPath
from .device import CudaDevice, EventCompletion
from .direct_path import PROGRAMS, DirectPath
from .moves import Over
from .planner import PATHS, Choice, Job, Planner
from .slice_plan import GENTLE_BYTES, GENTLE_SLICES
from .staged_path import StagedPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.chunk_copy import Layers
    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.copy_plan import Side
    from lmcache_kernels.plane import CacheGroup

    from .device import Device
    from .moves import ChunkMove, Completion, LayerMarks, Moved
    from .path import Path


class GpuMover:
    """The :class:`~lmcache_kernels.transfer.moving.moves.Mover` of CUDA engines.

    One thread may gather while another scatters; neither call may be made by two threads at once.

    Args:
        groups: the engine's cache, all on one device.
        layout: of the chunks.
        path: "staged", "direct" or "batch" for every call that can take it; None: what the planner
            says.
        planner: None: one that knows nothing of this machine.
        max_programs: bound on the grid of a staged kernel; None lets it fill the device, which is
            over soonest and so disturbs others least.
        slice_bytes, slices: of the staged path, both directions; None: as slice_plan has them.
        device: where the work is queued; None: the cache's.

    Raises:
        ConfigError: no such path.
    """

    synchronous = False
    decoding = False

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        layout: ChunkLayout,
        *,
        path: str | None = None,
        planner: Planner | None = None,
        max_programs: int | None = None,
        slice_bytes: int | None = None,
        slices: int | None = None,
        device: Device | None = None,
    ) -> None:
        if path is not None and path not in PATHS:
            raise ConfigError(f"path: expected one of {', '.join(PATHS)}, got {path!r}")
        self._groups, self._layout = groups, layout
        self._where = groups[0].device
        self._device = device or CudaDevice(self._where)
        self._path = path
        self._planner = planner or Planner(None)
        self._max_programs = max_programs
        self._slices = {"slice_bytes": slice_bytes, "slices": slices}
        self._making = threading.Lock()
        self._paths: dict[tuple[str, bool], Path] = {}
        self._runs = _runs_of(groups, layout)

    def prepare(self) -> None:
        try:
            for name, storing in (("staged", True), (_GENTLE, True), ("staged", False)):
                with self._device.current():
                    self._at(name, storing).open()
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"no device memory for slices: {error}") from error

    def ready(self) -> Completion | None:
        return EventCompletion(self._device.now())

    def join(self, point: Completion) -> None:
        if isinstance(point, EventCompletion):
            torch.cuda.current_stream(self._where).wait_event(point.event)
        elif not isinstance(point, Over):
            raise TransferFailed(f"join: expected an event of the device, got {point!r}")

    def gather(
        self,
        moves: Sequence[ChunkMove],
        after: Completion | None,
        layers: LayerMarks | None = None,
    ) -> Moved:
        if layers is None:
            return self._run(moves, after, storing=True)
        staged = cast("StagedPath", self._at("staged", storing=True))
        return staged.run_behind(moves, after, layers)

    def scatter(
        self, moves: Sequence[ChunkMove], after: Completion | None, layers: Layers | None = None
    ) -> Moved:
        if layers is None:
            return self._run(moves, after, storing=False)
        staged = cast("StagedPath", self._at("staged", storing=False))
        return staged.run_by_layer(moves, after, layers)

    def choose(self, moves: Sequence[ChunkMove], *, storing: bool) -> Choice:
        """The path for some moves, and why."""
        possible = ["staged"]
        if all(move.reachable for move in moves):
            possible.append("direct")
            if self._device.batches and (storing or not any(map(_leaves_out, moves))):
                possible.append("batch")
        if self._path is not None:
            if self._path in possible:
                return Choice(self._path, f"{self._path}: as configured")
            return Choice("staged", f"staged: {self._path} is configured and cannot take this")
        return self._planner.choose(self._job(moves, storing=storing), possible)

    def _job(self, moves: Sequence[ChunkMove], *, storing: bool) -> Job:
        """Its dense runs: how many, and their bytes on average."""
        counts = [len(moves)] * len(self._runs)
        if moves and not storing and len(counts) > 1:
            counts = [sum(group) for group in zip(*(m.wanted() for m in moves), strict=True)]
        runs = sum(count * runs for count, (runs, _) in zip(counts, self._runs, strict=True))
        nbytes = sum(count * size for count, (_, size) in zip(counts, self._runs, strict=True))
        return Job(storing, max(1, nbytes // max(1, runs)), max(1, runs), decoding=self.decoding)

    def close(self) -> None:
        for path in self._paths.values():
            path.release()
        self._paths.clear()

    def _run(self, moves: Sequence[ChunkMove], after: Completion | None, *, storing: bool) -> Moved:
        choice = self.choose(moves, storing=storing)
        gentle = self.decoding and storing and choice.path == "staged"
        path = self._at(_GENTLE if gentle else choice.path, storing)
        return path.run(moves, after, choice.why)

    def _at(self, name: str, storing: bool) -> Path:
        with self._making:
            return self._made(name, storing)

    def _made(self, name: str, storing: bool) -> Path:
        path = self._paths.get((name, storing))
        if path is None:
            path = self._paths[name, storing] = self._make(name, storing)
        return path

    def _make(self, name: str, storing: bool) -> Path:
        side: Side = "dst" if storing else "src"
        groups, layout, device, where = self._groups, self._layout, self._device, self._where
        if name in ("staged", _GENTLE):
            bound, slices, gentle = self._max_programs, self._slices, name == _GENTLE
            if gentle:
                slices = {"slices": GENTLE_SLICES, "slice_bytes": GENTLE_BYTES}
            return StagedPath(
                device,
                lambda: ChunkCopy(groups, layout, side, max_programs=bound, staged=True),
                where,
                layout=layout,
                storing=storing,
                head=not gentle,
                **slices,
            )
        if name == "direct":
            return DirectPath(
                device,
                lambda: ChunkCopy(groups, layout, side, max_programs=PROGRAMS),
                where,
                storing=storing,
            )
        return BatchPath(
            device, lambda: ChunkCopy(groups, layout, "dst", writes=False), where, storing=storing
        )


_GENTLE = "gentle"
"""The staged path of stores beside decoding."""


def _leaves_out(move: ChunkMove) -> bool:
    return any(ABSENT in blocks for blocks in move.blocks)


def _runs_of(groups: Sequence[CacheGroup], layout: ChunkLayout) -> list[tuple[int, int]]:
    """Per group, the dense runs of a chunk and the bytes of all of them."""
    plan = CopyPlan.of(pair_planes(groups, layout.planes_at(0, groups[0].device), "dst"), "dst")
    found = [(0, 0)] * len(groups)
    for leg in plan.legs:
        chunk, (runs, nbytes) = leg.dst, found[leg.group]
        more = chunk.rows * chunk.num_blocks * chunk.block_tokens * chunk.num_heads
        found[leg.group] = runs + more, nbytes + more * chunk.width
    return found
