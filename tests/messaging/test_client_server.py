"""Client and server over real sockets, with servers that fail, hang, die and lie."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import pickle  # noqa: TID251 - to see that nobody else does
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout

import msgspec
import psutil
import pytest
import zmq

from lmcache_kernels.adapters.messaging import dealer, sockets, wire
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.server import UNREAD_LIMIT, CacheServerLoop
from lmcache_kernels.adapters.messaging.session import MAX_PENDING
from lmcache_kernels.errors import (
    Closed,
    ConfigError,
    LocalProtocolError,
    PeerGone,
    RemoteError,
    RemoteProtocolError,
    TransferTimeout,
    TransportError,
)
from lmcache_kernels.transfer.messages import (
    PROTOCOL_VERSION,
    Clear,
    Done,
    ErrorReply,
    Found,
    Hello,
    Lookup,
    Ping,
    Pong,
    PrepareStore,
    Register,
    Registered,
    Welcome,
)


def lookup(size):
    return Lookup(request="r", shards=[], digests=bytes(size))


def register(instance=7):
    return Register(instance=instance, shard=bytes(32), chunk_bytes=1)


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


ADDRESSES = ["tcp://127.0.0.1:0", "tcp://localhost:0", "ipc"]
if has_ipv6():
    ADDRESSES.append("tcp://[::1]:0")


# --- requests and replies -------------------------------------------------------------------------


@pytest.mark.parametrize("url", ADDRESSES)
def test_requests_are_answered_over_every_transport(url, start_server, connect, tmp_path):
    server = start_server(f"ipc://{tmp_path}/s" if url == "ipc" else url)
    client = connect(server.url, name="worker")
    assert client.incarnation == server.service.incarnation
    assert client.chunk_tokens == 256
    assert client.request(lookup(3), 5).result(10) == Found(chunks=3)
    (hello,) = server.service.asked_of(Hello)
    assert hello.software.startswith("lmcache-kernels ")


def test_fault_i04_many_threads_each_get_their_own_replies(client):
    def ask(thread):
        futures = [(size, client.request(lookup(size), 60)) for size in range(thread, 500 + thread)]
        return [future.result(60).chunks == size for size, future in futures]

    with ThreadPoolExecutor(16) as pool:
        answers = [right for part in pool.map(ask, range(16)) for right in part]
    assert len(answers) == 16 * 500
    assert all(answers)
    assert client.pending == 0
    assert client.strays == 0


def test_mp_013_who_stops_waiting_may_come_back(server, client):
    server.service.gate.clear()
    future = client.request(lookup(3), 30)
    for _ in range(2):
        with pytest.raises(FutureTimeout):
            future.result(0.05)
    server.service.gate.set()
    assert future.result(10) == future.result(0) == Found(chunks=3)


def test_fault_i10_many_tiny_and_odd_messages_are_each_answered(client):
    names = ("\U0001f642" * 128, "\u6f22\u5b57" * 250, "a" * 512, "", "\0")
    odd = [Lookup(request=name, shards=[], digests=b"x") for name in names]
    for _ in range(2):
        futures = [client.request(message, 60) for message in odd * 1000]
        assert all(future.result(60) == Found(chunks=1) for future in futures)
    large = client.request(lookup(4 << 20), 30)
    assert large.result(30) == Found(chunks=4 << 20)
    assert client.pending == 0


def test_several_clients_share_a_server(server, connect):
    clients = [connect(server.url) for _ in range(8)]
    futures = [(i, c.request(lookup(i), 30)) for i, c in enumerate(clients * 50)]
    assert all(future.result(30) == Found(chunks=i) for i, future in futures)


def test_a_request_never_blocks_and_cannot_be_cancelled(server, client):
    server.service.gate.clear()
    began = time.monotonic()
    futures = [client.request(lookup(1 << 20), 30) for _ in range(50)]
    assert time.monotonic() - began < 2
    assert not any(future.cancel() for future in futures)
    server.service.gate.set()
    assert all(future.result(30) == Found(chunks=1 << 20) for future in futures)


@pytest.mark.parametrize(
    ("message", "timeout"),
    [
        (Ping(instance=2**64), 1),
        (PrepareStore(instance=1, digests=bytes(wire.MAX_FRAME)), 1),
        (Clear(), float("nan")),
        (Clear(), float("inf")),
        (Clear(), None),
        (Clear(), "1"),
    ],
    ids=["beyond 64 bits", "too large", "NaN", "infinite", "None", "text"],
)
def test_mp_010_a_misuse_fails_the_future_and_nothing_else(client, message, timeout):
    assert isinstance(client.request(message, timeout).exception(0), LocalProtocolError)
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)


def test_a_request_with_no_time_fails_and_harms_nobody(client):
    assert isinstance(client.request(lookup(1), 0).exception(10), TransferTimeout)
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)


@pytest.mark.parametrize("ugly", [ValueError("x"), SystemExit(1), KeyboardInterrupt()])
def test_a_callback_that_raises_does_not_end_the_client(server, client, ugly):
    def callback(_):
        raise ugly

    server.service.gate.clear()  # it must not be over before the callback is there
    future = client.request(lookup(1), 5)
    future.add_done_callback(callback)
    server.service.gate.set()
    assert future.result(10) == Found(chunks=1)
    assert client.request(lookup(2), 5).result(10) == Found(chunks=2)


def test_a_callback_may_ask_again_and_close(client):
    answers = []
    closed = threading.Event()

    def again(future):
        answers.append(future.result(0))
        if len(answers) < 3:
            client.request(lookup(len(answers)), 5).add_done_callback(again)
        else:
            client.close()
            closed.set()

    client.request(lookup(0), 5).add_done_callback(again)
    assert closed.wait(10)
    assert [answer.chunks for answer in answers] == [0, 1, 2]


def test_requests_that_find_no_room_fail_at_once(start_server, connect, monkeypatch):
    server = start_server()
    monkeypatch.setattr(sockets, "QUEUE_LIMIT", 4)
    client = connect(server.url)
    server.service.gate.clear()
    futures = [client.request(lookup(1 << 22), 30) for _ in range(60)]
    done, _ = wait(futures, 30, return_when="FIRST_COMPLETED")
    assert isinstance(next(iter(done)).exception(0), PeerGone)
    server.service.gate.set()
    ended = [future.exception(30) for future in futures]
    assert all(error is None or isinstance(error, PeerGone) for error in ended)
    assert ended[0] is None
    assert client.pending == 0


def test_more_requests_than_have_room_at_the_server_fail_at_once(server, client):
    server.service.gate.clear()
    futures = [client.request(lookup(0), 60) for _ in range(MAX_PENDING + 500)]
    ended = wait(futures[MAX_PENDING:], 30)
    assert not ended.not_done
    assert all(isinstance(future.exception(0), PeerGone) for future in ended.done)
    server.service.gate.set()
    assert all(future.result(60) == Found(chunks=0) for future in futures[:MAX_PENDING])
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)
    assert server.loop.counters.undelivered == 0


# --- servers that fail ----------------------------------------------------------------------------


def test_mp_009_d04_fault_e06_a_handler_that_raises_answers_each_request(server, client):
    """Requests whose handler fails are all answered, and nothing of them is kept."""
    server.service.error = RuntimeError

    def storm(count):
        futures = [client.request(lookup(32), 30) for _ in range(count)]
        return [future.exception(30) for future in futures]

    for _ in range(3):
        storm(1000)
    gc.collect()
    before = psutil.Process().memory_info().rss
    for _ in range(5):
        errors = storm(1000)
        assert [error.code for error in errors] == ["internal"] * 1000
    errors.clear()
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 8 << 20
    assert client.pending == 0
    assert server.loop.counters.failures == 8000
    server.service.error = None
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)


def test_fault_e06_an_unanswered_request_is_forgotten_and_its_late_reply_ignored(
    server, client, eventually
):
    """A timeout frees everything at the client, and the reply that comes later finds nobody."""
    server.service.gate.clear()
    future = client.request(lookup(1), 0.2)
    assert isinstance(future.exception(10), TransferTimeout)
    assert client.pending == 0
    server.service.gate.set()
    eventually(lambda: client.strays == 1)
    client.wait_ready(10)
    assert client.request(lookup(2), 5).result(10) == Found(chunks=2)


@pytest.mark.parametrize(
    "answer",
    [Registered(arena_name="\ud800", arena_bytes=1), object(), None.__class__],
    ids=["text that is no text", "no reply", "a class"],
)
def test_an_answer_that_cannot_be_sent_is_an_internal_error(server, client, answer):
    server.service.answer = answer
    error = client.request(lookup(1), 5).exception(10)
    assert isinstance(error, RemoteError)
    assert error.code == "internal"


def test_an_answer_of_another_type_is_the_servers_fault(server, client):
    server.service.answer = Done()
    assert isinstance(client.request(lookup(1), 5).exception(10), RemoteProtocolError)


def test_mp_102_periodic_work_that_fails_goes_on(server, client, eventually):
    server.service.tick_error = RuntimeError
    eventually(lambda: server.service.ticks >= 2)
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)


def test_mp_016_d06_requests_that_waited_beyond_their_deadline_are_not_executed(
    server, client, connect
):
    server.service.gate.clear()
    blocking = client.request(lookup(1), 30)
    assert server.service.entered.wait(10)
    late = client.request(register(), 0.2)
    assert isinstance(late.exception(10), TransferTimeout)
    server.service.gate.set()
    assert blocking.result(10) == Found(chunks=1)
    assert client.request(lookup(2), 5).result(10) == Found(chunks=2)
    assert server.service.asked_of(Register) == []


# --- servers that go away -------------------------------------------------------------------------


def test_fault_e09_a_missing_server_is_reported_in_time_with_the_remedy(connect):
    url = f"tcp://127.0.0.1:{unused_port()}"
    client = connect(url, ready=False)
    began = time.monotonic()
    with pytest.raises(ConnectionError) as caught:
        client.wait_ready(0.3)
    assert time.monotonic() - began < 2
    for word in (
        url,
        "0.3 s",
        "nothing listens there",
        "lmcache-kernels serve --chunk-size",
        "give the address",
    ):
        assert word in str(caught.value)
    assert "lmcache.mp" not in str(caught.value), "that is for users of vLLM"
    assert isinstance(client.request(lookup(1), 5).exception(0), PeerGone)


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20])
def test_something_else_at_the_address_is_no_server(connect, greeting):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", ready=False)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(greeting)
            with pytest.raises(PeerGone, match="no cache server, or"):
                client.wait_ready(0.3)
            client.close()


def test_a_client_that_was_there_first_finds_the_server(start_server, connect):
    port = unused_port()
    client = connect(f"tcp://127.0.0.1:{port}", ready=False)
    with pytest.raises(PeerGone):
        client.wait_ready(0.05)
    server = start_server(f"tcp://127.0.0.1:{port}")
    client.wait_ready(10)
    assert client.incarnation == server.service.incarnation


def test_fault_e01_a_restart_is_noticed_without_a_new_client(start_server, connect):
    first = start_server()
    client = connect(first.url, instance_id=7)
    assert client.request(register(), 5).result(10)
    assert client.registered
    first.stop()
    second = start_server(first.url)
    # The end of the first may not have been seen yet.
    for _ in range(100):
        client.wait_ready(10)
        if client.incarnation == second.service.incarnation:
            break
        client.request(Ping(), 1).exception(10)
    assert client.incarnation == second.service.incarnation
    assert not client.registered


def test_mp_d08_a_lost_registration_is_noticed_by_a_ping(server, connect, eventually):
    client = connect(server.url, ping_interval=0.05, instance_id=7)
    eventually(lambda: client.registered)
    client.instance_id = 8
    eventually(lambda: not client.registered)


def test_an_unanswered_ping_makes_a_server_suspect(server, connect, eventually):
    client = connect(server.url, ping_interval=0.1)
    blocker = connect(server.url)
    server.service.gate.clear()
    blocked = blocker.request(lookup(1), 30)
    eventually(lambda: not is_ready(client))
    assert isinstance(client.request(lookup(1), 30).exception(10), PeerGone)
    server.service.gate.set()
    assert blocked.result(10) == Found(chunks=1)
    client.wait_ready(10)
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)


def is_ready(client):
    try:
        client.wait_ready(0)
    except PeerGone:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"chunk_tokens": 512}, ("512", "256", "--chunk-size", "chunks of 512 tokens here")),
        ({"protocol": 99}, ("99", str(PROTOCOL_VERSION))),
    ],
    ids=["chunk size", "version"],
)
def test_a_server_that_does_not_fit_is_refused(arguments, words, start_server, connect):
    client = connect(start_server(**arguments).url, chunk_tokens=256, ready=False)
    with pytest.raises(ConfigError) as caught:
        client.wait_ready(10)
    assert str(caught.value) == client.refused
    assert all(word in client.refused for word in words)
    error = client.request(lookup(1), 5).exception(10)
    assert isinstance(error, PeerGone)
    assert str(error) == client.refused


# --- sockets that cannot be opened ----------------------------------------------------------------


class Exhausted:
    """What makes sockets, as it is when the process has no descriptors left."""

    def __init__(self, monkeypatch, target, name):
        self.attempts: list[float] = []
        self.failing = threading.Event()
        original = getattr(target, name)

        def limited(*arguments):
            if not self.failing.is_set():
                return original(*arguments)
            self.attempts.append(time.monotonic())
            raise zmq.ZMQError(errno.EMFILE)

        monkeypatch.setattr(target, name, limited)


@pytest.fixture(params=["socket", "monitor"])
def exhausted(request, monkeypatch):
    where = {
        "socket": (dealer, "bounded_socket"),
        "monitor": (zmq.Socket, "get_monitor_socket"),
    }
    return Exhausted(monkeypatch, *where[request.param])


def test_a_client_without_descriptors_connects_again_once_there_are_some(
    start_server, connect, exhausted, monkeypatch, eventually, caplog
):
    monkeypatch.setattr(dealer, "RECONNECT_MAX_MS", 100)
    first = start_server()
    client = connect(first.url)
    for _ in range(2):
        exhausted.attempts.clear()
        caplog.clear()
        exhausted.failing.set()
        first.stop()
        eventually(lambda: len(exhausted.attempts) >= 4)
        assert isinstance(client.request(lookup(1), 5).exception(10), PeerGone)
        with pytest.raises(PeerGone, match="no socket could be opened: Too many open files"):
            client.wait_ready(0)
        pauses = [b - a for a, b in itertools.pairwise(exhausted.attempts)]
        assert min(pauses) >= 0.1, "it must not spin"
        warnings = [r for r in caplog.records if "no socket could be opened" in r.message]
        assert len(warnings) == 1
        exhausted.failing.clear()
        first = start_server(first.url)
        client.wait_ready(10)
        assert client.request(lookup(2), 5).result(10) == Found(chunks=2)


def test_a_client_without_descriptors_closes_at_once(start_server, connect, exhausted, eventually):
    server = start_server()
    client = connect(server.url)
    exhausted.failing.set()
    server.stop()
    eventually(lambda: exhausted.attempts)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < dealer.RECONNECT_MAX_MS / 1000
    assert not client._thread.is_alive()
    assert len(exhausted.attempts) == 1


def test_a_client_that_cannot_open_its_first_socket_says_so(exhausted):
    exhausted.failing.set()
    with pytest.raises(TransportError, match="no socket could be opened: Too many open files"):
        CacheClient("tcp://127.0.0.1:1")


def test_a_shared_context_that_is_terminated_ends_its_clients(server, connect):
    context = zmq.Context()
    client = connect(server.url, context=context)
    server.service.gate.clear()
    future = client.request(lookup(1), 60)
    assert server.service.entered.wait(10)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(context.term).result(10)
    assert isinstance(future.exception(10), Closed)
    client.close()
    assert not client._thread.is_alive()


# --- closing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["hung", "missing"])
def test_mp_014_closing_is_quick_and_ends_what_is_pending(peer, server, connect):
    server.service.gate.clear()
    if peer == "hung":
        client = connect(server.url)
    else:
        client = connect(f"tcp://127.0.0.1:{unused_port()}", ready=False)
    futures = [client.request(lookup(1000), 60) for _ in range(100)]
    began = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - began < 2
    expected = Closed if peer == "hung" else PeerGone
    assert all(isinstance(future.exception(0), expected) for future in futures)
    assert isinstance(client.request(lookup(1), 1).exception(0), Closed)
    with pytest.raises(Closed):
        client.wait_ready(1)


def test_closing_from_many_threads_while_others_ask(client):
    def ask(_):
        futures = [client.request(lookup(1), 30) for _ in range(200)]
        return [future.exception(30) for future in futures]

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, i) for i in range(4)]
        closing = [pool.submit(client.close) for _ in range(4)]
        for future in closing:
            future.result(10)
        errors = [error for future in asking for error in future.result(40)]
    assert all(error is None or isinstance(error, Closed) for error in errors)


def test_closing_wakes_who_waits_for_a_server(connect):
    client = connect(f"tcp://127.0.0.1:{unused_port()}", ready=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_ready, 30)
        client.close()
        assert isinstance(waiting.exception(10), Closed)


def test_clients_leave_no_threads_and_no_descriptors(server, connect):
    connect(server.url).close()
    process = psutil.Process()
    descriptors, threads = process.num_fds(), process.num_threads()
    for _ in range(10):
        connect(server.url).close()
    gc.collect()
    assert process.num_threads() <= threads
    assert process.num_fds() <= descriptors + 2  # the server may not have closed its ends yet


def test_a_shared_context_survives_the_client(server, connect):
    with zmq.Context() as context:
        connect(server.url, context=context).close()
        assert not context.closed
        other = connect(server.url, context=context)
        assert other.request(lookup(1), 5).result(10) == Found(chunks=1)
        other.close()


@pytest.mark.parametrize("url", ["", "bogus", "tcp://", "udp://127.0.0.1:1", "tcp://127.0.0.1:x"])
def test_a_url_that_cannot_be_is_a_config_error(url):
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        CacheClient(url)


@pytest.mark.parametrize("interval", [0, -1, float("inf"), float("nan")])
def test_a_ping_interval_that_cannot_be_is_a_config_error(interval):
    with pytest.raises(ConfigError, match="ping_interval"):
        CacheClient("tcp://127.0.0.1:1", ping_interval=interval)


def test_a_failing_thread_closes_the_client(client, monkeypatch):
    def broken(*_):
        raise RuntimeError("bug")

    monkeypatch.setattr(client._session, "tick", broken)
    assert isinstance(client.request(lookup(1), 30).exception(10), Closed | type(None))
    client._thread.join(10)
    assert not client._thread.is_alive()
    assert isinstance(client.request(lookup(1), 30).exception(0), Closed)


EXITS = """
import atexit, os, sys, threading
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.transfer.messages import Clear
client = CacheClient(sys.argv[1])
client.wait_ready(20)
{}
futures = [client.request(Clear(), 60) for _ in range(100)]
"""


@pytest.mark.parametrize(
    "ending",
    ["pass", "atexit.register(client.close)", "threading.Thread(target=client.close).start()"],
    ids=["forgotten", "atexit", "thread"],
)
def test_mp_015_fault_i02_a_process_with_an_open_client_exits(ending, server):
    server.service.gate.clear()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXITS.format(ending), server.url],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")


FORKS = """
import os, sys
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.errors import LocalProtocolError
from lmcache_kernels.transfer.messages import Ping
client = CacheClient(sys.argv[1])
client.wait_ready(20)
child = os.fork()
if child == 0:
    error = client.request(Ping(), 5).exception(5)
    assert isinstance(error, LocalProtocolError) and str(os.getppid()) in str(error), error
    client.close()
    own = CacheClient(sys.argv[1])
    own.wait_ready(20)
    assert own.request(Ping(), 5).result(10)
    own.close()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert client.request(Ping(), 5).result(10)
client.close()
"""


def test_fault_i03_a_forked_child_is_told_to_make_its_own_client(server):
    done = subprocess.run(
        [sys.executable, "-c", FORKS, server.url], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- the server against hostile sockets -----------------------------------------------------------


@pytest.fixture
def raw(server):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 10_000
        dealer.connect(server.url)
        yield dealer


def call(raw, uid, incarnation, message, deadline=0.0):
    raw.send_multipart(wire.request_frames(uid, incarnation, deadline, wire.encode_body(message)))
    return wire.decode_reply(raw.recv_multipart())


def test_mp_011_d05_fault_i06_malformed_frames_are_counted_and_the_server_goes_on(
    server, raw, client
):
    inc = server.service.incarnation
    good, body = wire.request_frames(5, inc, 0.0, wire.encode_body(Clear()))
    junk = [
        [b""],
        [b"", b""],
        [b"\xc1", body],
        [b"x" * 1000],
        [b"\x91" * 100_000, body],
        [b""] * 200,
        [b"", good, body],
        [body, good],
        [os.urandom(100), os.urandom(100)],
        [good[:-1], body],
    ]
    for frames in junk:
        raw.send_multipart(frames)
    assert call(raw, 1, inc, Ping()) == (1, Pong(incarnation=inc, registered=False))
    assert server.loop.counters.malformed == len(junk)
    assert server.service.asked_of(Clear) == []
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)


class Opened:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_fault_i08_nothing_that_arrives_is_unpickled(server, raw, client, tmp_path):
    canary = tmp_path / "canary"
    inc = server.service.incarnation
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        evil = pickle.dumps(Opened(canary), protocol)
        good, body = wire.request_frames(5, inc, 0.0, wire.encode_body(Clear()))
        hidden = msgspec.msgpack.encode({"op": "lookup", "request": evil, "shards": [evil]})
        for frames in (
            [evil],
            [evil, evil],
            [good, evil],
            [evil, body],
            [good, body, evil],
            [good, hidden],
        ):
            raw.send_multipart(frames)
        with pytest.raises(wire.MalformedMessage):
            wire.decode_reply([evil, evil])
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)
    assert not canary.exists()
    pickle.loads(evil).close()  # the trap does work
    assert canary.exists()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "bad_request"),
        (b"\xc1", "bad_request"),
        (b"\x82\xa2op\xa4ping\xa1x" + b"\x91" * 100_000, "bad_request"),
        (msgspec.msgpack.encode({"op": "register"}), "bad_request"),
        (msgspec.msgpack.encode({"op": "ping"}) + b"\0", "bad_request"),
        (msgspec.msgpack.encode({"op": "ping", "instance": "7"}), "bad_request"),
        (msgspec.msgpack.encode({"op": "future_thing"}), "unsupported"),
    ],
)
def test_a_bad_body_is_answered_with_its_code(server, raw, body, code):
    header = wire.request_frames(77, server.service.incarnation, 0.0, b"")[0]
    raw.send_multipart([header, body])
    uid, reply = wire.decode_reply(raw.recv_multipart())
    assert uid == 77
    assert isinstance(reply, ErrorReply)
    assert reply.code == code


def test_a_frame_that_is_too_large_disconnects_its_sender_only(server, raw, client):
    raw.send_multipart([b"x", bytes(wire.MAX_FRAME + 1)])
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)
    # The sender connects again by itself, to be served like anybody.
    inc = server.service.incarnation
    raw.rcvtimeo = 500
    for _ in range(20):
        try:
            assert call(raw, 1, inc, Ping())[0] == 1
            return
        except zmq.Again:  # went down with the connection  # noqa: PERF203
            continue
    pytest.fail("not served any more")


@pytest.mark.parametrize("incarnation", ["", "other", "x" * 64])
def test_requests_meant_for_another_server_are_refused(server, raw, incarnation):
    uid, reply = call(raw, 3, incarnation, register())
    assert (uid, reply.code) == (3, "stale_incarnation")
    assert server.service.asked_of(Register) == []
    assert isinstance(call(raw, 4, incarnation, Hello(protocol=1))[1], Welcome)


def test_requests_whose_deadline_has_passed_are_refused(server, raw):
    inc = server.service.incarnation
    _, reply = call(raw, 3, inc, register(), deadline=time.monotonic() - 0.001)
    assert reply.code == "expired"
    assert server.service.asked_of(Register) == []
    _, reply = call(raw, 3, inc, register(), deadline=time.monotonic() + 60)
    assert isinstance(reply, Registered)


def test_each_request_has_exactly_one_reply(server, raw):
    inc = server.service.incarnation
    kinds = [
        lambda i: (inc, 0.0, wire.encode_body(Clear())),
        lambda i: ("other", 0.0, wire.encode_body(Clear())),
        lambda i: (inc, 0.001, wire.encode_body(Clear())),
        lambda i: (inc, 0.0, b"\xc1"),
        lambda i: (inc, 0.0, msgspec.msgpack.encode({"op": "zork"})),
    ]
    for i in range(1000):
        raw.send_multipart(wire.request_frames(i, *kinds[i % len(kinds)](i)))
    replies = [wire.decode_reply(raw.recv_multipart()) for _ in range(1000)]
    assert [uid for uid, _ in replies] == list(range(1000))
    expected = [None, "stale_incarnation", "expired", "bad_request", "unsupported"] * 200
    assert [getattr(reply, "code", None) for _, reply in replies] == expected
    assert raw.poll(50) == 0
    assert server.loop.counters.replies == 1000


def test_fault_i01_a_client_that_does_not_read_is_not_waited_for(
    start_server, connect, monkeypatch, eventually
):
    monkeypatch.setattr(sockets, "QUEUE_LIMIT", 4)
    server = start_server()
    monkeypatch.undo()
    server.service.answer = Registered(arena_name="x" * (1 << 20), arena_bytes=1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.linger = 0
        deaf.rcvhwm = 1
        deaf.connect(server.url)
        for i in range(100):
            body = wire.encode_body(Clear())
            deaf.send_multipart(wire.request_frames(i, server.service.incarnation, 0.0, body))
        client = connect(server.url)
        eventually(lambda: server.loop.counters.undelivered > 0)
        assert client.request(register(), 20).result(30)


def test_fault_i01_a_client_that_asks_faster_than_it_is_served_does_not_fill_the_server(
    server, client
):
    """What is not read yet stays with the client, but for a bounded part."""
    server.service.gate.clear()
    client.request(Clear(), 60)
    assert server.service.entered.wait(10)
    body = wire.encode_body(lookup(1 << 20))
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger, raw.sndhwm = 0, 1
        raw.rcvtimeo = 10_000
        raw.connect(server.url)
        sent = 0
        while sent < 1000 and raw.poll(500, zmq.POLLOUT):  # until the connection is full, too
            frames = wire.request_frames(sent, server.service.incarnation, 0.0, body)
            raw.send_multipart(frames)
            sent += 1
        server.service.gate.set()
        in_the_connection = 32  # megabytes at most, whatever the kernel's settings
        assert sent < UNREAD_LIMIT + in_the_connection
        for _ in range(sent):
            assert isinstance(wire.decode_reply(raw.recv_multipart())[1], Found)


def test_a_client_that_has_gone_is_not_waited_for(server, client):
    server.service.gate.clear()
    with zmq.Context() as context, context.socket(zmq.DEALER) as gone:
        gone.linger = 0
        gone.connect(server.url)
        body = wire.encode_body(Clear())
        for i in range(10):
            gone.send_multipart(wire.request_frames(i, server.service.incarnation, 0.0, body))
        assert server.service.entered.wait(10)
    server.service.gate.set()
    assert client.request(lookup(1), 5).result(10) == Found(chunks=1)


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "10.1.2.3", "[::]", "example.com", "eth0", "[fe80::1]"]
)
def test_an_address_that_others_reach_is_refused(host):
    with pytest.raises(ConfigError, match="CURVE keys; see lmcache-kernels keys"):
        CacheServerLoop(f"tcp://{host}:0", incarnation="i")


@pytest.mark.parametrize(
    "url",
    ["", "tcp://127.0.0.1", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:99999", "ipc://", "ipc://*",
     "inproc://x", "tcp://127.0.0.1:1:2", "tcp://::1:5"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError):
        CacheServerLoop(url, incarnation="i")


def test_fault_e14_a_port_in_use_names_it_and_the_remedy(server):
    port = server.url.rsplit(":", 1)[1]
    with pytest.raises(ConfigError, match=f"port {port} is in use.*--port"):
        CacheServerLoop(server.url, incarnation="i")


def test_fault_e14_an_ipc_path_is_not_taken_from_a_living_server(start_server, connect, tmp_path):
    url = f"ipc://{tmp_path}/s"
    first = start_server(url)
    with pytest.raises(ConfigError, match="in use"):
        CacheServerLoop(url, incarnation="i")
    assert connect(url).request(lookup(1), 5).result(10) == Found(chunks=1)
    first.stop()
    start_server(url)


def test_a_path_that_cannot_be_bound_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be bound"):
        CacheServerLoop(f"ipc://{tmp_path}/missing/s", incarnation="i")


def test_stopping_comes_early_late_and_twice():
    with CacheServerLoop("tcp://127.0.0.1:0", incarnation="i") as loop:
        loop.stop()
        loop.run(None)
        loop.stop()
    loop.stop()
    loop.close()


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:6000", "tcp://127.0.0.1:6000:5555", "tcp://:5555", "tcp://localhost"),
        "",
        None,
        5555,
    ],
)
def test_what_is_no_url_is_refused_without_a_trace_of_zmq(url):
    with pytest.raises(
        ConfigError, match="url: expected tcp://HOST:PORT or ipc://PATH, got"
    ) as caught:
        CacheClient(url)
    assert caught.value.__cause__ is caught.value.__context__ is None
