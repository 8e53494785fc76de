"""The mover that suits a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_kernels.errors import LayoutError

from .host_mover import HostMover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.plane import CacheGroup

    from .moves import Mover


def one_device(groups: Sequence[CacheGroup]) -> str:
    """The device that all groups lie on, as torch spells it.

    Raises:
        LayoutError: no group, or several devices.
    """
    devices = sorted({group.device for group in groups})
    if len(devices) != 1:
        raise LayoutError(f"groups: expected one device, got {', '.join(devices) or 'no group'}")
    return devices[0]


def mover_for(groups: Sequence[CacheGroup], layout: ChunkLayout, max_programs: int | None) -> Mover:
    """Moves chunks of the layout between the groups and host memory.

    Args:
        max_programs: bound on the grid of every GPU kernel.

    Raises:
        LayoutError: groups on several devices, or on one that no mover knows.
    """
    device = one_device(groups)
    if device == "cpu":
        return HostMover(groups, layout)
    if not device.startswith("cuda:"):
        raise LayoutError(f"device: expected cpu or cuda, got {device}")
    import torch

    if torch.version.hip:
        raise LayoutError("device: expected a GPU of CUDA, got one of ROCm, which has no mover yet")
    from .calibration import kept
    from .gpu_mover import GpuMover
    from .planner import Planner

    return GpuMover(groups, layout, planner=Planner(kept(device)), max_programs=max_programs)
