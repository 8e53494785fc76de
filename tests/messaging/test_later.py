"""Replies that a service gives later: once each, to whom they belong, while the loop goes on."""

from __future__ import annotations

import time

from formkit import piece

from lmcache_kernels.errors import PeerGone, RemoteError, TransferTimeout
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.messages import (
    Clear,
    Cleared,
    ErrorReply,
    Lookup,
    RegisterCache,
    Registered,
)
from lmcache_kernels.transfer.serving.later import Later


def lookup(size=1):
    return Lookup(request="r", shards=[], digests=bytes(size))


def give(server, *due):
    server.service.due = list(due)
    server.loop.wake()


def ask_for_later(server, client, timeout=30):
    """A request that the service holds, and what it has answered instead."""
    server.service.answer = later = Later()
    return client.request(Clear(), timeout), later


def test_a_reply_comes_when_the_service_gives_it(server, client, eventually):
    first, one = ask_for_later(server, client)
    eventually(lambda: len(server.service.asked_of(Clear)) == 1)
    second, two = ask_for_later(server, client)
    eventually(lambda: len(server.service.asked_of(Clear)) == 2)
    server.service.answer = None
    assert client.request(lookup(3), 5).result(10).chunks == 3
    assert not first.done()
    give(server, (two, Cleared(chunks=2)))
    assert second.result(10) == Cleared(chunks=2)
    assert not first.done()
    give(server, (one, ErrorReply(code="stopped", message="x")))
    assert isinstance(first.exception(10), RemoteError)
    eventually(lambda: server.loop.counters.replies == 4)  # the greeting among them


def test_nobody_waits_for_a_reply_that_comes_too_late(server, client, eventually):
    future, later = ask_for_later(server, client, timeout=0.1)
    assert isinstance(future.exception(10), TransferTimeout)
    give(server, (later, Cleared(chunks=1)))
    eventually(lambda: client.strays == 1)
    server.service.answer = None
    assert client.request(lookup(), 5).result(10).chunks == 1


def test_a_client_that_has_gone_gets_no_late_reply(server, connect, eventually):
    gone, other = connect(server.url), connect(server.url)
    laters = []
    for _ in range(2):
        laters.append(ask_for_later(server, gone)[1])
        eventually(lambda: len(server.service.asked_of(Clear)) == len(laters))
    server.service.answer = None
    gone.close()
    # Its end and a reply come from different sides; so a reply may still find it there.
    give(server, (laters.pop(), Cleared(chunks=1)))
    assert other.request(lookup(), 5).result(10).chunks == 1
    give(server, (laters.pop(), Cleared(chunks=1)))
    assert other.request(lookup(), 5).result(10).chunks == 1
    assert not server.loop._waiting


def test_a_service_that_cannot_give_replies_does_not_end_the_loop(server, client, eventually):
    def broken(now):
        raise ZeroDivisionError

    server.service.finished = broken
    assert client.request(lookup(), 5).result(10).chunks == 1
    assert client.request(lookup(), 5).result(10).chunks == 1
    eventually(lambda: server.loop.counters.failures >= 1)


def test_a_service_is_told_until_when_somebody_waits(server, client):
    deadlines = []
    handle = server.service.handle

    def note(request, now, deadline):
        deadlines.append((type(request), deadline - now))
        return handle(request, now, deadline)

    server.service.handle = note
    began = time.monotonic()
    client.request(lookup(), 7).result(10)
    ((kind, left),) = deadlines
    assert kind is Lookup
    assert 7 - (time.monotonic() - began) - 0.1 <= left <= 7


def test_a_lost_server_ends_what_it_would_have_answered_later(server, client, eventually):
    future, _ = ask_for_later(server, client)
    eventually(lambda: len(server.service.asked_of(Clear)) == 1)
    server.stop()
    assert isinstance(future.exception(10), PeerGone)


def test_registering_a_cache_counts_as_registered(server, connect, eventually):
    client = connect(server.url, instance_id=8)
    request = RegisterCache(instance=8, shard=bytes(32), part=ShardPart(), groups=[(piece(),)])
    server.service.answer = Registered(arena_name="a", arena_bytes=1)
    assert not client.registered
    client.request(request, 5).result(10)
    eventually(lambda: client.registered)
