"""The shared region: reserved for real, found when stale, never taken from the living."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from lmcache_kernels.errors import (
    CapacityError,
    Closed,
    ConfigError,
    LayoutError,
    PeerGone,
    RemoteProtocolError,
)
from lmcache_kernels.transfer.memory import arena as arena_module
from lmcache_kernels.transfer.memory.arena import (
    NAME_PATTERN,
    SHM_DIRECTORY,
    Arena,
    sweep_stale_segments,
)

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")
STALE = "lmcache_kernels_" + "0" * 32

OWNER = """
import sys, pathlib
from lmcache_kernels.transfer.memory.arena import Arena
arena = Arena.create(int(sys.argv[2]), pathlib.Path(sys.argv[1]))
arena.view(0, 5)[:] = b"alive"
print(arena.name, flush=True)
sys.stdin.readline()
{end}
"""


@pytest.fixture
def shm():
    """A directory of its own in shared memory: other tests of this machine use the real one."""
    with tempfile.TemporaryDirectory(dir=SHM_DIRECTORY, prefix="arena_test_") as name:
        yield Path(name)


def start_owner(directory: Path, nbytes: int = MIB, end: str = "arena.close()"):
    return subprocess.Popen(
        [sys.executable, "-c", OWNER.format(end=end), str(directory), str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def name_of(owner: subprocess.Popen) -> str:
    """Returns once the owner's arena exists, or with '' when the owner has ended."""
    assert owner.stdout is not None
    return owner.stdout.readline().strip()


def kill(owner: subprocess.Popen) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=30)


def finish(owner: subprocess.Popen) -> None:
    owner.communicate("\n", timeout=30)
    assert owner.returncode == 0


def files(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


# --- life -----------------------------------------------------------------------------------------


def test_owner_and_attached_share_bytes(shm: Path) -> None:
    owner = Arena.create(3 * PAGE + 17, shm)
    other = Arena.attach(owner.name, owner.nbytes, shm)
    assert NAME_PATTERN.fullmatch(owner.name)
    assert owner.address % PAGE == other.address % PAGE == 0
    assert owner.address != other.address
    assert bytes(owner.view(0, owner.nbytes)) == bytes(owner.nbytes)
    other.view(3 * PAGE + 10, 7)[:] = b"to all!"
    assert bytes(owner.view(3 * PAGE + 10, 7)) == b"to all!"
    owner.close()
    assert files(shm) == set()
    assert bytes(other.view(3 * PAGE + 10, 7)) == b"to all!", "a mapping outlives its file"
    other.close()


def test_the_file_is_private_and_fully_reserved(shm: Path) -> None:
    arena = Arena.create(5 * PAGE + 1, shm)
    status = (shm / arena.name).stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 5 * PAGE + 1
    assert status.st_blocks * 512 == 6 * PAGE
    arena.close()


def test_pages_are_of_2_mb_where_the_file_system_allows_it(shm: Path) -> None:
    script = """
import pathlib, sys
from lmcache_kernels.transfer.memory.arena import Arena
def huge():
    info = pathlib.Path("/proc/meminfo").read_text().split()
    return int(info[info.index("ShmemHugePages:") + 1])
before = huge()
arena = Arena.create(8 << 20, pathlib.Path(sys.argv[1]))
assert huge() - before >= 6 << 10, huge() - before
"""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no pages of 2 MB")
    on_a_small_file_system(shm, 16 * MIB, script, ",huge=advise")


def test_a_node_that_is_not_there_is_refused_before_anything_is_made(shm: Path) -> None:
    with pytest.raises(ConfigError, match=r"numa_node: expected one of \[0.*, got 4711"):
        Arena.create(PAGE, shm, numa_node=4711)
    assert files(shm) == set()


def test_the_node_is_asked_for_before_the_first_page(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def prefer(address: int, nbytes: int, node: int) -> None:
        asked.append((address, nbytes, node, used_bytes(shm)))

    monkeypatch.setattr(arena_module, "check_node", lambda _: None)
    monkeypatch.setattr(arena_module, "prefer_node", prefer)
    arena = Arena.create(3 * PAGE, shm, numa_node=1)
    assert asked == [(arena.address, 3 * PAGE, 1, 0)]
    assert used_bytes(shm) == 3 * PAGE
    arena.close()


def test_a_server_process_makes_an_arena_without_torch(shm: Path) -> None:
    script = """
import pathlib, sys
from lmcache_kernels.transfer.memory.arena import Arena
Arena.create(1 << 20, pathlib.Path(sys.argv[1])).close()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, str(shm)], check=True, timeout=60)


def test_address_is_where_the_view_is(shm: Path) -> None:
    import ctypes

    arena = Arena.create(PAGE, shm)
    arena.view(8, 4)[:] = b"\x01\x02\x03\x04"
    assert ctypes.string_at(arena.address + 8, 4) == b"\x01\x02\x03\x04"
    arena.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (0, -1), (PAGE, 1), (1, PAGE), (1 << 70, 0)]
)
def test_views_outside_are_refused(shm: Path, offset: int, nbytes: int) -> None:
    arena = Arena.create(PAGE, shm)
    assert len(arena.view(PAGE, 0)) == 0
    with pytest.raises(LayoutError, match=f"{nbytes} at {offset}"):
        arena.view(offset, nbytes)
    arena.close()


def test_closing_is_idempotent_and_final(shm: Path) -> None:
    arena = Arena.create(PAGE, shm)
    arena.close()
    arena.close()
    with pytest.raises(Closed):
        arena.view(0, 1)


def test_a_view_outlives_closing(shm: Path) -> None:
    arena = Arena.create(PAGE, shm)
    view = arena.view(0, PAGE)
    arena.close()
    view[:4] = b"fine"
    assert bytes(view[:4]) == b"fine"
    assert files(shm) == set()


def test_a_forgotten_arena_goes_with_the_garbage(shm: Path) -> None:
    arena = Arena.create(PAGE, shm)
    assert files(shm) == {arena.name}
    del arena
    gc.collect()
    assert files(shm) == set()


def test_descriptors_do_not_leak(shm: Path) -> None:
    def cycle() -> int:
        owner = Arena.create(PAGE, shm)
        Arena.attach(owner.name, PAGE, shm).close()
        with pytest.raises(RemoteProtocolError):
            Arena.attach(owner.name, PAGE + 1, shm)
        owner.close()
        return len(os.listdir("/proc/self/fd"))

    assert cycle() == cycle()


def test_a_forked_child_that_exits_leaves_the_file(shm: Path) -> None:
    script = """
import os, sys, pathlib
from lmcache_kernels.transfer.memory.arena import Arena
directory = pathlib.Path(sys.argv[1])
arena = Arena.create(4096, directory)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert (directory / arena.name).exists()
"""
    subprocess.run([sys.executable, "-c", script, str(shm)], check=True, timeout=60)
    assert files(shm) == set(), "the owner removed it at its own exit"


# --- hostile --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../etc/passwd",
        "lmcache_kernels_" + "0" * 31 + "/",
        "/" + STALE,
        STALE + "\n",
        STALE + "\0",
        STALE.upper(),
        "psm_1234",
        "x" * 10_000,
    ],
)
def test_strange_names_are_not_even_looked_at(shm: Path, name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="arena name"):
        Arena.attach(name, PAGE, shm)


def test_attach_refuses_what_is_not_the_region(shm: Path) -> None:
    path = shm / STALE
    with pytest.raises(PeerGone, match="not there"):
        Arena.attach(STALE, PAGE, shm)
    path.write_bytes(bytes(PAGE))
    with pytest.raises(RemoteProtocolError, match=f"expected {PAGE + 1}, got {PAGE}"):
        Arena.attach(STALE, PAGE + 1, shm)
    with pytest.raises(RemoteProtocolError, match="arena size"):
        Arena.attach(STALE, 0, shm)
    path.rename(shm / "target")
    path.symlink_to(shm / "target")
    with pytest.raises(RemoteProtocolError, match="cannot be opened"):
        Arena.attach(STALE, PAGE, shm)
    path.unlink()
    path.mkdir()
    with pytest.raises(RemoteProtocolError):
        Arena.attach(STALE, PAGE, shm)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(RemoteProtocolError, match="regular file"):
        Arena.attach(STALE, PAGE, shm)


def test_attach_refuses_another_users_region(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(PAGE, shm)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RemoteProtocolError, match="user id: expected 12345"):
        Arena.attach(arena.name, PAGE, shm)
    assert sweep_stale_segments(shm) == []
    arena.close()


def test_sweep_leaves_everything_else_alone(shm: Path) -> None:
    (shm / "psm_foreign").write_bytes(b"x")
    (shm / "lmcache_kernels_short").write_bytes(b"x")
    (shm / ("lmcache_kernels_" + "1" * 32)).symlink_to(shm / "psm_foreign")
    (shm / ("lmcache_kernels_" + "2" * 32)).mkdir()
    (shm / STALE).write_bytes(b"x")
    live = Arena.create(PAGE, shm)
    before = files(shm)
    assert STALE not in before, "create sweeps"
    (shm / STALE).write_bytes(b"x")
    assert sweep_stale_segments(shm) == [STALE]
    assert files(shm) == before
    live.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_arenas_are_refused(shm: Path, nbytes: int) -> None:
    with pytest.raises(ConfigError, match=">= 1 byte"):
        Arena.create(nbytes, shm)


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Arena.create(PAGE, tmp_path / "nowhere")


def test_a_creator_that_meets_a_sweeper_makes_another(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between creating a segment and locking it, a sweeper may take it for a dead one's."""
    try_lock, swept = arena_module._try_lock, []

    def swept_first(descriptor: int) -> bool:
        if len(swept) < 3:
            monkeypatch.setattr(arena_module, "_try_lock", try_lock)
            swept.extend(sweep_stale_segments(shm))
            monkeypatch.setattr(arena_module, "_try_lock", swept_first)
        return try_lock(descriptor)

    monkeypatch.setattr(arena_module, "_try_lock", swept_first)
    arena = Arena.create(PAGE, shm)
    assert len(swept) == 3
    assert files(shm) == {arena.name}
    arena.close()


# --- faults ---------------------------------------------------------------------------------------


def test_fault_f01_killed_owners_are_swept_by_the_next(shm: Path) -> None:
    """SIGKILL and start again, five times: shared memory does not fill, the living are spared."""
    neighbour = start_owner(shm)
    spared = name_of(neighbour)
    sizes = []
    for _ in range(5):
        owner = start_owner(shm)
        name = name_of(owner)
        assert files(shm) == {spared, name}
        sizes.append(used_bytes(shm))
        kill(owner)
        assert name in files(shm), "nobody could clean up"
    assert sizes == [2 * MIB] * 5
    last = start_owner(shm)
    name = name_of(last)
    assert files(shm) == {spared, name}
    finish(last)
    assert files(shm) == {spared}
    attached = Arena.attach(spared, MIB, shm)
    assert bytes(attached.view(0, 5)) == b"alive"
    attached.close()
    finish(neighbour)
    assert files(shm) == set()


def test_fault_f01_an_exit_without_close_leaves_nothing(shm: Path) -> None:
    """An owner that just ends, or ends with an exception, removes its segment on the way out."""
    for end in ("pass", "sys.exit(0)"):
        owner = start_owner(shm, end=end)
        assert name_of(owner) in files(shm)
        finish(owner)
        assert files(shm) == set()


def test_fault_f01_attached_processes_do_not_keep_a_segment_alive(shm: Path) -> None:
    """Only the owner's life counts; who attached keeps the bytes, not the name."""
    owner = start_owner(shm)
    name = name_of(owner)
    attached = Arena.attach(name, MIB, shm)
    kill(owner)
    assert sweep_stale_segments(shm) == [name]
    assert bytes(attached.view(0, 5)) == b"alive"
    attached.close()


def test_fault_f03_more_than_there_is_fails_at_once(shm: Path) -> None:
    """A pool larger than shared memory: an error with need, have and remedy; nothing is left."""
    status = os.statvfs(shm)
    need = status.f_blocks * status.f_frsize + PAGE
    with pytest.raises(CapacityError, match=rf"need {need} bytes in .*, have \d+ \(.*--shm-size"):
        Arena.create(need, shm)
    assert files(shm) == set()


@pytest.mark.parametrize("code", [errno.EFAULT, errno.ENOMEM, errno.ENOSPC, errno.EIO])
def test_fault_f03_a_reservation_that_fails_half_way_leaves_nothing(
    shm: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Somebody else takes the room after it was counted, or the system fails in another way."""
    allocate = arena_module.allocate_pages

    def fails_after_a_while(address: int, nbytes: int, descriptor: int) -> None:
        allocate(address, 2 * PAGE, descriptor)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(arena_module, "allocate_pages", fails_after_a_while)
    expected = ConfigError if code == errno.EIO else CapacityError
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(expected):
        Arena.create(4 * PAGE + 1, shm)
    assert files(shm) == set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def on_a_small_file_system(directory: Path, nbytes: int, script: str, options: str = "") -> None:
    """Run a script with ``directory`` on a file system of its own."""
    mount = f'mount -t tmpfs -o size={nbytes}{options} none "$0" 2>/dev/null || exit 77; exec "$@"'
    python = [sys.executable, "-c", script, str(directory)]
    try:
        result = subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount, directory, *python],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        pytest.skip("no unshare command")
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("this user may not mount a file system of its own")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("populate", [True, False], ids=["populate", "fallocate"])
def test_fault_f03_a_small_file_system_never_means_sigbus(shm: Path, populate: bool) -> None:
    """On a real file system of 1 MiB: refused by its count and by its reservation; what fits works."""
    script = f"""
import sys, pathlib
from lmcache_kernels.errors import CapacityError
from lmcache_kernels.transfer.memory import arena
from lmcache_kernels.transfer.memory import first_touch
directory = pathlib.Path(sys.argv[1])
first_touch.PIECE_BYTES = 1 << 18
if not {populate}:
    first_touch._MADV_POPULATE_WRITE = 12345
def refused():
    try:
        arena.Arena.create({MIB + PAGE}, directory)
    except CapacityError as error:
        assert "have {MIB}" in str(error), error
        assert not list(directory.iterdir())
        return True
assert refused()
arena.check_room = lambda *_: None
assert refused()
fits = arena.Arena.create({MIB}, directory)
fits.view(0, {MIB})[:] = b"x" * {MIB}
fits.close()
"""
    on_a_small_file_system(shm, MIB, script)


def test_fault_f03_starts_that_race_for_the_room_all_end_well(shm: Path) -> None:
    """Room for one and a half: each of two gets all of it or an error, and nobody a SIGBUS."""
    script = """
import os, pathlib, sys
from lmcache_kernels.errors import CapacityError
from lmcache_kernels.transfer.memory import arena
directory = pathlib.Path(sys.argv[1])
arena.check_room = lambda *_: None
def race():
    for _ in range(40):
        try:
            mine = arena.Arena.create(2 << 20, directory)
        except CapacityError:
            continue
        mine.view(0, mine.nbytes)[:] = bytes([7]) * mine.nbytes
        mine.close()
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        race()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
assert not list(directory.iterdir())
"""
    on_a_small_file_system(shm, 3 * MIB, script)


def test_fault_f03_concurrent_starts_do_not_take_each_others_segments(shm: Path) -> None:
    """Many owners start at once while sweepers run all the time: everybody keeps their own."""
    ended = threading.Event()
    swept: list[str] = []

    def sweep() -> None:
        while not ended.is_set():
            swept.extend(sweep_stale_segments(shm))

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        owners = [start_owner(shm) for _ in range(6)]
        mine = [Arena.create(PAGE, shm) for _ in range(100)]
        names = {name_of(owner) for owner in owners}
    finally:
        ended.set()
        sweeper.join(30)
    kept = names | {arena.name for arena in mine}
    assert len(kept) == 106
    assert files(shm) == kept
    assert kept.isdisjoint(swept)
    for arena in mine:
        arena.close()
    for owner in owners:
        finish(owner)
    assert files(shm) == set()


def test_fault_f08_what_was_asked_for_is_what_is_used(shm: Path) -> None:
    """Neither the file nor the process grows by more than 2 % beyond the request: no power of two."""
    asked = 5 * MIB
    resident = resident_shared_memory()
    arena = Arena.create(asked, shm)
    assert asked <= used_bytes(shm) <= 1.02 * asked
    assert asked <= resident_shared_memory() - resident <= 1.02 * asked
    attached = Arena.attach(arena.name, asked, shm)
    assert used_bytes(shm) <= 1.02 * asked, "attaching takes no second copy"
    attached.close()
    arena.close()
    assert resident_shared_memory() - resident <= 0.02 * asked


def resident_shared_memory() -> int:
    """Bytes of shared memory that this process has mapped and touched."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("RssShmem:") + 1]) << 10
