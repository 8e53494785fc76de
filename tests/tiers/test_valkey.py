"""What can happen to a Valkey or Redis server, and to what is stored there."""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time

import pytest
from servicekit import WAIT, asked, free_port, running_redis, running_redis_cluster, wait_until
from tier_rig import content, new_keys
from tier_stores import BOUND, Store, opened

from lmcache_kernels.adapters.tiers.sealing import SEAL_BYTES
from lmcache_kernels.errors import TierUnavailable

pytest.importorskip("valkey")

SLOT = 4096
SECRET = "hunter2-do-not-show"


def chunks(keys, nbytes=SLOT):
    return {key: content(key, nbytes) for key in keys}


def lengths(keys, nbytes=SLOT):
    return dict.fromkeys(keys, nbytes)


def name(key, prefix="lmk:"):
    return f"{prefix}{key[0].hex()}{key[1].hex()}"


@pytest.fixture(scope="module")
def shared():
    with opened("valkey") as store:
        yield store


@pytest.fixture(scope="module")
def server(shared):
    """A client of the server's own."""
    from valkey import Valkey

    with Valkey(port=shared.service.port) as client:
        yield client


@pytest.fixture
def rig(shared, server):
    server.flushall()
    return shared.open()


@pytest.fixture
def key(rig):
    (key,) = new_keys(1)
    assert rig.put(chunks([key])) == [True]
    return key


def test_a_value_is_the_slot_and_its_seal(server, key):
    value = server.get(name(key))
    assert value[:SLOT] == content(key, SLOT)
    assert len(value) == SLOT + SEAL_BYTES
    assert server.ttl(name(key)) == -1


def test_a_chunk_that_has_its_time_is_forgotten(shared, server, rig):
    keys = new_keys(2)
    brief = shared.open(ttl_seconds=100)
    assert brief.put(chunks(keys)) == [True, True]
    assert 90 < server.ttl(name(keys[0])) <= 100
    assert rig.get(lengths(keys)) == list(chunks(keys).values())


# --- what others do to the values ------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, SLOT - 1, SLOT, SLOT + SEAL_BYTES - 1])
def test_a_damaged_value_is_a_miss_and_goes(server, rig, key, position):
    byte = server.getrange(name(key), position, position)[0]
    server.setrange(name(key), position, bytes([byte ^ 4]))
    assert rig.get(lengths([key])) == [None]
    assert server.exists(name(key)) == 0
    assert rig.tier.stats() == {"damaged": 1}
    assert rig.put(chunks([key])) == [True]
    assert rig.get(lengths([key])) == [content(key, SLOT)]


@pytest.mark.parametrize(
    "foreign",
    [b"", b"a note", bytes(SLOT), bytes(SLOT + SEAL_BYTES), bytes(SLOT + SEAL_BYTES + 1)],
    ids=len,
)
def test_a_foreign_value_is_a_miss_and_is_replaced(server, rig, key, foreign):
    server.set(name(key), foreign)
    assert rig.get(lengths([key])) == [None]
    assert rig.put(chunks([key])) == [True]
    assert rig.get(lengths([key])) == [content(key, SLOT)]


def test_a_key_of_another_type_is_a_miss_and_is_replaced(server, rig):
    keys = new_keys(3)
    rig.put(chunks(keys[:1]))
    server.rpush(name(keys[1]), "x")
    assert rig.get(lengths(keys)) == [content(keys[0], SLOT), None, None]
    assert rig.put(chunks(keys)) == [True] * 3
    assert rig.get(lengths(keys)) == list(chunks(keys).values())


def test_no_more_of_a_value_is_read_than_a_chunk_may_be_long(server, rig, key):
    server.set(name(key), bytes(64 << 20))
    sent = server.info("stats")["total_net_output_bytes"]
    assert rig.get(lengths([key])) == [None]
    assert server.info("stats")["total_net_output_bytes"] - sent < 1 << 20


def test_the_value_of_another_name_is_a_miss(server, rig):
    first, second = new_keys(2)
    rig.put(chunks([first]))
    server.set(name(second), server.get(name(first)))
    assert rig.get(lengths([first, second])) == [content(first, SLOT), None]


def test_clear_touches_nothing_of_anybody_else(shared, server, rig, key):
    other = shared.open(prefix="lmk:other:")
    other.put(chunks([key]))
    foreign = ["x", "lmk:", "lmk:notes", name(key) + "0", name(key)[:-1], "x" + name(key)]
    for one in foreign:
        server.set(one, "mine")
    rig.tier.clear([])
    assert rig.exists([key]) == [False]
    assert other.exists([key]) == [True]
    assert server.mget(foreign) == [b"mine"] * len(foreign)


# --- what the server does --------------------------------------------------------------------------


def test_what_is_there_is_not_sent_again(server, rig):
    keys = new_keys(2)
    rig.put(chunks(keys, 1 << 20))
    before = server.info("stats")["total_net_input_bytes"]
    assert rig.put(chunks(keys, 1 << 20)) == [True, True]
    assert server.info("stats")["total_net_input_bytes"] - before < 10_000


def test_a_server_that_is_full_refuses_chunks_and_is_not_away():
    with running_redis("--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as service:
        store = Store(service, f"valkey://127.0.0.1:{service.port}")
        rig = store.open()
        keys = new_keys(24)
        done = rig.put(chunks(keys, 1 << 20))
        assert done[0]
        assert not done[-1]
        found = [content(key, 1 << 20) if ok else None for key, ok in zip(keys, done, strict=True)]
        assert rig.get(lengths(keys, 1 << 20)) == found
        rig.tier.remove(keys)
        assert rig.put(chunks(keys[:2], 1 << 20)) == [True, True]
        store.close()


def test_a_replica_that_takes_nothing_is_away_for_writers():
    with running_redis() as service:
        store = Store(service, f"valkey://127.0.0.1:{service.port}", {"timeout_seconds": 1})
        rig = store.open()
        asked(service.port, f"REPLICAOF 127.0.0.1 {free_port()}")
        with pytest.raises(TierUnavailable, match="ReadOnlyError"):
            rig.put(chunks(new_keys(1)))
        assert rig.exists(new_keys(1)) == [False]
        asked(service.port, "REPLICAOF NO ONE")
        assert rig.put(chunks(new_keys(1))) == [True]
        store.close()


def test_a_password_is_needed_and_never_shown(caplog):
    with running_redis("--requirepass", SECRET) as service, caplog.at_level(logging.DEBUG):
        for credentials, works in ((f":{SECRET}@", True), ("", False), (f":{SECRET[1:]}@", False)):
            store = Store(service, f"valkey://{credentials}127.0.0.1:{service.port}")
            rig = store.open()
            if works:
                assert rig.put(chunks(new_keys(1))) == [True]
            else:
                with pytest.raises(TierUnavailable, match="Authentication") as error:
                    rig.put(chunks(new_keys(1)))
                assert SECRET[1:] not in str(error.value)
                assert error.value.__suppress_context__
            store.close()
    assert SECRET[1:] not in caplog.text


def test_a_server_that_speaks_something_else_is_away():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            while True:
                connection, _ = listener.accept()
                with connection:
                    if connection.recv(1000) == b"stop":
                        return
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        store = Store(None, f"valkey://127.0.0.1:{port}", {"timeout_seconds": 1})
        rig = store.open()
        for _ in range(3):
            with pytest.raises(TierUnavailable):
                rig.get(lengths(new_keys(2)))
        store.close()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"stop")
        thread.join(WAIT)
        assert not thread.is_alive()


def test_a_call_that_is_out_of_time_begins_no_further_batch(shared, server, rig, monkeypatch):
    from lmcache_kernels.adapters.tiers import valkey

    monkeypatch.setattr(valkey, "MOST_NAMES", 2)
    clock = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock, 3.0))
    keys = new_keys(8)
    got = rig.put(chunks(keys))
    monkeypatch.undo()
    assert got == [True] * 4 + [False] * 4
    assert rig.exists(keys) == got


def test_with_tls_the_server_must_be_the_one_it_says(tmp_path):
    files = certificates(tmp_path)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "yes"]
    for option, file in (("cert", "server.crt"), ("key", "server.key"), ("ca-cert", "ca.crt")):
        options += [f"--tls-{option}-file", str(tmp_path / file)]
    with running_redis(*options):
        ours = {"tls_ca": files / "ca.crt", "timeout_seconds": 2}
        ours |= {"tls_cert": files / "server.crt", "tls_key": files / "server.key"}
        store = Store(None, f"rediss://127.0.0.1:{port}", ours)
        keys = new_keys(2)
        rig = store.open()
        assert rig.put(chunks(keys)) == [True, True]
        assert rig.get(lengths(keys)) == list(chunks(keys).values())
        for less in (["tls_ca"], ["tls_cert", "tls_key"]):
            fewer = {name: value for name, value in ours.items() if name not in less}
            stranger = Store(None, f"valkeys://127.0.0.1:{port}", fewer)
            with pytest.raises(TierUnavailable):
                stranger.open().exists(keys)
            stranger.close()
        store.close()


def certificates(folder):
    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj")
    openssl(*new, "/CN=ca", "-x509", "-keyout", "ca.key", "-out", "ca.crt")
    openssl(*new, "/CN=server", "-keyout", "server.key", "-out", "server.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", *authority, "-out", "server.crt")
    return folder


# --- clusters --------------------------------------------------------------------------------------


def test_a_cluster_whose_slots_move_is_followed():
    with running_redis_cluster(2) as service:
        store = Store(service, f"valkey://127.0.0.1:{service.port}", {"cluster": 1})
        rig = store.open()
        keys = new_keys(32)
        assert rig.put(chunks(keys)) == [True] * 32
        first, second = (one.port for one in service.services)
        rig.tier.clear([])
        target = asked(second, "CLUSTER MYID").split(b"\r\n")[1].decode()
        for node in (second, first):
            for slot in range(0, 8192, 64):
                asked(node, f"CLUSTER SETSLOT {slot} NODE {target}")

        def follows():
            return rig.put(chunks(keys)) == [True] * 32

        before = time.monotonic()
        rig.put(chunks(keys))  # those that have moved are refused once
        wait_until(follows, seconds=BOUND)
        assert time.monotonic() - before < BOUND
        assert rig.get(lengths(keys)) == list(chunks(keys).values())
        store.close()


def test_a_cluster_of_which_a_node_is_killed_is_away_until_it_is_back():
    with running_redis_cluster(2) as service:
        options = {"cluster": 1, "timeout_seconds": 1}
        store = Store(service, f"valkey://127.0.0.1:{service.services[1].port}", options)
        rig = store.open()
        keys = new_keys(32)
        assert rig.put(chunks(keys)) == [True] * 32
        service.services[1].kill()
        began = time.monotonic()
        with pytest.raises(TierUnavailable):
            rig.get(lengths(keys))
        assert time.monotonic() - began < BOUND
        service.services[1].start()

        def back():
            try:
                return rig.put(chunks(keys)) == [True] * 32
            except TierUnavailable:
                return False

        wait_until(back)
        assert rig.get(lengths(keys)) == list(chunks(keys).values())
        store.close()
