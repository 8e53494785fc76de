"""Many clients that misbehave, and one worker that does not: it does not notice."""

from __future__ import annotations

import time

import pytest
from chaos_members import own_memory, usage
from chaos_worker import CHUNK_TOKENS, TIMEOUT, ChaosWorker
from hostile_clients import CLIENTS, KINDS, HostileClients

from lmcache_kernels.adapters.server.spawn import spawn_server


@pytest.fixture
def server():
    with spawn_server(size_gb=1 / 64, chunk_size=CHUNK_TOKENS) as running:
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1])
def test_a_worker_among_32_hostile_clients_has_no_error_and_no_long_wait(seed, full, server):
    seconds = 100.0 if full else 6.0
    worker = ChaosWorker(server.url, instance=1, mode="engine_driven", seed=seed)
    worker.wait_ready(TIMEOUT)
    files, threads = usage(server.pid)
    with HostileClients(server.url, seed) as hostile:
        began, memory, calls = time.monotonic(), [0, 0, 0], []
        for event in worker.events():
            assert "error" not in event, event
            assert "violation" not in event, event
            calls.append(event)
            third = int(3 * (time.monotonic() - began) / seconds)
            if third < 3:
                memory[third] = max(memory[third], own_memory(server.pid))
            elif event.get("call") == "end session":
                break
    assert memory[2] <= 1.05 * memory[1] + (2 << 20)
    assert set(hostile.counts) >= {kind.__name__ for kind in KINDS}
    assert hostile.counts["unbroken"] == CLIENTS
    assert {event["call"] for event in calls if "call" in event} >= {"load", "store"}
    assert max(event.get("seconds", 0.0) for event in calls) < TIMEOUT
    give_up_at = time.monotonic() + 20
    while usage(server.pid) > (files + 1, threads):  # the worker's own connection
        assert time.monotonic() < give_up_at, (usage(server.pid), files, threads)
        worker.wait_ready(TIMEOUT)
        for event in worker.read(worker.prompts.digests(0)):
            assert "error" not in event
    worker.close()
