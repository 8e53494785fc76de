"""What the documentation shows works: the examples, and the code on the page of the transfer API."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from import_graph import ROOT

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

WITHOUT = """
import runpy
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("zmq", "vllm"):
            raise ImportError(f"{name} is not to be imported")


sys.meta_path.insert(0, Blocked())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(*arguments: str) -> str:
    """What a Python that sees no GPU prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PRINTED = {
    "transfer.py": "2 chunks stored and loaded on cpu, every byte the same",
    "handover.py": r"decode on cpu: every byte is right\n"
    r"prefill on cpu handed over \d+ MiB at [\d.]+ GB/s",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    assert re.search(PRINTED.get(name, "."), run(f"examples/{name}"))


FULL = """
import os

real = os.statvfs


def statvfs(path):
    found = real(path)
    return os.statvfs_result((*found[:3], 1, 1, *found[5:]))


os.statvfs = statvfs
"""


def test_a_hand_over_without_room_says_so_in_one_sentence(tmp_path):
    """Where a cache of the other process does not fit into /dev/shm."""
    (tmp_path / "sitecustomize.py").write_text(FULL)
    done = subprocess.run(
        [sys.executable, "examples/handover.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"^decode: arena: need \d+ bytes in /dev/shm, have \d+ ", done.stderr)


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_the_transfer_api_needs_neither_zmq_nor_vllm(name):
    """Nor do the processes that the example starts: they import what it imports."""
    assert re.search(PRINTED[name], run("-c", WITHOUT, f"examples/{name}"))


def test_the_block_on_zmq_and_vllm_blocks():
    with pytest.raises(AssertionError, match="zmq is not to be imported"):
        run("-c", WITHOUT, "examples/two_engines.py")


def test_the_code_of_the_api_page_runs(tmp_path):
    page = (ROOT / "docs" / "api.md").read_text()
    pieces = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(pieces) == 7
    script = tmp_path / "api.py"
    script.write_text("\n".join(pieces))
    run(str(script))


def test_the_api_page_names_what_there_is():
    import lmcache_kernels.transfer

    page = (ROOT / "docs" / "api.md").read_text()
    table = page[: page.index("`group_of` and its relatives")]
    named = {name for name in re.findall(r"`(\w+)`", table) if name != "lmcache_kernels"}
    assert named == set(lmcache_kernels.transfer.__all__)
