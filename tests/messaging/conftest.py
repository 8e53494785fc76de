"""Servers in a thread of the tests, on services that do as they are told."""

from __future__ import annotations

import math
import secrets
import threading
import time

import pytest

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.transfer.messages import (
    PROTOCOL_VERSION,
    Cleared,
    Done,
    EndSession,
    Found,
    Hello,
    Lookup,
    Ping,
    Pong,
    Register,
    Registered,
    Welcome,
)


class Recorder:
    """A service that remembers what it was asked, and can be made to fail or to wait."""

    def __init__(self, incarnation, *, chunk_tokens=256, protocol=PROTOCOL_VERSION):
        self.incarnation = incarnation
        self.chunk_tokens = chunk_tokens
        self.protocol = protocol
        self.asked = []
        self.ticks = 0
        self.ticked = threading.Event()
        self.tick_error = None
        self.error = None
        self.answer = None
        self.due = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def handle(self, request, now, deadline):
        self.asked.append(request)
        if isinstance(request, Hello):
            return Welcome(
                protocol=self.protocol,
                incarnation=self.incarnation,
                clock=now,
                chunk_tokens=self.chunk_tokens,
            )
        if isinstance(request, Ping):
            return Pong(incarnation=self.incarnation, registered=request.instance == 7)
        self.entered.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error  # a class: an instance would keep each traceback
        if self.answer is not None:
            return self.answer
        if isinstance(request, Lookup):
            return Found(chunks=len(request.digests))
        if isinstance(request, EndSession):
            return Done()
        if isinstance(request, Register):
            return Registered(arena_name="a", arena_bytes=request.instance)
        return Cleared(chunks=0)

    def finished(self, now):
        due, self.due = self.due, []
        return due

    def next_due(self):
        return math.inf

    def tick(self, now):
        self.ticks += 1
        self.ticked.set()
        if self.tick_error is not None:
            raise self.tick_error

    def asked_of(self, *kinds):
        return [request for request in self.asked if isinstance(request, kinds)]


class RunningServer:
    """A loop in a thread."""

    def __init__(self, url="tcp://127.0.0.1:0", *, keys=None, **arguments):
        incarnation = secrets.token_hex(8)
        self.service = Recorder(incarnation, **arguments)
        self.loop = CacheServerLoop(url, incarnation=incarnation, keys=keys)
        self.url = self.loop.endpoint
        self.thread = threading.Thread(target=self.loop.run, args=(self.service,))
        self.thread.start()

    def stop(self):
        self.service.gate.set()
        self.loop.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.loop.close()


@pytest.fixture
def start_server():
    started = []

    def start(*arguments, **keywords):
        started.append(RunningServer(*arguments, **keywords))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def server(start_server):
    return start_server()


@pytest.fixture
def connect():
    clients = []

    def connect(url, *, ready=True, **arguments):
        clients.append(CacheClient(url, **arguments))
        if ready:
            clients[-1].wait_ready(10)
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(server, connect):
    return connect(server.url)


@pytest.fixture
def eventually():
    """Wait until something becomes true; fail after 10 s."""

    def eventually(condition):
        give_up_at = time.monotonic() + 10
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < give_up_at, "it did not become true"
            pause.wait(0.005)

    return eventually
