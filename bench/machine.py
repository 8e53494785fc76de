"""What a figure was measured on; goes into every result file."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys

import torch
import triton


def describe() -> dict[str, str]:
    """Processor, GPU, driver, library versions, commit, date and command of this run."""
    found = {
        "processor": f"{len(os.sched_getaffinity(0))} cores, {_processor()}",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        # A copy of the tree without its history can be told what it is a copy of.
        "commit": os.environ.get("BENCH_COMMIT") or _output("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join(["python", "-m", "bench", *sys.argv[1:]]),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = _output(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    return found


def _processor() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        names = [
            line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")
        ]
    return names[0] if names else platform.machine()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
