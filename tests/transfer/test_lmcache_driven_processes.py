"""Workers and servers as processes of their own, killed in the middle of what the server copies."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from held_server import HeldServer
from served_worker import BLOCKS, CHUNK, ServedWorker, digests, make_tensor

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.memory.arena import SHM_DIRECTORY, sweep_stale_segments
from lmcache_kernels.transfer.messages import Done, Lookup, Ping, Register, Unregister
from lmcache_kernels.views import group_of

WAIT = 60.0
SOON = 2.0  # seconds until a worker that does not ping is dropped; ours ping every 0.2


@pytest.fixture
def server():
    with HeldServer(chunk_tokens=CHUNK, worker_ttl=WAIT) as running:
        yield running


@pytest.fixture
def dropping():
    """A server that soon drops silent workers."""
    with HeldServer(chunk_tokens=CHUNK, worker_ttl=SOON) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory():
    yield
    sweep_stale_segments()  # as whoever starts next does
    assert not (HeldServer.arenas | ServedWorker.segments) & set(os.listdir(SHM_DIRECTORY))


def eventually(condition):
    give_up_at = time.monotonic() + WAIT
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < give_up_at, "it did not become true"
        pause.wait(0.01)


def shard():
    layout = ChunkLayout.of([group_of(make_tensor(), "block token dim")], CHUNK)
    return ShardPart().shard(layout.fingerprint)


def found(url, count):
    with CacheClient(url) as client:
        client.wait_ready(WAIT)
        asked = Lookup(request="probe", shards=[shard()], digests=b"".join(digests(count)))
        return client.request(asked, WAIT).result(WAIT).chunks


def test_a_server_of_engine_driven_workers_loads_no_torch(server):
    with ServedWorker(server.url, instance=1, mode="engine_driven") as worker:
        worker.submit("store", 2)
        assert worker.result() == 2
        assert server.mappings("libtorch") == 0
    with ServedWorker(server.url, instance=2) as worker:
        assert server.mappings("libtorch") > 0
        worker.submit("load", 2)
        assert worker.result() == 2


def test_what_one_worker_stores_another_loads(server):
    with ServedWorker(server.url, instance=1) as one:
        one.submit("store", 3)
        assert one.result() == 3
    with ServedWorker(server.url, instance=2, fill=99) as two:
        two.submit("load", 3)
        assert two.result() == 3
        assert two.block_values() == [0, 1, 2, 3, 4, 5, *[99] * (BLOCKS - 6)]


def test_mp_091_a_worker_killed_in_the_middle_of_a_store_publishes_nothing(dropping):
    """Also when the server could finish the copy: nobody is left who says that it is right. What
    was opened is closed and what was reserved is free when the copy is over, not before."""
    dropping.hold()
    with ServedWorker(dropping.url, instance=1) as worker:
        worker.submit("store", 3)
        assert dropping.wait_held() == "gather"
        segment = worker.segment
    assert found(dropping.url, 3) == 0
    eventually(lambda: dropping.stats()["workers"] == 0)
    assert dropping.mappings(segment) == 1
    assert dropping.stats()["writing"] == 3
    dropping.let_go()
    eventually(lambda: dropping.stats()["caches"] == 0)
    assert dropping.mappings(segment) == 0
    stats = dropping.stats()
    assert (stats["writing"], stats["resident"], stats["used_bytes"]) == (0, 0, 0)
    assert found(dropping.url, 3) == 0


def test_a_store_of_a_killed_worker_that_is_copied_in_time_is_not_published_either(dropping):
    """The copy ends while the server takes the worker for alive."""
    dropping.hold()
    with ServedWorker(dropping.url, instance=1) as worker:
        worker.submit("store", 3)
        assert dropping.wait_held() == "gather"
    dropping.let_go()
    assert found(dropping.url, 3) == 0
    eventually(lambda: dropping.stats()["caches"] == 0)
    stats = dropping.stats()
    assert (stats["writing"], stats["resident"], stats["used_bytes"]) == (0, 0, 0)


def test_a_worker_killed_in_the_middle_of_a_load_leaves_its_chunks_to_others(dropping):
    with (
        ServedWorker(dropping.url, instance=1) as one,
        ServedWorker(dropping.url, instance=2) as two,
    ):
        one.submit("store", 3)
        assert one.result() == 3
        dropping.hold()
        two.submit("load", 3)
        assert dropping.wait_held() == "scatter"
        two.kill()
        eventually(lambda: dropping.stats()["workers"] == 1)
        assert dropping.stats()["reads"] == 1
        assert dropping.mappings(two.segment) == 1
        dropping.let_go()
        eventually(lambda: dropping.stats()["caches"] == 1)
        stats = dropping.stats()
        assert (stats["reads"], stats["resident"], stats["idle"]) == (0, 3, 3)
        assert dropping.mappings(two.segment) == 0
        one.submit("load", 3)
        assert one.result() == 3


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_stands_still_holds_nobody_else_up(server, direction):
    """Neither other workers' copies nor any other request; nor does a worker that was stopped."""
    with ServedWorker(server.url, instance=1) as one, ServedWorker(server.url, instance=2) as two:
        one.submit("store", 2)
        assert one.result() == 2
        server.hold()
        one.submit(direction, 3 if direction == "store" else 2)
        server.wait_held()
        with CacheClient(server.url) as client:
            client.wait_ready(WAIT)
            for _ in range(20):
                assert client.request(Ping(), 5).result(WAIT)
        two.submit("load", 2)
        assert server.wait_held() == "scatter", "another worker's copy begins meanwhile"
        server.let_go()
        assert two.result() == 2
        assert one.result() == (1 if direction == "store" else 2)


@pytest.mark.parametrize("how", ["unregister", "kill"])
def test_fault_e08_a_cache_that_takes_long_to_let_go_of_holds_nobody_else_up(dropping, how):
    """A worker left, or died, and the server stands still while it closes what it had opened."""
    with (
        CacheClient(dropping.url) as client,
        ServedWorker(dropping.url, instance=1) as one,
        ServedWorker(dropping.url, instance=2) as two,
    ):
        client.wait_ready(WAIT)
        one.submit("store", 2)
        assert one.result() == 2
        dropping.hold()
        if how == "kill":
            one.kill()
        else:
            left = client.request(Unregister(instance=1), WAIT)
        assert dropping.wait_held() == "close"

        def median_seconds(*requests):
            times = []
            for request in requests:
                began = time.monotonic()
                client.request(request, WAIT).result(WAIT)
                times.append(time.monotonic() - began)
            return sorted(times)[len(times) // 2]

        assert median_seconds(*[Ping()] * 5) < 1
        others = [Register(instance=10 + n, shard=bytes(32), chunk_bytes=512) for n in range(5)]
        assert median_seconds(*others) < 1
        assert found(dropping.url, 2) == 2
        with ServedWorker(dropping.url, instance=3) as three:
            assert dropping.mappings(three.segment) == 1, "it has registered its cache meanwhile"
            assert dropping.mappings(one.segment) == 1
            dropping.let_go()
            eventually(lambda: dropping.stats()["caches"] == 2)
            assert dropping.mappings(one.segment) == 0
            if how == "unregister":
                assert left.result(WAIT) == Done()
            two.submit("load", 2)
            assert two.result() == 2


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_server_killed_in_the_middle_of_a_copy_ends_the_transfer(direction):
    """In bounded time; and its successor serves the worker as if nothing had been."""
    with (
        HeldServer(chunk_tokens=CHUNK, worker_ttl=WAIT) as first,
        ServedWorker(first.url, instance=1, timeout=20.0, copy_timeout=40.0) as worker,
    ):
        worker.submit("store", 2)
        assert worker.result() == 2
        first.hold()
        worker.submit(direction, 2, 2 if direction == "store" else 0)
        first.wait_held()
        began = time.monotonic()
        first.kill()
        assert worker.result() == "PeerGone"
        assert time.monotonic() - began < 15, "its end was noticed, not only waited for"
        sweep_stale_segments()
        with HeldServer(url=first.url, chunk_tokens=CHUNK, worker_ttl=WAIT) as second:
            worker.register()
            worker.submit("load", 2)
            assert worker.result() == 0
            worker.submit("store", 2)
            assert worker.result() == 2
            worker.submit("load", 2)
            assert worker.result() == 2
            assert worker.block_values() == list(range(BLOCKS))
            worker.close()
            eventually(lambda: second.stats()["caches"] == 0)


def test_mp_069_registering_again_leaves_nothing_behind(server):
    """At the server: files, mappings, caches. At the worker: files and threads."""
    with ServedWorker(server.url, instance=1) as worker:
        worker.submit("store", 2)
        assert worker.result() == 2
        before, usage = server.descriptors(), worker.usage()
        for _ in range(5):
            with CacheClient(server.url) as client:
                client.wait_ready(WAIT)
                client.request(Unregister(instance=1), WAIT).result(WAIT)
            worker.submit("load", 2)
            assert worker.result() == "RemoteError", "the server has forgotten it"
            worker.submit("load", 2)
            assert worker.result() == 2
        eventually(lambda: server.descriptors() <= before)
        assert server.stats()["caches"] == 1
        assert server.mappings(worker.segment) == 1
        assert worker.usage() == usage


def test_a_worker_that_does_not_ping_is_dropped_and_comes_back(dropping):
    with ServedWorker(dropping.url, instance=1, vouch=False) as worker:
        worker.submit("store", 2)
        assert worker.result() == 2
        eventually(lambda: dropping.stats()["caches"] == 0)
        assert dropping.mappings(worker.segment) == 0
        worker.submit("load", 2)
        assert worker.result() == "RemoteError"
        worker.submit("load", 2)
        assert worker.result() == 2


def test_a_server_that_is_stopped_in_the_middle_of_a_copy_ends_cleanly():
    with (
        HeldServer(chunk_tokens=CHUNK, worker_ttl=WAIT) as server,
        ServedWorker(server.url, instance=1) as worker,
    ):
        server.hold()
        worker.submit("store", 3)
        server.wait_held()
        assert server.end() == 0
        assert worker.result() in ("PeerGone", "Closed")
        assert not (Path(SHM_DIRECTORY) / server.arena_name).exists()
