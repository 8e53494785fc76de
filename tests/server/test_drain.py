"""Real servers that are told to end: with work under way, in time, twice, by their parent's death."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from serverkit import MODULE, logged_server

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.errors import RemoteError
from lmcache_kernels.transfer.messages import (
    CommitRetrieve,
    CommitStore,
    Done,
    EndSession,
    Found,
    LoadSlots,
    Lookup,
    Ping,
    PrepareRetrieve,
    PrepareStore,
    Register,
    StoreSlots,
)

SHARD = b"s" * 32
LONG = ("--drain-timeout-seconds", "600")
"""Whoever waits for its end waits longer than a test may."""


def digests(start, stop):
    return b"".join(bytes([number]) * 32 for number in range(start, stop))


class Worker:
    """A client that is registered."""

    def __init__(self, url):
        self.client = CacheClient(url)
        self.client.wait_ready(20)
        self.ask(Register(instance=1, shard=SHARD, chunk_bytes=1000))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.client.close()

    def ask(self, request):
        return self.client.request(request, 20).result(30)

    def refusal(self, request):
        error = self.client.request(request, 20).exception(30)
        assert isinstance(error, RemoteError), error
        return error.code

    def store(self, start, stop):
        slots = self.ask(PrepareStore(instance=1, digests=digests(start, stop)))
        assert isinstance(slots, StoreSlots)
        return slots.ticket

    def commit(self, ticket):
        return self.ask(CommitStore(instance=1, ticket=ticket))


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda it: it.name)
def ending(request):
    return request.param


def test_what_is_under_way_is_finished_and_nothing_new_is_begun(ending):
    with logged_server(*LONG) as server, Worker(server.url) as worker:
        first, second = worker.store(0, 2), worker.store(2, 4)
        assert worker.commit(first) == Done()
        lookup = Lookup(request="r", shards=[SHARD], digests=digests(0, 4))
        assert worker.ask(lookup) == Found(chunks=2)
        server.send(ending)
        said = server.wait_log("ending in 600 s at the latest; under way: (.*)")
        assert said[1] == "1 stores, 1 requests that found something"
        assert worker.refusal(PrepareStore(instance=1, digests=digests(5, 6))) == "draining"
        assert worker.refusal(lookup) == "draining"
        again = Register(instance=2, shard=SHARD, chunk_bytes=1000)
        assert worker.refusal(again) == "draining"
        assert worker.ask(Ping(instance=1)).registered
        loading = worker.ask(PrepareRetrieve(instance=1, digests=digests(0, 2)))
        assert isinstance(loading, LoadSlots)
        assert len(loading.offsets) == 2
        assert worker.commit(second) == Done()
        assert worker.ask(EndSession(request="r")) == Done()
        assert server.segment.exists()
        # The last thing that is under way: its answer arrives although the server ends with it.
        assert worker.ask(CommitRetrieve(instance=1, ticket=loading.ticket)) == Done()
        assert server.wait() == 0
        assert not server.segment.exists()
        assert "lost" not in server.log()
        assert "stopped; " in server.log()


@pytest.mark.parametrize("round_", range(10))
def test_the_answer_to_the_last_commit_arrives(round_):
    with logged_server(*LONG) as server, Worker(server.url) as worker:
        ticket = worker.store(0, 100)
        server.send(signal.SIGTERM)
        server.wait_log("ending in")
        assert worker.commit(ticket) == Done()
        assert server.wait() == 0


def test_who_does_not_finish_is_waited_for_so_long():
    with logged_server("--drain-timeout-seconds", "0.2") as server, Worker(server.url) as worker:
        worker.store(0, 2)
        began = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert 0.2 <= time.monotonic() - began < 10
        assert "ended after 0.2 s; under way, and lost: 1 stores" in server.log()
        assert not server.segment.exists()


@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGHUP)]
)
def test_who_asks_twice_means_at_once(numbers):
    with logged_server(*LONG) as server, Worker(server.url) as worker:
        worker.store(0, 2)
        server.send(numbers[0])
        server.wait_log("ending in 600 s")
        server.send(numbers[1])
        assert server.wait() == 0
        assert not server.segment.exists()


def test_without_anything_under_way_it_ends_at_once(ending):
    with logged_server(*LONG) as server, Worker(server.url) as worker:
        worker.commit(worker.store(0, 2))
        server.send(ending)
        assert server.wait() == 0
        assert "ending in" not in server.log()
        assert not server.segment.exists()


def test_who_does_not_want_to_wait_does_not():
    with logged_server("--drain-timeout-seconds", "0") as server, Worker(server.url) as worker:
        worker.store(0, 2)
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert "under way, and lost: 1 stores" in server.log()


def test_a_client_that_does_not_read_its_answers_does_not_hold_the_end_up():
    with logged_server() as server, Worker(server.url) as worker:
        host, port = server.url.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as silent:  # never greets, never reads
            silent.sendall(b"\xff" + b"\0" * 8 + b"\x01\x7f")
            worker.ask(Ping())
            began = time.monotonic()
            server.send(signal.SIGTERM)
            assert server.wait() == 0
            assert time.monotonic() - began < 10


PARENT = """
import subprocess, sys, signal
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(server.pid, server.stdout.readline().split()[2], flush=True)
signal.pause()
"""


def test_when_its_parent_dies_it_drains_too():
    command = [*MODULE, "--port", "0", "--l1-size-gb", "0.01", "--stop-on-eof", *LONG]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with parent.stdout, parent.stderr:
        try:
            pid, url = parent.stdout.readline().split()
            server = psutil.Process(int(pid))
            with Worker(url) as worker:
                ticket = worker.store(0, 2)
                parent.kill()
                assert any("ending in 600 s" in line for line in parent.stderr)
                refused = worker.refusal(PrepareStore(instance=1, digests=digests(3, 4)))
                assert refused == "draining"
                assert worker.commit(ticket) == Done()
        finally:
            parent.kill()
            parent.wait()
        assert psutil.wait_procs([server], timeout=20)[1] == []
