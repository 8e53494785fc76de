"""A small load: what is seen of it, and that whatever goes wrong is told."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from bench.options import Options
from bench.results import OURS, Document, problems
from bench.server import load
from bench.server.load import ALONE, OTHERS, failures_of, reserve_all
from bench.server.load_window import PING, Load, watch
from bench.workers.process import MOST_ERRORS, Worker
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.transfer.asking import ask
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.messages import CommitStore, Done

SMALL = Load(
    workers=5,
    processes=2,
    arena_gb=0.01,
    chunk_bytes=4096,
    chunks=64,
    prompts=100,
    families=5,
)
KINDS = {
    *("lookup", "prepare store", "commit store", "prepare retrieve", "commit retrieve"),
    *("end session", "prompt"),
}


@pytest.fixture
def server():
    with spawn_server(size_gb=SMALL.arena_gb) as running:
        yield running


@pytest.fixture
def client(server):
    with CacheClient(server.url, instance_id=0) as made:
        made.wait_ready(20)
        yield made


def test_every_kind_of_request_is_a_row_and_nothing_goes_wrong():
    rows = load.measure(SMALL, 1.0)
    assert problems(Document(3, "server", {}, rows)) == []
    assert {row.direction for row in rows} == {*KINDS, PING, "every request", "hashing and lookup"}
    every, *each, hashed = rows
    assert every.failures == []
    assert every.bit_exact
    assert every.counts["chunks loaded"] > 0
    assert every.counts["chunks stored"] > SMALL.arena_gb * 2**30 / SMALL.slot_bytes
    assert every.parts["server's processor"] > 0
    assert all({OURS, ALONE} <= set(row.seconds) for row in each)
    assert {row.direction for row in each if OTHERS in row.seconds} == KINDS
    assert hashed.case == "an idle server"


def test_the_workers_are_shared_out_and_each_is_another():
    settings = SMALL.settings("url")
    numbers = [n for one in settings for n in range(one.first, one.first + one.workers)]
    assert numbers == [1, 2, 3, 4, 5]
    assert [one.niceness for one in settings] == [0, 19, 19]
    assert len(Load(workers=1).settings("url")) == 1


def test_what_is_leased_is_counted(server, client):
    ticket, held = reserve_all(SMALL, server, client)
    assert held == 0
    ask(client, CommitStore(instance=0, ticket=ticket), Done, 20)
    lookups = load.hashing_and_lookups(SMALL, client)
    assert {len(times) for times in lookups.values()} == {load.HASHED}
    _, held = reserve_all(SMALL, server, client)
    assert held == SMALL.chunks


def test_wrong_chunks_are_seen(server, client):
    watch(SMALL, server, client, warm_up=0.1, seconds=0.5)
    arena = Arena.attach(server.arena_name, server.arena_bytes)
    view = arena.view(0, arena.nbytes)
    for offset in range(600, arena.nbytes, 4096 + 512):
        view[offset] ^= 1
    view.release()
    arena.close()
    seen = watch(SMALL, server, client, warm_up=0.1, seconds=0.5).total
    assert seen.wrong > 0
    assert seen.failed == 0


def test_a_server_that_ends_is_failed_calls(server):
    worker = Worker(SMALL.settings(server.url)[0], 1)
    os.kill(server.pid, signal.SIGKILL)
    stop = threading.Event()
    running = threading.Thread(target=worker.run, args=(stop,))
    running.start()
    give_up_at = time.monotonic() + 20
    while worker.report.failed <= MOST_ERRORS and time.monotonic() < give_up_at:
        stop.wait(0.01)
    stop.set()
    running.join()
    worker.close()
    assert worker.report.failed > MOST_ERRORS
    assert len(worker.report.errors) == MOST_ERRORS
    assert "PeerGone" in worker.report.errors[-1]


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("wrong chunks", 1, "wrong chunks: expected 0, got 1"),
        ("failed calls", 2, "failed calls"),
        ("slots held at the end", 512, "slots held"),
        ("bytes of the server at most", 106, "grew from 100 to 106"),
    ],
)
def test_each_failure_is_told(name, count, words):
    sound = {
        "wrong chunks": 0,
        "failed calls": 0,
        "slots held at the end": 0,
        "bytes of the server at first": 100,
        "bytes of the server at most": 105,
    }
    assert failures_of(sound) == []
    (found,) = failures_of(sound | {name: count})
    assert words in found


def test_it_is_left_out_when_something_else_is_wanted():
    assert load.run(Options(only="lookup 64")) == []
