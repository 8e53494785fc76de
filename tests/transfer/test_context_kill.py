"""Workers and servers killed at every step of registering, storing and loading.

Afterwards nobody reads what was half written, nothing is held for the dead, and nobody waits for them.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from cachekit import oracle_chunk
from step_peer import (
    CHUNK_TOKENS,
    CHUNKS,
    LOAD_STEPS,
    REGISTER_STEPS,
    SOURCE,
    STORE_STEPS,
    TARGET,
    WAIT,
    StepPeer,
    Steps,
    digests,
    open_cache,
    open_context,
)

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.errors import KVTransferError
from lmcache_kernels.transfer.engine_driven import registration
from lmcache_kernels.transfer.memory.arena import SHM_DIRECTORY, Arena
from lmcache_kernels.transfer.messages import Ping
from lmcache_kernels.transfer.serving.known_workers import Liveness
from lmcache_kernels.transfer.serving.leases import LEASE_TTL
from lmcache_kernels.transfer.serving.service import CacheService

DEAD = 7
"""Id of the worker that is killed."""


def segments():
    return {path.name for path in Path(SHM_DIRECTORY).glob("lmcache_kernels_*")}


class Server:
    """A server in this process, whose service a test can make believe that time has passed."""

    def __init__(self):
        incarnation = secrets.token_hex(16)
        self._ahead = 0.0
        self.arena = Arena.create(1 << 20)
        self.loop = CacheServerLoop("tcp://127.0.0.1:0", incarnation=incarnation)
        self.service = CacheService(
            arena_name=self.arena.name,
            arena_bytes=self.arena.nbytes,
            chunk_tokens=CHUNK_TOKENS,
            incarnation=incarnation,
        )
        self._thread = threading.Thread(target=self.loop.run, args=(self,))
        self._thread.start()

    def handle(self, request, now, deadline):
        self.tick(now)
        return self.service.handle(request, now + self._ahead, deadline + self._ahead)

    def tick(self, now):
        self.service.tick(now + self._ahead)

    def finished(self, now):
        return self.service.finished(now + self._ahead)

    def next_due(self):
        return self.service.next_due()

    def put_forward(self, seconds, client):
        """Let so much time have passed."""
        self._ahead += seconds
        client.request(Ping(), WAIT).result(WAIT)

    def close(self):
        self.loop.stop()
        self._thread.join()
        self.loop.close()
        self.arena.close()


@pytest.fixture
def opened():
    with ExitStack() as closing:
        yield closing


@pytest.fixture
def server(opened):
    running = Server()
    opened.callback(running.close)
    return running


def worker_at(url, opened, *, seed):
    """(context, cache, client) of a worker in this process."""
    client = CacheClient(url, chunk_tokens=CHUNK_TOKENS)
    opened.callback(client.close)
    client.wait_ready(WAIT)
    cache = open_cache(seed)
    context = open_context(cache, client, secrets.randbits(63))
    opened.callback(context.close)
    return context, cache, client


def load_all(context, cache, into=TARGET):
    """How many chunks there are; those that are hold what worker and test agree on."""
    expected = oracle_chunk(open_cache(1), SOURCE)
    loaded = context.submit_retrieve(digests(), [into]).result(WAIT)
    assert loaded in (0, CHUNKS)
    if loaded:
        assert torch.equal(oracle_chunk(cache, into), expected)
    return loaded


@pytest.mark.parametrize("step", [*REGISTER_STEPS, *STORE_STEPS])
def test_a_worker_killed_while_it_registers_or_stores(step, server, opened):
    """Its chunks are there if it had committed them, and else not at all; its slots are given back,
    at the latest when it has been silent for long enough."""
    with StepPeer(server.loop.endpoint, "store", step, DEAD) as peer:
        peer.wait_step()
        peer.kill()
    assert server.arena.name in segments()
    context, cache, client = worker_at(server.loop.endpoint, opened, seed=2)
    committed = step == "after CommitStore"
    assert load_all(context, cache) == (CHUNKS if committed else 0)
    server.put_forward(Liveness().grace + 1, client)
    stats = server.service.stats()
    assert (stats["writing"], stats["reads"], stats["workers"]) == (0, 0, 0)
    assert committed == (stats["used_bytes"] > 0)
    same = open_cache(1)
    for tensor, other in zip(cache.tensors, same.tensors, strict=True):
        tensor.copy_(other)
    with pytest.raises(KVTransferError, match="unknown_instance"):  # this one was silent, too
        context.submit_store(digests(), [SOURCE]).result.result(WAIT)
    stored = context.submit_store(digests(), [SOURCE]).result.result(WAIT)
    assert stored == (0 if committed else CHUNKS)
    assert load_all(context, cache) == CHUNKS


@pytest.mark.parametrize("step", LOAD_STEPS)
def test_a_worker_killed_while_it_loads(step, server, opened):
    """What it read is there for others, and is held for it only for as long as it may be silent."""
    context, cache, client = worker_at(server.loop.endpoint, opened, seed=1)
    assert context.submit_store(digests(), [SOURCE]).result.result(WAIT) == CHUNKS
    with StepPeer(server.loop.endpoint, "load", step, DEAD) as peer:
        peer.wait_step()
        reads = server.service.stats()["reads"]
        peer.kill()
    assert server.arena.name in segments()
    assert reads == (step not in ("before PrepareRetrieve", "after CommitRetrieve"))
    assert load_all(context, cache) == CHUNKS
    server.put_forward(Liveness().grace + 1, client)
    stats = server.service.stats()
    assert (stats["reads"], stats["workers"], stats["idle"]) == (0, 0, CHUNKS)


STEPS = [
    *(("store", step) for step in (*REGISTER_STEPS, *STORE_STEPS)),
    *(("load", step) for step in LOAD_STEPS),
]


@pytest.mark.parametrize(("direction", "step"), STEPS)
def test_a_server_killed_while_a_worker_registers_stores_or_loads(
    direction, step, opened, monkeypatch
):
    """The worker's future ends within its bounds; with the next server everything works again, and
    that one has removed what the dead one left behind."""
    server = opened.enter_context(spawn_server(size_gb=0.001, chunk_size=CHUNK_TOKENS))
    client = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)
    opened.callback(client.close)
    client.wait_ready(WAIT)
    armed = []

    def reached(name):
        if armed and name == step:
            armed.clear()
            os.kill(server.pid, signal.SIGKILL)

    steps = Steps(reached, client)
    monkeypatch.setattr(registration, "Attachment", steps.attachment)
    cache = open_cache(1)
    context = open_context(cache, steps, secrets.randbits(63), steps.mover, timeout=5.0)
    opened.callback(context.close)
    if direction == "load":
        assert context.submit_store(digests(), [SOURCE]).result.result(WAIT) == CHUNKS
    armed.append(True)

    def register():
        context.register()
        reached("registered")
        steps.request(Ping(), 5.0).result(WAIT)

    if step in REGISTER_STEPS:
        with pytest.raises(KVTransferError):
            register()
    else:
        if direction == "store":
            result = context.submit_store(digests(), [SOURCE]).result
        else:
            result = context.submit_retrieve(digests(), [TARGET])
        assert not wait([result], 20.0).not_done
        error = result.exception()
        assert error is None or isinstance(error, KVTransferError)
        # A load needs no server once the chunks are held in place.
        assert (error is None) == (step in ("after CommitStore", *LOAD_STEPS[1:]))
        context.flush_inflight_stores(0.0)
    assert not armed
    number = int(server.url.rpartition(":")[2])
    opened.enter_context(spawn_server(port=number, size_gb=0.001, chunk_size=CHUNK_TOKENS))
    client.wait_ready(WAIT)
    assert server.arena_name not in segments()
    assert load_all(context, cache, TARGET) == 0
    assert context.submit_store(digests(), [SOURCE]).result.result(WAIT) == CHUNKS
    assert load_all(context, cache, TARGET) == CHUNKS


def test_the_leases_of_a_killed_scheduler_end_by_themselves(server, opened):
    from lmcache_kernels.transfer.messages import Lookup

    context, _, client = worker_at(server.loop.endpoint, opened, seed=1)
    assert context.submit_store(digests(), [SOURCE]).result.result(WAIT) == CHUNKS
    asked = Lookup(request="r", shards=[context.shard], digests=b"".join(digests()))
    assert client.request(asked, WAIT).result(WAIT).chunks == CHUNKS
    assert server.service.stats()["leases"] == 1
    server.put_forward(LEASE_TTL + 1, client)
    assert server.service.stats()["leases"] == 0
