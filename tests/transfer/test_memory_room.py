"""What limits an arena, and what its owner is told: file system, memory, control groups."""

from __future__ import annotations

import pytest

from lmcache_kernels.errors import CapacityError
from lmcache_kernels.transfer.memory import memory_room
from lmcache_kernels.transfer.memory.memory_room import check_room, no_room

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine: MemAvailable in MiB, and files of its control groups by path."""
    groups = tmp_path / "cgroup"
    groups.mkdir()

    def make(available: int | None = None, group: str = "/", files: dict[str, str] | None = None):
        info = "MemTotal: 99999 kB\nHugePages_Total: 0\n"
        if available is not None:
            info += f"MemAvailable:   {available * 1024} kB\n"
        (tmp_path / "meminfo").write_text(info)
        (tmp_path / "mine").write_text(f"4:memory:/old\n0::{group}\n")
        for name, text in (files or {}).items():
            (groups / name).parent.mkdir(parents=True, exist_ok=True)
            (groups / name).write_text(text)
        monkeypatch.setattr(memory_room, "MEMORY_INFO", tmp_path / "meminfo")
        monkeypatch.setattr(memory_room, "CONTROL_GROUP", tmp_path / "mine")
        monkeypatch.setattr(memory_room, "CONTROL_GROUPS", groups)

    return make


def test_memory_that_is_not_there_is_refused_with_need_have_and_remedy(machine, tmp_path) -> None:
    machine(available=8)
    check_room(8 * MIB, tmp_path)
    with pytest.raises(
        CapacityError, match=rf"need {8 * MIB + 1} bytes in memory, have {8 * MIB} "
    ):
        check_room(8 * MIB + 1, tmp_path)


def test_the_file_system_is_named_first(machine, tmp_path) -> None:
    machine(available=8)
    with pytest.raises(CapacityError, match=rf"in {tmp_path}, have \d+ .*--shm-size"):
        check_room(1 << 60, tmp_path)


@pytest.mark.parametrize("name", ["memory.max", "pods/memory.max", "pods/one/memory.max"])
def test_the_limit_of_any_group_around_this_process_counts(machine, tmp_path, name: str) -> None:
    limits = {
        f"{folder}memory.{what}": text
        for folder in ("", "pods/", "pods/one/")
        for what, text in (("max", "max\n"), ("current", "0\n"), ("stat", "anon 1\n"))
    }
    machine(100, "/pods/one", limits | {name: f"{5 * MIB}\n"})
    check_room(5 * MIB, tmp_path)
    with pytest.raises(CapacityError, match=r"control group .*docker: --memory"):
        check_room(5 * MIB + 1, tmp_path)


def test_cached_files_do_not_count_as_used(machine, tmp_path) -> None:
    stat = f"anon 77\nfile {9 * MIB}\ninactive_file {2 * MIB}\nactive_file {1 * MIB}\nshmem 5\n"
    used = {"memory.max": f"{10 * MIB}", "memory.current": f"{9 * MIB}", "memory.stat": stat}
    machine(100, "/", used)
    check_room(4 * MIB, tmp_path)
    with pytest.raises(CapacityError, match=f"have {4 * MIB}"):
        check_room(4 * MIB + 1, tmp_path)


def test_a_group_above_its_limit_has_no_room(machine, tmp_path) -> None:
    machine(100, "/", {"memory.max": "100", "memory.current": "300"})
    with pytest.raises(CapacityError, match=r"have 0 \("):
        check_room(1, tmp_path)


def test_a_machine_that_says_nothing_is_no_limit(machine, tmp_path) -> None:
    machine()
    check_room(MIB, tmp_path)


def test_a_system_without_these_files_is_no_limit(monkeypatch, tmp_path) -> None:
    for name in ("MEMORY_INFO", "CONTROL_GROUP", "CONTROL_GROUPS"):
        monkeypatch.setattr(memory_room, name, tmp_path / "nothing")
    check_room(MIB, tmp_path)


def test_afterwards_the_tightest_limit_is_named(machine, tmp_path) -> None:
    machine(100, "/", {"memory.max": f"{3 * MIB}", "memory.current": f"{1 * MIB}"})
    assert f"control group {tmp_path}/cgroup, have {2 * MIB}" in str(no_room(9 * MIB, tmp_path))


@pytest.mark.parametrize(
    ("need", "have", "sizes"),
    [
        (2 * MIB, 1536 << 10, "2.00 MiB of 1.50 MiB"),
        (3 << 30, 80 * MIB, "3.00 GiB of 80.00 MiB"),
        (4096, 512, "4.00 KiB of 512 bytes"),
    ],
)
def test_sizes_are_told_in_units_that_fit(need, have, sizes, monkeypatch, tmp_path) -> None:
    room = memory_room.Room(have, "memory", "end what else takes memory")
    monkeypatch.setattr(memory_room, "tightest_room", lambda directory: room)
    assert f"({sizes})" in str(no_room(need, tmp_path))
