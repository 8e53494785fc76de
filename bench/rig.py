"""What every part of the engine's benchmark is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from lmcache_kernels.transfer.moving.calibration import calibrate
from lmcache_kernels.transfer.moving.planner import Planner

from .moving import host_slots, open_mover
from .plain_link import PlainLink
from .results import title_of

if TYPE_CHECKING:
    from lmcache_kernels.transfer.moving.moves import Mover

    from .options import Options
    from .timing import Clock
    from .workload import Memory, Workload


@dataclass(frozen=True)
class Rig:
    """Attributes:
    options: what a person chose.
    device: that copies; "cpu" for trying a part out.
    clock: for work of the current stream.
    mover: arguments of the library's mover, to be tuned.
    """

    options: Options
    device: str
    clock: Clock
    mover: dict[str, Any] = field(default_factory=dict)

    @property
    def max_programs(self) -> int | None:
        bound: int | None = self.mover.get("max_programs")
        return bound

    @property
    def variant(self) -> str:
        """What the mover was told beside its bound on the grid."""
        others = [f"{name} {value}" for name, value in self.mover.items() if name != "max_programs"]
        return ", ".join(others) or "plain"

    @property
    def memory(self) -> Memory:
        """Slots in pinned memory."""
        return partial(host_slots, self.device)

    @cached_property
    def link(self) -> PlainLink:
        """Made when it is first asked for; it holds a gigabyte."""
        return PlainLink(self.device)

    @cached_property
    def planner(self) -> Planner:
        """Of this machine, which is measured for it when it is first asked for."""
        return Planner(None if self.device == "cpu" else calibrate(self.device).samples)

    def open_mover(self, work: Workload) -> Mover:
        return open_mover(work, {"planner": self.planner, **self.mover}, self.clock)

    def wants(self, part: str, case: str, direction: str, mib: int = 0) -> bool:
        """Is this row to be measured?"""
        title = title_of(f"{part} {case}", direction, self.variant, "random", self.max_programs)
        return self.options.wants(f"{title}, {mib} MiB" if mib else title)

    def drain(self) -> None:
        """Wait for the current stream."""
        if self.device != "cpu":
            torch.cuda.current_stream(self.device).synchronize()
