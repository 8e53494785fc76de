"""What a figure was measured on; goes into every result file."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from typing import Any

import torch
import triton


def describe() -> dict[str, Any]:
    """GPU, driver, library versions, commit, date and command of this run."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        # A copy of the tree without its history can be told what it is a copy of.
        "commit": os.environ.get("BENCH_COMMIT") or _output("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join(["python", "-m", "bench", *sys.argv[1:]]),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    return found


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
