"""How much host memory an arena may take, by whom it is limited, and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lmcache_kernels.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY_INFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


class Room(NamedTuple):
    """One limit.

    Attributes:
        free: bytes that it leaves.
        where: what is limited.
        remedy: how to get more.
    """

    free: int
    where: str
    remedy: str


def check_room(nbytes: int, directory: Path) -> None:
    """Whether an arena fits, before any of it is taken.

    A file system that is full makes itself known when pages are allocated. Memory does not: the
    kernel ends processes instead.

    Raises:
        CapacityError: it does not fit; need, have and remedy.
        OSError: no such directory.
    """
    for room in _rooms(directory):
        if nbytes > room.free:
            raise _no_room(nbytes, room)


def tightest_room(directory: Path) -> Room:
    """The limit that leaves least."""
    return min(_rooms(directory))


def no_room(nbytes: int, directory: Path) -> CapacityError:
    """Of an arena that turned out not to fit: somebody else was quicker."""
    return _no_room(nbytes, tightest_room(directory))


def _rooms(directory: Path) -> Iterator[Room]:
    status = os.statvfs(directory)
    if status.f_blocks:  # a tmpfs without a limit reports none at all
        yield Room(
            status.f_bavail * status.f_frsize,
            str(directory),
            f"give {directory} more (docker: --shm-size; otherwise: mount -o remount,size=... "
            f"{directory})",
        )
    available = _numbers(MEMORY_INFO).get("MemAvailable:")
    if available is not None:
        yield Room(available << 10, "memory", "end what else takes memory")
    yield from _control_group_rooms()


def _control_group_rooms() -> Iterator[Room]:
    """Of this process's control group and those around it (version 2)."""
    try:
        lines = CONTROL_GROUP.read_text().splitlines()
    except OSError:
        return
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return
    group = CONTROL_GROUPS / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder == CONTROL_GROUPS.parent:
            return
        try:
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
        except (OSError, ValueError):  # the root has no limit, others say "max"
            continue
        kept = _numbers(folder / "memory.stat")
        cache = kept.get("inactive_file", 0) + kept.get("active_file", 0)  # given up on demand
        yield Room(
            max(limit - used + cache, 0),
            f"memory of the control group {folder}",
            "raise its memory.max (docker: --memory; Kubernetes: resources.limits.memory)",
        )


def _numbers(path: Path) -> dict[str, int]:
    """The lines "name number ..." of a file; none where there is no file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdigit()}


def _no_room(need: int, room: Room) -> CapacityError:
    return CapacityError(
        f"arena: need {need} bytes in {room.where}, have {room.free} ({_size(need)} of "
        f"{_size(room.free)}). Ask for a smaller arena, or {room.remedy}"
    )


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
