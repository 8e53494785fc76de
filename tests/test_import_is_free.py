"""Importing costs nothing: no torch, no CUDA, no GPU, no engine, and no thread that a fork loses."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREE = [
    "lmcache_kernels",
    "lmcache_kernels.transfer.messages",
    "lmcache_kernels.adapters.cli.main",
    "lmcache_kernels.adapters.server.main",
]

LOADS_NOTHING = """
import importlib, sys, threading
importlib.import_module(sys.argv[1])
heavy = {"torch", "triton", "vllm", "cupy", "cuda"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy
with open("/proc/self/maps") as maps:
    cuda = [line for line in maps if "libcuda" in line]
assert not cuda, cuda
assert threading.active_count() == 1, threading.enumerate()
"""

FORKS = """
import os, sys
from lmcache_kernels import Plane
import lmcache_kernels.adapters.cli.main
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        plane = Plane((0,), 2, 4, 1, 8, 32, 8, 8)
        os._exit(0 if plane.block_bytes == 32 else 1)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", FREE)
def test_importing_loads_no_torch_no_cuda_and_starts_no_thread(module):
    run("-c", LOADS_NOTHING, module)


def test_a_process_may_fork_after_importing():
    run("-c", FORKS)


def test_help_of_the_command_line_needs_no_torch():
    run(
        "-c",
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from lmcache_kernels.adapters.cli.main import app\n"
        "done = CliRunner().invoke(app, ['--help'])\n"
        "assert done.exit_code == 0, done.output\n"
        "assert 'torch' not in sys.modules\n",
    )
