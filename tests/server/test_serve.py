"""The server as a real process: starting, stopping, being stopped, killed and orphaned."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.server import main as server_main
from lmcache_kernels.adapters.server.config import ServerConfig
from lmcache_kernels.adapters.server.main import run, serve
from lmcache_kernels.adapters.server.sources import Effective
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.errors import ConfigError, PeerGone, TransferTimeout
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.messages import (
    Done,
    Found,
    Lookup,
    Ping,
    PrepareStore,
    Register,
    Registered,
    Unregister,
)

SIZE_GB = 0.01
SHM = Path("/dev/shm")
SERVER = [sys.executable, "-m", "lmcache_kernels.adapters.server", "--l1-size-gb", str(SIZE_GB)]
SERVER += ["--http-port", "-1"]


def register(instance):
    return Register(instance=instance, shard=bytes(32), chunk_bytes=1000)


def port_of(url):
    return int(url.rsplit(":", 1)[1])


@pytest.fixture
def server():
    with spawn_server(size_gb=SIZE_GB) as running:
        yield running


@pytest.fixture
def client(server):
    with CacheClient(server.url) as client:
        client.wait_ready(20)
        yield client


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


# --- starting and stopping ------------------------------------------------------------------------


def test_a_server_serves_the_whole_contract(server, client):
    assert client.chunk_tokens == server.chunk_tokens == 256
    registered = client.request(register(1), 5).result(10)
    assert registered == Registered(arena_name=server.arena_name, arena_bytes=server.arena_bytes)
    assert server.arena_bytes == int(SIZE_GB * (1 << 30))
    assert (SHM / server.arena_name).stat().st_size == server.arena_bytes
    slots = client.request(PrepareStore(instance=1, digests=bytes(32)), 5).result(10)
    assert len(slots.offsets) == 1
    lookup = Lookup(request="r", shards=[bytes(32)], digests=bytes(32))
    assert client.request(lookup, 5).result(10) == Found(chunks=0)
    assert client.request(Unregister(instance=1), 5).result(10) == Done()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(number):
    process = subprocess.Popen(
        [*SERVER, "--host", "localhost", "--port", "0", "--chunk-size", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        words = line.split()
        assert line.startswith("lmcache-kernels: serving tcp://127.0.0.1:")
        assert line.endswith(f", {int(SIZE_GB * (1 << 30))} bytes, chunk 64 tokens)\n")
        segment = SHM / words[4].rstrip(",")
        assert segment.exists()
        with CacheClient(words[2]) as client:
            client.wait_ready(20)
            process.send_signal(number)
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "Traceback" not in errors
        assert not segment.exists()
    finally:
        process.kill()
        process.wait()


def test_signals_are_handed_back(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    made = []

    def create(nbytes):
        made.append(Arena_create(nbytes))
        os.kill(os.getpid(), signal.SIGTERM)  # while it starts: it ends as soon as it has
        return made[-1]

    Arena_create = Arena.create
    monkeypatch.setattr(server_main.Arena, "create", create)
    serve(Effective(ServerConfig(l1_size_gb=SIZE_GB, port=0, http_port=-1)))
    assert "serving tcp://127.0.0.1:" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert not (SHM / made[0].name).exists()


# --- starts that fail -----------------------------------------------------------------------------


def test_a_port_in_use_is_an_error_before_any_memory_is_taken(taken_port, monkeypatch, capsys):
    monkeypatch.setattr(server_main.Arena, "create", lambda _: pytest.fail("memory was taken"))
    with pytest.raises(SystemExit) as caught:
        run(["--l1-size-gb", str(SIZE_GB), "--port", str(taken_port)], "serve")
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert f"port {taken_port} is in use" in said.err
    assert "--port" in said.err
    assert said.out == ""


def test_a_failure_after_the_arena_was_made_removes_it(monkeypatch):
    made = []
    create = Arena.create

    def recorded(nbytes):
        made.append(create(nbytes))
        return made[-1]

    def refuse(**_):
        raise ConfigError("no service today")

    monkeypatch.setattr(server_main.Arena, "create", recorded)
    monkeypatch.setattr(server_main, "CacheService", refuse)
    with pytest.raises(ConfigError, match="no service today"):
        serve(Effective(ServerConfig(l1_size_gb=SIZE_GB, port=0, http_port=-1)))
    assert len(made) == 1
    assert not (SHM / made[0].name).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "CURVE keys"),
        (["--host", "10.0.0.1"], "CURVE keys"),
        (["--host", "::"], "CURVE keys"),
        (["--host", ""], "--host: expected printable text, not empty, got ''"),
        (["--host", "no such host"], "address"),
        (["--port", "99999"], "--port: expected a whole number from 0 to 65535, got 99999"),
        (["--port", "-1"], "--port: expected a whole number from 0 to 65535, got -1"),
        (["--l1-size-gb", "0"], "--l1-size-gb"),
        (["--l1-size-gb", "nan"], "--l1-size-gb"),
        (["--l1-size-gb", "1e6"], "/dev/shm"),
        (["--l1-size-gb", "1e-12"], "round down to no byte"),
        (["--chunk-size", "0"], "--chunk-size"),
        (["--eviction-policy", "noop"], "expected one of lru, s3fifo, got 'noop'"),
        (
            ["--eviction-trigger-watermark", "0"],
            "--eviction-trigger-watermark: expected a number above 0, at most 1, got 0.0",
        ),
        (["--eviction-ratio", "2"], "--eviction-ratio"),
        (["--worker-reap-timeout-seconds", "29"], "(from --worker-reap-timeout-seconds)"),
        (
            ["--worker-registration-grace-seconds", "100"],
            "(from --worker-registration-grace-seconds)",
        ),
    ],
)
def test_settings_that_cannot_work_end_it_with_the_reason(arguments, words):
    done = subprocess.run(
        [*SERVER, "--port", "0", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if "dead processes" not in line]
    assert [line.startswith("lmcache-kernels: ") for line in said] == [True]
    assert words in said[0]


# --- children -------------------------------------------------------------------------------------


def test_a_spawned_server_ends_with_its_context():
    with spawn_server(size_gb=SIZE_GB, chunk_size=16) as server:
        assert server.chunk_tokens == 16
        assert psutil.pid_exists(server.pid)
    assert not psutil.pid_exists(server.pid)
    assert not (SHM / server.arena_name).exists()


def test_a_spawned_server_that_cannot_start_tells_why(taken_port):
    with (
        pytest.raises(ConfigError, match=f"port {taken_port} is in use"),
        spawn_server(size_gb=SIZE_GB, port=taken_port),
    ):
        pytest.fail("it started")


def test_a_spawned_server_is_not_waited_for_endlessly():
    began = time.monotonic()
    with (
        pytest.raises(TransferTimeout, match="not ready after"),
        spawn_server(size_gb=SIZE_GB, startup_timeout=0.01),
    ):
        pytest.fail("it started")
    assert time.monotonic() - began < 20


def test_a_spawned_server_that_was_killed_leaves_no_segment():
    with spawn_server(size_gb=SIZE_GB) as server:
        os.kill(server.pid, signal.SIGKILL)
    assert not (SHM / server.arena_name).exists()


PARENT = """
import signal, sys
from lmcache_kernels.adapters.server.spawn import spawn_server
with spawn_server(size_gb=0.01) as server:
    print(server.pid, server.arena_name, flush=True)
    signal.pause()
"""


def test_nothing_outlives_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        pid, arena = parent.stdout.readline().split()
        server = psutil.Process(int(pid))
        assert (SHM / arena).exists()
    finally:
        parent.kill()
        parent.communicate()
    gone, alive = psutil.wait_procs([server], timeout=20)
    assert (len(gone), alive) == (1, [])
    assert not (SHM / arena).exists()


# --- clients of servers that die or hang ----------------------------------------------------------


def test_a_killed_server_fails_what_is_pending_and_its_successor_is_found(client, server):
    first = client.incarnation
    os.kill(server.pid, signal.SIGSTOP)  # so that the requests stay unanswered
    futures = [client.request(Ping(), 60) for _ in range(100)]
    os.kill(server.pid, signal.SIGKILL)
    began = time.monotonic()
    assert all(isinstance(future.exception(10), PeerGone) for future in futures)
    assert time.monotonic() - began < 1
    with spawn_server(size_gb=SIZE_GB, port=port_of(server.url)):
        client.wait_ready(20)
        assert client.incarnation not in (None, first)
        assert client.request(Ping(), 5).result(10).incarnation == client.incarnation


def test_mp_016_what_was_queued_for_a_dead_server_never_runs_on_its_successor(client, server):
    os.kill(server.pid, signal.SIGSTOP)
    futures = [client.request(register(i), 60) for i in range(500)]
    os.kill(server.pid, signal.SIGKILL)
    with spawn_server(size_gb=SIZE_GB, port=port_of(server.url)):
        assert all(isinstance(future.exception(10), PeerGone) for future in futures)
        client.wait_ready(20)
        pongs = [client.request(Ping(instance=i), 20) for i in range(500)]
        assert not any(pong.result(20).registered for pong in pongs)


def test_a_hung_server_costs_one_timeout_and_comes_back(client, server):
    same = client.incarnation
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert isinstance(client.request(Ping(), 0.3).exception(10), TransferTimeout)
        assert 0.3 <= time.monotonic() - began < 2
        began = time.monotonic()
        for _ in range(100):
            assert isinstance(client.request(Ping(), 10).exception(10), PeerGone)
        assert time.monotonic() - began < 1
    finally:
        os.kill(server.pid, signal.SIGCONT)
    client.wait_ready(20)
    assert client.request(Ping(), 5).result(10).incarnation == same


@pytest.mark.parametrize("round_", range(5))
def test_killed_in_the_middle_of_a_storm_every_future_ends(round_, client, server):
    stop = threading.Event()
    futures = []

    def storm():
        while not stop.is_set() and len(futures) < 20_000:
            futures.append(client.request(Ping(), 20))

    thread = threading.Thread(target=storm)
    thread.start()
    assert client.request(Ping(), 20).result(20)
    os.kill(server.pid, signal.SIGKILL)
    for _ in range(1000):
        if isinstance(client.request(Ping(), 20).exception(20), PeerGone):
            break
    stop.set()
    thread.join(20)
    ends = {type(future.exception(20)) for future in futures}
    assert ends <= {type(None), PeerGone}
    assert client.pending == 0
