"""Real services for tests: each a process of its own on a free loopback port, killed and started at will.

A test that asks for one whose program or package is missing is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

WAIT = 30.0
"""Seconds; far more than any of these needs."""


class Service:
    """A running process that listens on ``port``; see :meth:`start`.

    Args:
        command: from the port to the command line.
        ready: from the port to whether it answers; a connection that is accepted if not given.
    """

    def __init__(self, command, ready=None):
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="lmcache_kernels_service_"))
        self.process = None
        self._command = command
        self._ready = ready or accepts
        self.start()

    def start(self):
        """Start it, again, on the same port, and wait until it answers."""
        assert self.process is None
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                self._command(self.port), cwd=self.directory, stdout=log, stderr=log
            )
        try:
            wait_until(lambda: self._ready(self.port), self.process, self.log)
        except BaseException:
            self.stop()
            raise

    def log(self):
        return (self.directory / "log").read_text(errors="replace")[-2000:]

    def pause(self):
        """It hangs: accepts connections, answers nothing."""
        pause(self.process)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        """``kill -9``, also of one that is paused."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT)
            self.process = None

    def stop(self):
        """For good."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class Cluster:
    """Several services as one."""

    def __init__(self, services, joined):
        self.services = services
        self.port = services[0].port
        self._joined = joined
        joined(services)

    def start(self):
        for service in self.services:
            service.start()
        self._joined(self.services)

    def pause(self):
        for service in self.services:
            service.pause()

    def resume(self):
        for service in self.services:
            service.resume()

    def kill(self):
        for service in self.services:
            service.kill()

    def stop(self):
        for service in self.services:
            service.stop()


@contextlib.contextmanager
def running_redis(*options):
    """A Valkey or Redis server that keeps nothing on disk.

    Args:
        options: more of the command line.
    """
    service = Service(lambda port: _redis(port, *options), answers_ping)
    try:
        yield service
    finally:
        service.stop()


@contextlib.contextmanager
def running_redis_cluster(nodes=2):
    """A Valkey or Redis cluster without replicas."""
    with contextlib.ExitStack() as stack:
        services = []
        for _ in range(nodes):
            bus = free_port()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
            services.append(stack.enter_context(running_redis(*options)))
            services[-1].bus = bus
        for index, service in enumerate(services):
            first, last = 16384 * index // nodes, 16384 * (index + 1) // nodes - 1
            asked(service.port, f"CLUSTER ADDSLOTSRANGE {first} {last}")
            asked(service.port, f"CLUSTER SET-CONFIG-EPOCH {index + 1}")
            asked(services[0].port, f"CLUSTER MEET 127.0.0.1 {service.port} {service.bus}")
        yield Cluster(services, _joined)


@contextlib.contextmanager
def running_mooncake_master(*options):
    """A master of a Mooncake Store; stores that use it add the memory.

    Args:
        options: more of the command line.
    """
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    program = Path(importlib.util.find_spec("mooncake").origin).with_name("mooncake_master")
    metrics = free_port()
    fixed = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--logtostderr"]
    service = Service(
        lambda port: [
            str(program),
            f"--rpc_port={port}",
            f"--metrics_port={metrics}",
            *fixed,
            *options,
        ]
    )
    try:
        yield service
    finally:
        service.stop()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, process=None, explain=lambda: "", seconds=WAIT):
    """Ask every few milliseconds; fail if it takes too long, or the process ends meanwhile."""
    deadline = time.monotonic() + seconds
    never = threading.Event()
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode}: {explain()}")
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {explain()}")
        never.wait(0.005)


def pause(process):
    """Stop it, and wait until that has reached every thread: until then one may still answer."""

    def stands_still():
        states = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/stat")]
        return all(state.rpartition(")")[2].split()[0] in "Tt" for state in states)

    process.send_signal(signal.SIGSTOP)
    wait_until(stands_still)


def accepts(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def answers_ping(port):
    try:
        return _reply(port, "PING").startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def asked(port, command):
    """The first bytes of the reply to a command without binary arguments, which works."""
    reply = _reply(port, command)
    assert not reply.startswith(b"-"), (command, reply)
    return reply


def _reply(port, command):
    with socket.create_connection(("127.0.0.1", port), WAIT) as connection:
        connection.settimeout(WAIT)
        connection.sendall(command.encode() + b"\r\n")
        return connection.recv(1 << 16)


def _redis(port, *options):
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server or valkey-server")
    fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return [program, "--port", str(port), *fixed, *options]


def _joined(services):
    def whole(service):
        info = asked(service.port, "CLUSTER INFO").decode()
        return "cluster_state:ok" in info and f"cluster_known_nodes:{len(services)}" in info

    wait_until(lambda: all(whole(service) for service in services))
