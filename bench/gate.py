"""The gate before a benchmark: a copy that is wrong has no speed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("-m", "gpu", "tests/gpu", "-q", "-x")


def is_open() -> bool:
    """Whether the GPU tests pass, and there were some."""
    command = [sys.executable, "-m", "pytest", *TESTS]
    print("gate:", " ".join(["python", *command[1:]]), flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0
