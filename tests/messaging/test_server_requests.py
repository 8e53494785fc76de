"""What the server's loop knows of the requests it served, and requests of its own process."""

from __future__ import annotations

import pytest

from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.errors import Closed
from lmcache_kernels.transfer.messages import Clear, Cleared, EndSession, ErrorReply, Found, Lookup
from lmcache_kernels.transfer.serving.later import Later

LOOKUP = Lookup(request="r", shards=[bytes(32)], digests=bytes(32))


def served(server):
    """By operation what came of it."""
    log = server.loop.call(server.loop.requests.served).result(10)
    return {one.operation: one.outcomes for one in log}


def test_every_reply_is_in_the_log(server, client):
    client.request(LOOKUP, 5).result(10)
    server.service.error = ZeroDivisionError
    with pytest.raises(Exception, match="ZeroDivisionError"):
        client.request(LOOKUP, 5).result(10)
    server.service.error = None
    assert served(server)["lookup"] == {"ok": 1, "internal": 1}
    assert served(server)["hello"] == {"ok": 1}


def test_a_request_of_this_process_is_served_as_others_are(server):
    assert server.loop.ask(LOOKUP, 5).result(10) == Found(chunks=32)
    assert server.loop.ask(Clear(), 5).result(10) == Cleared(chunks=0)
    assert served(server) == {"lookup": {"ok": 1}, "clear": {"ok": 1}}


def test_a_request_of_this_process_may_be_answered_later(server):
    later = server.service.answer = Later()
    asked = server.loop.ask(EndSession(request="r"), 5)
    assert server.loop.call(lambda: server.loop.waiting).result(10) == 1
    assert not asked.done()
    reply = ErrorReply(code="failed", message="no such luck")
    server.loop.call(lambda: server.service.due.append((later, reply))).result(10)
    assert asked.result(10) == reply
    assert server.loop.call(lambda: server.loop.waiting).result(10) == 0
    assert served(server) == {"end_session": {"failed": 1}}


def test_a_cancelled_request_is_not_made(server):
    server.service.gate.clear()
    held = server.loop.call(server.service.gate.wait)
    late = server.loop.ask(LOOKUP, 5)
    assert late.cancel()
    server.service.gate.set()
    held.result(10)
    server.loop.call(lambda: None).result(10)
    assert server.service.asked == []


def test_a_request_that_comes_too_late_fails():
    loop = CacheServerLoop("tcp://127.0.0.1:0", incarnation="i")
    before = loop.ask(LOOKUP, 5)
    loop.close()
    with pytest.raises(Closed):
        before.result(10)
    with pytest.raises(Closed):
        loop.ask(LOOKUP, 5).result(10)


def test_time_spent_waiting_is_not_busy(server):
    before = server.loop.call(lambda: server.loop.counters.busy_seconds).result(10)
    began = server.loop.now()
    server.service.ticked.clear()
    assert server.service.ticked.wait(10)
    after = server.loop.call(lambda: server.loop.counters.busy_seconds).result(10)
    assert 0 <= after - before < server.loop.now() - began
