"""What can happen to files: full disks, torn and foreign files, links, writers that are killed."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from servicekit import WAIT
from tier_rig import content, new_keys
from tier_stores import Store

from lmcache_kernels.adapters.tiers import files as files_module
from lmcache_kernels.adapters.tiers.file_index import BLOCK
from lmcache_kernels.adapters.tiers.sealing import SEAL_BYTES
from lmcache_kernels.errors import TierUnavailable

SLOT = 4096
ROOM = 2 * BLOCK
"""What a file with such a slot takes: the seal begins another block."""


def chunks(keys, nbytes=SLOT):
    return {key: content(key, nbytes) for key in keys}


def lengths(keys, nbytes=SLOT):
    return dict.fromkeys(keys, nbytes)


def root(store):
    return Path(store.url.removeprefix("file://"))


def path(store, key):
    shard, digest = key[0].hex(), key[1].hex()
    return root(store) / shard / digest[:2] / digest


@pytest.fixture
def store(files_store):
    return files_store


@pytest.fixture
def rig(store):
    return store.open()


@pytest.fixture
def key(rig):
    (key,) = new_keys(1)
    assert rig.put(chunks([key])) == [True]
    return key


def test_files_are_where_the_docs_say_and_nobody_elses(store, rig, key):
    file = path(store, key)
    assert file.stat().st_size == SLOT + SEAL_BYTES
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (root(store), file.parent, file.parent.parent, root(store) / "tmp"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list((root(store) / "tmp").iterdir()) == []


def test_a_restart_finds_what_was_kept_in_the_order_of_use(store, rig):
    keys = new_keys(4)
    rig.put(chunks(keys))
    for age, key in enumerate(keys):
        os.utime(path(store, key), (1_000_000 - age, 1_000_000 - age))
    rig.get(lengths(keys[3:]))  # the oldest becomes the newest
    rig.close()
    again = store.open(size_gb=ROOM * 3 / 1e9)
    assert again.exists(keys) == [True, True, False, True]
    assert again.get(lengths(keys)) == [*chunks(keys[:2]).values(), None, content(keys[3], SLOT)]
    assert again.tier.stats() == {
        "used_bytes": 3 * ROOM,
        "chunks": 3,
        "evicted": 1,
        "damaged": 0,
    }


# --- damage ----------------------------------------------------------------------------------------


def flip(position):
    def damage(file):
        data = bytearray(file.read_bytes())
        data[position] ^= 0x10
        file.write_bytes(data)

    return damage


def become(change):
    def damage(file):
        file.unlink()
        change(file)

    return damage


DAMAGE = {
    "flipped in the header": flip(3),
    "flipped in the payload": flip(SLOT - 1),
    "flipped in the seal's magic": flip(SLOT),
    "flipped in the seal's length": flip(SLOT + 16),
    "flipped in the hash": flip(SLOT + SEAL_BYTES - 1),
    "cut to nothing": lambda file: os.truncate(file, 0),
    "cut in the slot": lambda file: os.truncate(file, 1000),
    "cut in the seal": lambda file: os.truncate(file, SLOT + 5),
    "cut before the seal": lambda file: os.truncate(file, SLOT),
    "longer": lambda file: os.truncate(file, SLOT + SEAL_BYTES + 1),
    "zeros, as after a power failure": lambda file: file.write_bytes(bytes(SLOT + SEAL_BYTES)),
    "somebody's": lambda file: file.write_text("a note"),
    "a link to nothing": become(lambda file: file.symlink_to("/nowhere")),
    "a link to itself": become(lambda file: file.symlink_to(file)),
    "a pipe": become(os.mkfifo),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_a_miss_and_is_replaced(store, rig, key, how):
    DAMAGE[how](path(store, key))
    assert rig.get(lengths([key])) == [None]
    assert rig.exists([key]) == [False]
    assert rig.put(chunks([key])) == [True]
    assert rig.get(lengths([key])) == [content(key, SLOT)]


def test_a_directory_in_the_place_of_a_file_is_left_alone(store, rig, key):
    path(store, key).unlink()
    path(store, key).mkdir()
    (path(store, key) / "keep").touch()
    assert rig.get(lengths([key])) == [None]
    assert rig.exists([key]) == [False]
    assert rig.put(chunks([key])) == [False]
    rig.tier.clear([])
    assert (path(store, key) / "keep").exists()


def test_the_chunk_of_another_name_is_a_miss(store, rig):
    first, second = new_keys(2)
    rig.put(chunks([first, second]))
    path(store, second).write_bytes(path(store, first).read_bytes())
    assert rig.get(lengths([first, second])) == [content(first, SLOT), None]


def test_a_file_that_others_remove_is_a_miss(store, rig, key):
    path(store, key).unlink()
    assert rig.get(lengths([key])) == [None]
    assert rig.exists([key]) == [False]


def test_damage_that_the_disk_reports_is_a_miss(rig, key, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, "preadv", broken)
    assert rig.get(lengths([key])) == [None]
    assert rig.tier.stats()["damaged"] == 1


# --- links and foreign things ----------------------------------------------------------------------


def test_no_link_leads_out_of_the_directory(store, rig, tmp_path):
    first, second, third = (new_keys(1)[0] for _ in range(3))
    outside = tmp_path / "outside"
    outside.mkdir()
    rig.put(chunks([first]))
    shard = root(store) / second[0].hex()
    shard.symlink_to(outside)
    middle = root(store) / third[0].hex()
    middle.mkdir()
    (middle / third[1].hex()[:2]).symlink_to(outside)
    (outside / second[1].hex()[:2]).mkdir()
    for key in (second, third):
        (outside / key[1].hex()).write_bytes(path(store, first).read_bytes())
    before = sorted(outside.rglob("*"))
    assert rig.put(chunks([second, third])) == [False, False]
    assert rig.exists([second, third]) == [False, False]
    assert rig.get(lengths([second, third])) == [None, None]
    rig.tier.remove([second, third])
    rig.tier.clear([])
    assert sorted(outside.rglob("*")) == before


def test_what_is_somebody_elses_stays(store, rig, key):
    notes = [
        root(store) / "README",
        root(store) / key[0].hex() / "README",
        path(store, key).parent / "README",
        path(store, key).parent / ("f" * 63),
        path(store, key).parent / (f"{(key[1][0] + 1) % 256:02x}" + "f" * 62),
        root(store) / "tmp" / "README",
    ]
    for note in notes:
        note.write_text("mine")
    rig.close()
    again = store.open(size_gb=3 * ROOM / 1e9)
    assert again.tier.stats()["chunks"] == 1
    again.put(chunks(new_keys(5)))
    again.tier.clear([])
    assert [note.read_text() for note in notes] == ["mine"] * len(notes)


def test_a_directory_that_goes_is_away_and_may_come_back_empty(store, rig, key):
    subprocess.run(["rm", "-rf", root(store)], check=True)
    for call in (lambda: rig.put(chunks([key])), lambda: rig.get(lengths([key]))):
        with pytest.raises(TierUnavailable, match="has gone"):
            call()
    assert not root(store).exists()
    root(store).mkdir()
    assert rig.get(lengths([key])) == [None]
    assert rig.put(chunks([key])) == [True]
    assert rig.get(lengths([key])) == [content(key, SLOT)]


def test_a_directory_that_cannot_be_one_is_away_until_it_can(store):
    root(store).write_text("a file")
    rig = store.open()
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="exists"):
            rig.exists(new_keys(1))
    root(store).unlink()
    keys = new_keys(2)
    assert rig.put(chunks(keys)) == [True, True]


# --- room ------------------------------------------------------------------------------------------


def test_room_is_bounded_and_the_one_used_least_lately_goes(store):
    rig = store.open(size_gb=4 * ROOM / 1e9)
    keys = new_keys(4)
    rig.put(chunks(keys))
    rig.get(lengths(keys[:1]))
    more = new_keys(2)
    assert rig.put(chunks(more)) == [True, True]
    assert rig.exists(keys) == [True, False, False, True]
    files = [file for file in root(store).rglob("*") if file.is_file()]
    assert len(files) == 4
    assert rig.tier.stats()["used_bytes"] == 4 * ROOM


def test_a_chunk_that_can_never_fit_is_refused_and_pushes_nothing_out(store):
    rig = store.open(size_gb=4 * ROOM / 1e9)
    keys = new_keys(4)
    rig.put(chunks(keys))
    assert rig.put(chunks(new_keys(1), 4 * ROOM)) == [False]
    assert rig.exists(keys) == [True] * 4


def test_servers_that_share_a_directory_stay_within_its_bound_together(store):
    capacity = 64 * ROOM
    rigs = [store.open(size_gb=capacity / 1e9) for _ in range(2)]
    shard = new_keys(1)[0][0]
    most = 0
    for _ in range(10):
        for rig in rigs:
            # Few folders, so that one look at a folder sees many files.
            keys = [(shard, bytes([digest[0] % 4]) + digest[1:]) for _, digest in new_keys(16)]
            assert rig.put(chunks(keys)) == [True] * 16
            files = sum(file.is_file() for file in root(store).rglob("*"))
            most = max(most, files * ROOM)
    assert capacity / 2 < most <= capacity * 1.5


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A directory with room for 128 KiB: a file system of its own where it can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k,mode=0700", "none", disk]
    mounted = not subprocess.run(mount, capture_output=True).returncode
    if not mounted:
        write = os.pwritev

        def write_if_there_is_room(file, parts, position):
            used = sum(f.stat().st_size for f in disk.rglob("*") if f.is_file())
            if used + sum(len(part) for part in parts) > 128 << 10:
                raise OSError(errno.ENOSPC, "no space left")
            return write(file, parts, position)

        monkeypatch.setattr(os, "pwritev", write_if_there_is_room)
    yield disk
    if mounted:
        subprocess.run(["umount", disk], check=True)


def test_a_full_disk_makes_room_and_else_refuses(small_disk):
    store = Store(None, f"file://{small_disk}", {"size_gb": 1})
    rig = store.open()
    keys = new_keys(40)
    for key in keys:
        assert rig.put(chunks([key])) == [True]
    there = rig.exists(keys)
    assert there[-1]
    assert 5 < sum(there) < 33
    assert rig.tier.stats()["evicted"] == 40 - sum(there)
    assert rig.get(lengths(keys[-1:])) == [content(keys[-1], SLOT)]
    assert rig.put(chunks(new_keys(1), 256 << 10)) == [False]  # more than the disk has
    assert list((small_disk / "tmp").iterdir()) == []
    (key,) = new_keys(1)
    assert rig.put(chunks([key])) == [True]
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_finds_no_room_leaves_nothing(store, rig, code, monkeypatch):
    write, calls = os.pwritev, []

    def torn(file, parts, position):
        calls.append(position)
        if position:
            raise OSError(code, os.strerror(code))
        return write(file, [parts[0][:1000]], position)

    monkeypatch.setattr(os, "pwritev", torn)
    keys = new_keys(1)
    assert rig.put(chunks(keys)) == [False]
    assert calls
    assert [file for file in root(store).rglob("*") if file.is_file()] == []
    monkeypatch.undo()
    assert rig.put(chunks(keys)) == [True]


def test_short_reads_and_writes_are_gone_on_with(rig, monkeypatch):
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: write(file, [parts[0][:777]], at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: read(file, [parts[0][:999]], at))
    keys = new_keys(2)
    assert rig.put(chunks(keys)) == [True, True]
    assert rig.get(lengths(keys)) == list(chunks(keys).values())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_disk_that_fails_is_away_and_no_other_error_gets_out(rig, code, monkeypatch):
    def fails(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fails)
    for nbytes in (SLOT, files_module.LARGE):  # by the caller, and by threads
        with pytest.raises(TierUnavailable, match=r"files?"):
            rig.put(chunks(new_keys(3), nbytes))
    monkeypatch.setattr(os, "open", fails)
    for call in (rig.exists, rig.tier.remove, lambda keys: rig.get(lengths(keys))):
        with pytest.raises(TierUnavailable):
            call(new_keys(2))
    with pytest.raises(TierUnavailable):
        rig.tier.clear([])


def test_what_is_synced_is_there(store):
    rig = store.open(fsync=1)
    keys = new_keys(3)
    assert rig.put(chunks(keys)) == [True] * 3
    assert rig.get(lengths(keys)) == list(chunks(keys).values())


# --- writers that die ------------------------------------------------------------------------------

WRITER = """
import mmap, os, sys
sys.path.insert(0, sys.argv[2])
from tier_rig import Rig, content, new_keys
from lmcache_kernels.adapters.tiers.opening import open_tier
rig = Rig(open_tier(sys.argv[1]))
print("ready", flush=True)
while True:
    keys = new_keys(4, b"w" * 32)
    rig.put({key: content(key, 300_000) for key in keys})
"""


def test_a_writer_that_is_killed_leaves_whole_files_only(store, full):
    kit = Path(__file__).resolve().parents[1] / "kit"
    url = f"{store.url}?size_gb=1"
    for _ in range(30 if full else 5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, url, str(kit)], stdout=subprocess.PIPE
        )
        assert writer.stdout.readline() == b"ready\n"
        # Killed as soon as the next file is begun: no time is waited for.
        seen = set()
        temporary = root(store) / "tmp"
        while not set(os.listdir(temporary)) - seen:
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.wait(WAIT)
        writer.stdout.close()
        rig = store.open()
        assert list(temporary.iterdir()) == []
        found = sorted(rig.tier._index._room)
        got = rig.get(lengths(found[:100], 300_000))
        assert got == [content(key, 300_000) for key in found[:100]]
        rig.tier.clear([])
        rig.close()


def test_what_a_living_writer_is_writing_is_not_swept(store, rig, monkeypatch):
    write = os.pwritev

    def interrupted(file, parts, position):
        store.open()  # another server starts just now
        return write(file, parts, position)

    monkeypatch.setattr(os, "pwritev", interrupted)
    keys = new_keys(1)
    assert rig.put(chunks(keys)) == [True]
