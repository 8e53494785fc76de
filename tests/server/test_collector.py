"""The collector while a server runs."""

from __future__ import annotations

import gc
import os
import signal

import pytest

from lmcache_kernels.adapters.server import main as server_main
from lmcache_kernels.adapters.server.collector import young_collections_only
from lmcache_kernels.adapters.server.config import ServerConfig
from lmcache_kernels.adapters.server.sources import Effective
from lmcache_kernels.transfer.memory.arena import Arena


@pytest.fixture
def collected():
    """Generations of the collections that are made."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def keep(count):
    return [[number] for number in range(count)]


def test_what_is_old_is_not_collected_and_what_is_young_is(collected):
    before = gc.get_threshold()
    with young_collections_only():
        kept = keep(500_000)
        assert {0, 1} <= set(collected)
        assert 2 not in collected
    assert gc.get_threshold() == before
    kept += keep(500_000)
    assert 2 in collected


def test_a_server_runs_so_and_leaves_things_as_they_were(monkeypatch):
    before, seen = gc.get_threshold(), []
    create = Arena.create

    def stopped_at_once(nbytes):
        seen.append(gc.get_threshold())
        os.kill(os.getpid(), signal.SIGTERM)
        return create(nbytes)

    monkeypatch.setattr(server_main.Arena, "create", stopped_at_once)
    server_main.serve(Effective(ServerConfig(l1_size_gb=0.01, port=0)))
    assert seen[0][:2] == before[:2]
    assert seen[0][2] > 10**9
    assert gc.get_threshold() == before
