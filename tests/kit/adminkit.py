"""A cache server in this process with its HTTP side, and what asks it over real sockets."""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import threading
from urllib.parse import urlsplit

from lmcache_kernels.adapters.admin.server import AdminServer
from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.messages import (
    AbortStore,
    CommitRetrieve,
    CommitStore,
    EndSession,
    Lookup,
    PrepareRetrieve,
    PrepareStore,
    Register,
)
from lmcache_kernels.transfer.serving.service import CacheService

TOKEN = "a token of these tests"
SHARD = b"s" * 32
CHUNK_BYTES = 1000
CHUNK_TOKENS = 16
WAIT = 20.0


def digests(first, last):
    return b"".join(number.to_bytes(32, "big") for number in range(first, last))


class AdminRig:
    """The server's loop runs in a thread; ``admin`` listens."""

    def __init__(
        self, *, token=TOKEN, host="127.0.0.1", chunks=64, service=None, tiers=(), **options
    ):
        incarnation = secrets.token_hex(8)
        self.loop = CacheServerLoop("tcp://127.0.0.1:0", incarnation=incarnation)
        self.arena = Arena.create(chunks * 1536) if tiers else None
        self.service = service or CacheService(
            arena_name="lmcache_kernels_test",
            arena_bytes=chunks * 1536,
            chunk_tokens=CHUNK_TOKENS,
            incarnation=incarnation,
            arena=self.arena,
            tiers=tiers,
            wake=self.loop.wake,
        )
        self.phase = "serving"
        self.admin = AdminServer(
            host,
            0,
            token,
            loop=self.loop,
            service=self.service,
            phase=lambda: self.phase,
            **options,
        )
        self.thread = threading.Thread(target=self.loop.run, args=(self.service,))
        self.thread.start()
        where = urlsplit(self.admin.endpoint)
        self.address = where.hostname, where.port

    def close(self):
        self.admin.close()
        self.loop.stop()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()
        if self.arena is not None:
            self.service.close()
            self.arena.close()
        self.loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # --- HTTP -------------------------------------------------------------------------------------

    def http(self, method, path, body=None, headers=None, timeout=WAIT):
        """Status, headers and body of the answer."""
        connection = http.client.HTTPConnection(*self.address, timeout=timeout)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def get(self, path):
        status, headers, body = self.http("GET", path)
        assert status == 200, (status, body)
        assert headers["content-type"] == "application/json"
        return json.loads(body)

    def change(self, method, path, body=None, token=TOKEN, timeout=WAIT):
        """Status and decoded answer of a change."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        if body is not None:
            body = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        status, _, answer = self.http(method, path, body, headers, timeout)
        return status, json.loads(answer)

    def scrape(self):
        """Every sample, by name and sorted labels."""
        from prometheus_client.parser import text_string_to_metric_families

        status, headers, body = self.http("GET", "/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain")
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    def connect(self):
        """A socket to write bytes of one's own to."""
        return socket.create_connection(self.address, WAIT)

    # --- what workers do --------------------------------------------------------------------------

    def ask(self, request):
        return self.loop.ask(request, WAIT).result(WAIT)

    def register(self, instance=1, shard=SHARD):
        self.ask(Register(instance=instance, shard=shard, chunk_bytes=CHUNK_BYTES))

    def store(self, first, last, *, commit=True):
        slots = self.ask(PrepareStore(instance=1, digests=digests(first, last)))
        end = CommitStore if commit else AbortStore
        self.ask(end(instance=1, ticket=slots.ticket))

    def lookup(self, first, last, request="r"):
        asked = Lookup(request=request, shards=[SHARD], digests=digests(first, last))
        found = self.ask(asked).chunks
        self.ask(EndSession(request=request))
        return found

    def load(self, first, last, *, damaged=()):
        slots = self.ask(PrepareRetrieve(instance=1, digests=digests(first, last)))
        ended = CommitRetrieve(instance=1, ticket=slots.ticket, damaged=list(damaged))
        self.ask(ended)

    # --- its thread -------------------------------------------------------------------------------

    def block(self):
        """The server's thread stands still until the event is set that this returns."""
        entered, leave = threading.Event(), threading.Event()

        def stand_still():
            entered.set()
            assert leave.wait(WAIT)

        self.loop.call(stand_still)
        assert entered.wait(WAIT)
        return leave
