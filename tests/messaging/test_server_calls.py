"""What other threads have the server's thread do between requests."""

from __future__ import annotations

import threading

import pytest
import zmq

from lmcache_kernels.adapters.messaging import wire
from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.errors import Closed
from lmcache_kernels.transfer.messages import MAX_PART, GetPart, Part


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


def test_the_last_replies_leave_although_the_server_closes_right_behind_them(server):
    """More of them than fits into the buffers between two processes."""
    count = 16
    server.service.answer = Part(data=bytes(MAX_PART))
    answer, asked = server.service.handle, []

    def handle(*request):
        asked.append(request)
        if len(asked) == count:
            server.loop.stop()
        return answer(*request)

    server.service.handle = handle
    part = GetPart(instance=1, ticket=1, index=0, start=0, nbytes=MAX_PART)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.RCVHWM, 1)
        dealer.rcvtimeo = 10_000
        dealer.connect(server.url)
        for uid in range(count):
            frames = wire.request_frames(
                uid, server.service.incarnation, 0.0, wire.encode_body(part)
            )
            dealer.send_multipart(frames)
        server.thread.join(10)
        closing = threading.Thread(target=server.loop.close)
        closing.start()
        replies = [wire.decode_reply(dealer.recv_multipart()) for _ in range(count)]
        closing.join(10)
    assert replies == [(uid, server.service.answer) for uid in range(count)]
