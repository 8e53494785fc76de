"""What can happen to a Mooncake Store: machines that hang or die, memory that is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servicekit import WAIT, pause, wait_until
from tier_rig import content, new_keys
from tier_stores import TIMEOUT, opened

from lmcache_kernels.adapters.tiers.mooncake_client import connect
from lmcache_kernels.adapters.tiers.opening import open_tier
from lmcache_kernels.errors import TierUnavailable

SLOT = 1 << 20

OWNER = """
import sys
sys.path.insert(0, sys.argv[2])
from tier_rig import Rig, content
from lmcache_kernels.adapters.tiers.opening import open_tier
keys = [(b"o" * 32, bytes([number]) * 32) for number in range(4)]
rig = Rig(open_tier(sys.argv[1]))
assert rig.put({key: content(key, 1 << 20) for key in keys}) == [True] * 4
print("ready", flush=True)
sys.stdin.read()
"""
KEYS = [(b"o" * 32, bytes([number]) * 32) for number in range(4)]


def chunks(keys, nbytes=SLOT):
    return {key: content(key, nbytes) for key in keys}


def lengths(keys, nbytes=SLOT):
    return dict.fromkeys(keys, nbytes)


@pytest.fixture
def store():
    with opened("mooncake") as store:
        yield store


@pytest.fixture
def owner(store):
    """Another machine, in whose memory four chunks lie."""
    kit = Path(__file__).resolve().parents[1] / "kit"
    url = f"{store.url}?segment_gb=0.1&timeout_seconds={TIMEOUT}"
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, url, str(kit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate(timeout=WAIT)


def test_chunks_come_from_the_memory_of_another_machine(store, owner):
    rig = store.open(segment_gb=0)
    assert rig.exists(KEYS) == [True] * 4
    assert rig.get(lengths(KEYS)) == list(chunks(KEYS).values())
    more = new_keys(2)
    assert rig.put(chunks(more)) == [True, True]  # into the memory of the other
    assert rig.get(lengths(more)) == list(chunks(more).values())


def test_a_machine_that_hangs_is_missed_in_time_and_writes_nothing_later(store, owner):
    rig = store.open(segment_gb=0)
    assert rig.get(lengths(KEYS[:1])) == [content(KEYS[0], SLOT)]
    pause(owner)
    place = rig.arena[: 4 * SLOT]
    began = time.monotonic()
    got = rig.tier.get_into(KEYS, [place[i * SLOT :][:SLOT] for i in range(4)])
    assert time.monotonic() - began < 3 * TIMEOUT + 2
    assert got == [False] * 4
    place[:] = bytes(4 * SLOT)
    owner.send_signal(signal.SIGCONT)
    # Whatever was still on its way is here when another chunk has come the same way, or could not.
    wait_until(lambda: rig.get(lengths(KEYS[:1]))[0] in (content(KEYS[0], SLOT), None))
    assert not any(place[2 * SLOT :])


def test_a_machine_that_is_killed_is_a_miss(store, owner):
    rig = store.open(segment_gb=0)
    assert rig.get(lengths(KEYS)) == list(chunks(KEYS).values())
    owner.kill()
    owner.wait(WAIT)
    began = time.monotonic()
    assert rig.get(lengths(KEYS)) == [None] * 4
    assert time.monotonic() - began < 3 * TIMEOUT + 2


def test_memory_that_is_full_takes_no_chunk_and_is_not_away(store):
    rig = store.open(segment_gb=0.02)
    keys = new_keys(24)
    done = rig.put(chunks(keys))
    assert any(done)
    assert not all(done)
    # The store lets some go when it is full.
    for key, ok, got in zip(keys, done, rig.get(lengths(keys)), strict=True):
        assert got is None or (ok and got == content(key, SLOT))


def test_a_damaged_value_is_a_miss_and_goes(store):
    rig = store.open()
    first, second = new_keys(2)
    rig.put(chunks([first], 4096))
    client = connect(
        ("127.0.0.1", store.service.port),
        TIMEOUT,
        local_hostname="127.0.0.1",
        metadata_server="P2PHANDSHAKE",
        global_segment_size=0,
        protocol="tcp",
    )
    names = [f"lmk:{shard.hex()}{digest.hex()}" for shard, digest in (first, second)]
    value = client.get(names[0])
    assert value[:4096] == content(first, 4096)
    assert client.put(names[1], value) == 0  # under the name of another
    assert client.put("lmk:notes", b"mine") == 0
    assert rig.exists([second]) == [True]
    assert rig.get(lengths([second], 4096)) == [None]
    assert rig.exists([second]) == [False]
    assert rig.tier.stats() == {"damaged": 1}
    rig.tier.clear([])
    assert client.get("lmk:notes") == b"mine"
    client.close()


def test_what_the_operator_has_set_stays(store, monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "3000")
    rig = store.open()
    assert rig.exists(new_keys(1)) == [False]
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "3000"
    store.service.pause()
    began = time.monotonic()
    with pytest.raises(TierUnavailable, match="does not answer"):
        rig.exists(new_keys(1))
    assert time.monotonic() - began > 2.5
    store.service.resume()


def test_a_store_that_cannot_be_set_up_is_away(store):
    rig = store.open(metadata="http://127.0.0.1:1/metadata")
    with pytest.raises(TierUnavailable, match="could not be set up, code"):
        rig.exists(new_keys(1))


def test_a_tier_without_an_arena_is_away():
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    tier = open_tier("mooncake://127.0.0.1:1")
    with pytest.raises(TierUnavailable, match="no arena"):
        tier.exists(new_keys(1))
    tier.close()
