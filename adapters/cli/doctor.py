"""Judges what a machine has: each fact becomes a finding with a status and, when short, a remedy.

:func:`diagnose` is a pure function of the facts; :mod:`.probe` collects them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .probe import Probe, probe_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTED_VLLM = "0.32.0"
"""The vLLM that the end-to-end tests run."""

DEFAULT_L1_BYTES = 4 * 2**30
"""Default of ``serve --l1-size-gb``."""

SMALLEST_SHM = 64 * 2**20
"""Below this there is hardly room for chunks; it is also what a container gets by default."""

SLOWEST_LINK = 10.0
"""GB/s. A PCIe 3.0 x16 link carries about 12 and each newer one twice that, so less than this
means fewer lanes or an older generation than the slot could do."""


class Status(str, Enum):
    """How it stands: fine; works, but less well than it could; not there."""

    ok = "ok"
    warn = "warn"
    missing = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: how it stands.
        detail: what was found.
        remedy: what to do; empty when there is nothing to do.
        fatal: nothing works until it is put right.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    fatal: bool = False


def diagnose(probe: Probe) -> list[Finding]:
    """What the facts mean, in the order of the report."""
    return [
        Finding("Python", Status.ok, probe.python),
        *_modules(probe),
        *_gpus(probe),
        _shared_memory(probe),
        _memlock(probe),
        _stale_segments(probe),
        _vllm(probe),
    ]


def run_doctor(*, as_json: bool) -> int:
    """Probe this machine and print the report; 1 if something fatal was found, else 0."""
    findings = diagnose(probe_machine())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console().print(_table(findings))
    return int(any(finding.fatal for finding in findings))


def _modules(probe: Probe) -> Iterator[Finding]:
    for name, version in probe.modules.items():
        needed = name != "triton" or bool(probe.gpus)
        if name in probe.broken:
            yield Finding(
                name,
                Status.missing,
                f"installed, but does not load: {probe.broken[name]}",
                f"reinstall it: pip install --force-reinstall {_distribution_of(name)}",
                fatal=needed,
            )
        elif version is None:
            why = "" if needed else "; only a GPU's copies need it"
            yield Finding(
                name,
                Status.missing,
                f"not installed{why}",
                f"pip install {_distribution_of(name)}" if needed else "",
                fatal=needed,
            )
        else:
            yield Finding(name, Status.ok, version)


def _distribution_of(module: str) -> str:
    return {"zmq": "pyzmq"}.get(module, module)


def _gpus(probe: Probe) -> Iterator[Finding]:
    if not probe.gpus:
        if probe.driver is None:
            yield Finding("GPU", Status.ok, "none; caches in host memory work")
        else:
            build = f"for CUDA {probe.cuda_build}" if probe.cuda_build else "for CPUs only"
            yield Finding(
                "GPU",
                Status.warn,
                f"driver {probe.driver} answers, but torch (built {build}) sees no GPU",
                "install a torch whose CUDA this driver supports, "
                "and check CUDA_VISIBLE_DEVICES and the container's GPU option",
            )
        return
    for gpu in probe.gpus:
        driver = f", driver {probe.driver}" if probe.driver else ""
        yield Finding(
            f"GPU {gpu.index}", Status.ok, f"{gpu.name}, {_size(gpu.memory_bytes)}{driver}"
        )
        if gpu.to_gpu is None or gpu.to_host is None:
            yield Finding(
                f"GPU {gpu.index} link",
                Status.warn,
                f"not measured: {gpu.link_error}",
                "free memory on the GPU and the host, and run this again",
            )
        else:
            slow = min(gpu.to_gpu, gpu.to_host) < SLOWEST_LINK
            yield Finding(
                f"GPU {gpu.index} link",
                Status.warn if slow else Status.ok,
                f"{gpu.to_gpu:.1f} GB/s to the GPU, {gpu.to_host:.1f} GB/s back (pinned)",
                "compare `nvidia-smi -q` (PCIe generation and width, current against max), "
                "and bind to the GPU's NUMA node"
                if slow
                else "",
            )
    if len(probe.gpus) > 1:
        pairs = ", ".join(f"{a}->{b}" for a, b in probe.no_peer_access)
        yield Finding(
            "Peer access",
            Status.warn if pairs else Status.ok,
            f"none between {pairs}" if pairs else "between all GPUs",
            "copies between them pass through the host; see `nvidia-smi topo -p2p r`, "
            "and switch off PCIe ACS in the firmware"
            if pairs
            else "",
        )


def _shared_memory(probe: Probe) -> Finding:
    name = "/dev/shm"
    grow = "docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16g /dev/shm"
    if probe.shm_bytes is None or probe.shm_free is None:
        return Finding(
            name, Status.missing, "not there or not writable", f"mount it: {grow}", fatal=True
        )
    if probe.shm_bytes == 0:
        return Finding(name, Status.ok, "limited by memory only")
    detail = f"{_size(probe.shm_free)} free of {_size(probe.shm_bytes)}"
    if probe.shm_free < SMALLEST_SHM:
        return Finding(name, Status.missing, f"{detail}: no room for chunks", grow, fatal=True)
    if probe.shm_free < DEFAULT_L1_BYTES:
        return Finding(
            name,
            Status.warn,
            f"{detail}: less than the default of `serve`",
            f"{grow}; or serve --l1-size-gb {probe.shm_free * 0.9 / 2**30:.2f}",
        )
    return Finding(name, Status.ok, detail)


def _memlock(probe: Probe) -> Finding:
    name = "Lockable memory"
    if probe.memlock_bytes is None:
        return Finding(name, Status.ok, "no limit")
    detail = f"limit {_size(probe.memlock_bytes)}"
    return Finding(name, Status.ok, f"{detail}; only network transfers (RDMA) count against it")


def _stale_segments(probe: Probe) -> Finding:
    name = "Left-over segments"
    if not probe.stale_segments:
        return Finding(name, Status.ok, "none")
    return Finding(
        name,
        Status.warn,
        f"of dead servers: {', '.join(probe.stale_segments)}",
        "the next `lmcache-kernels serve` removes them",
    )


def _vllm(probe: Probe) -> Finding:
    found = probe.optional.get("vLLM")
    if found is None:
        return Finding(
            "vLLM",
            Status.missing,
            f"not in this environment; tested with {TESTED_VLLM}",
            "install this package where vLLM is, for the connector",
        )
    name, version = found
    if version.split("+")[0].split(".")[:2] == TESTED_VLLM.split(".")[:2]:
        return Finding("vLLM", Status.ok, f"{name} {version}")
    return Finding(
        "vLLM",
        Status.warn,
        f"{name} {version}; tested with {TESTED_VLLM}",
        f"if the connector does not load, install {TESTED_VLLM}",
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


_STYLE = {Status.ok: "green", Status.warn: "yellow", Status.missing: "dim"}


def _table(findings: list[Finding]) -> Table:
    table = Table(title="What this machine has")
    for column in ("", "Status", "Found", "What to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = "bold red" if finding.fatal else _STYLE[finding.status]
        # Text, not str: a machine's own words must not be read as markup.
        table.add_row(
            Text(finding.name),
            Text(finding.status.value, style=style),
            Text(finding.detail),
            Text(finding.remedy),
        )
    return table
