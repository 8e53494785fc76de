"""What the planner knows of a machine: a few seconds of transfers, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.errors import TransferFailed
from lmcache_kernels.transfer.memory.numa import PCI_DEVICES
from lmcache_kernels.views import group_of

from .cuda_host import pci_address
from .gpu_mover import GpuMover
from .moves import ChunkMove
from .planner import PATHS, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

logger = logging.getLogger(__name__)

RUN_BYTES = tuple(1 << power for power in range(8, 21, 2))
"""Of the runs that are measured: 256 B to 1 MiB."""

COUNTS = tuple(1 << power for power in range(4, 14))
"""How many runs: 16 to 8192."""

MOST_BYTES = 256 << 20
"""Of one transfer: beyond it the rate no longer changes."""

ROUNDS = 5
_WARM_UPS = 2  # they compile and allocate
WAIT = 30.0
"""Seconds that one transfer may take."""

FORMAT_VERSION = 1


class Calibration(msgspec.Struct, frozen=True):
    """Attributes:
    machine: what was measured, see :func:`machine_of`.
    samples: how long transfers took.
    """

    version: int
    machine: dict[str, str]
    samples: list[Sample]


def machine_of(device: str) -> dict[str, str]:
    """What a calibration depends on: GPU, driver, the link's width and speed, versions."""
    properties = torch.cuda.get_device_properties(device)
    link = PCI_DEVICES / pci_address(torch.device(device).index)

    def read(name: str) -> str:
        try:
            return (link / name).read_text().strip()
        except OSError:
            return "unknown"

    return {
        "gpu": properties.name,
        "driver": _driver(),
        "link": f"{read('max_link_speed')} x{read('max_link_width')}",
        "torch": str(torch.__version__),  # which is of a class that no codec knows
        "cuda": str(torch.version.cuda),
    }


def kept(device: str, folder: Path | None = None) -> list[Sample] | None:
    """The samples of this machine, if it was calibrated; a file that is no good counts as none."""
    machine = machine_of(device)
    try:
        path = _file(machine, folder)
    except RuntimeError as error:  # no home
        logger.info("no calibration: %s", error)
        return None
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("calibration %s cannot be used: %s", path, error)
        return None
    if found.version != FORMAT_VERSION or found.machine != machine:
        return None
    good = [one for one in found.samples if _is_sane(one)]
    if len(good) < len(found.samples):
        logger.warning("calibration %s cannot be used: it holds impossible samples", path)
        return None
    return good


def keep(calibration: Calibration, folder: Path | None = None) -> Path:
    """Write it where :func:`kept` looks, whole or not at all; the file.

    Raises:
        OSError: it cannot be written.
    """
    path = _file(calibration.machine, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.part")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1))
    fresh.replace(path)
    return path


def calibrate(device: str) -> Calibration:
    """Measure the paths of a GPU, both ways, with other work on it or without.

    Takes some seconds, 256 MiB of pinned host memory and twice as much of the GPU's.

    Raises:
        TransferFailed: the GPU does not finish.
    """
    samples: list[Sample] = []
    for run_bytes, runs in shapes():
        with closing(Probe(device, run_bytes, runs)) as probe:
            samples += probe.measure(ROUNDS)
    return Calibration(FORMAT_VERSION, machine_of(device), samples)


def shapes() -> Iterator[tuple[int, int]]:
    """(run bytes, count) that are measured."""
    for run_bytes in RUN_BYTES:
        for count in COUNTS:
            if run_bytes * count <= MOST_BYTES:
                yield run_bytes, count


class Probe:
    """Transfers of ``runs`` runs of ``run_bytes``, on any path."""

    def __init__(
        self, device: str, run_bytes: int, runs: int, paths: Iterable[str] = PATHS
    ) -> None:
        cache = torch.randint(0, 256, (2 * runs, 1, run_bytes), dtype=torch.uint8, device=device)
        group = group_of([cache], "block token dim")
        layout = ChunkLayout.of([group], runs)
        self._cache = cache
        self._host = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
        order = torch.randperm(2 * runs, generator=torch.Generator().manual_seed(runs))
        self._blocks = order[:runs]
        move = ChunkMove(self._host.data_ptr(), (tuple(self._blocks.tolist()),), reachable=True)
        self._moves = [move]
        self._shape = run_bytes, runs
        self._movers = {path: GpuMover([group], layout, path=path) for path in paths}

    def measure(self, rounds: int) -> Iterator[Sample]:
        """Every path in turn, both ways, by the host's clock; medians."""
        for storing in (True, False):
            seconds: dict[str, list[float]] = {path: [] for path in self._movers}
            for _ in range(_WARM_UPS + rounds):
                for path, mover in self._movers.items():
                    if mover.choose(self._moves, storing=storing).path == path:
                        seconds[path].append(self._seconds(mover, storing))
            for path, found in seconds.items():
                if found:
                    middle = statistics.median(found[_WARM_UPS:])
                    yield Sample(path, storing, *self._shape, middle)

    def is_exact(self) -> bool:
        """Does every path move the right bytes, both ways?"""
        there = self._blocks.to(self._cache.device)
        good = []
        for mover in self._movers.values():
            self._host.zero_()
            self._seconds(mover, True)
            stored = self._host.to(self._cache.device).view(-1, 1, self._shape[0])
            good.append(torch.equal(self._cache.index_select(0, there), stored))
            self._cache.index_fill_(0, there, 0)
            self._seconds(mover, False)
            good.append(torch.equal(self._cache.index_select(0, there), stored))
        return all(good)

    def _seconds(self, mover: GpuMover, storing: bool) -> float:
        torch.cuda.current_stream(self._cache.device).synchronize()
        start = time.perf_counter()
        queue = mover.gather if storing else mover.scatter
        done = queue(self._moves, None).done
        while not done.done():  # its wait would sleep between two looks
            if time.perf_counter() - start > WAIT:
                raise TransferFailed(f"the device did not finish a transfer in {WAIT} s")
        return time.perf_counter() - start

    def close(self) -> None:
        for mover in self._movers.values():
            mover.close()


def _is_sane(sample: Sample) -> bool:
    return (
        sample.path in PATHS
        and sample.run_bytes > 0
        and sample.runs > 0
        and 0 < sample.seconds < WAIT
    )


def _file(machine: dict[str, str], folder: Path | None) -> Path:
    key = hashlib.sha256(msgspec.json.encode(machine, order="sorted")).hexdigest()[:16]
    return (folder or _folder()) / f"calibration-{key}.json"


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lmcache-kernels"


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"
