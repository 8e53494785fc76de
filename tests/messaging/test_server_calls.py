"""What other threads have the server's thread do between requests."""

from __future__ import annotations

import threading

import pytest

from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.errors import Closed


def test_a_call_runs_in_the_servers_thread_and_gives_its_result(server):
    assert server.loop.call(threading.get_ident).result(10) == server.thread.ident


def test_a_call_that_raises_harms_nobody(server, client):
    with pytest.raises(ZeroDivisionError):
        server.loop.call(lambda: 1 / 0).result(10)
    assert server.loop.call(lambda: 7).result(10) == 7


def test_a_cancelled_call_is_not_made(server):
    server.service.gate.clear()
    held = server.loop.call(server.service.gate.wait)
    made = []
    late = server.loop.call(lambda: made.append(1))
    assert late.cancel()
    server.service.gate.set()
    held.result(10)
    server.loop.call(lambda: None).result(10)
    assert made == []


def test_calls_that_come_too_late_fail():
    loop = CacheServerLoop("tcp://127.0.0.1:0", incarnation="i")
    before = loop.call(lambda: 7)
    loop.close()
    with pytest.raises(Closed):
        before.result(10)
    with pytest.raises(Closed):
        loop.call(lambda: 7).result(10)
