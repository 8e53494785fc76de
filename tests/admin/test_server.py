"""Clients that misbehave cost nobody else anything, and closing leaves nothing behind."""

from __future__ import annotations

import http.client
import socket
import threading

import psutil
import pytest
from adminkit import TOKEN, WAIT, AdminRig

from lmcache_kernels.adapters.admin import body, server
from lmcache_kernels.errors import ConfigError


def ends(sock):
    """Everything that comes until the other side ends the connection; fails if it does not."""
    sock.settimeout(WAIT)
    came = b""
    try:
        while piece := sock.recv(1 << 16):
            came += piece
    except ConnectionResetError:
        pass
    return came


def answers(rig):
    try:
        return rig.http("GET", "/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def head(path="/health", method="GET", **headers):
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def test_each_answer_ends_its_connection(rig):
    with rig.connect() as sock:
        sock.sendall(head() + head())
        assert ends(sock).count(b"HTTP/1.1 200") == 1


def test_clients_that_never_end_their_requests_block_nobody_and_are_cut_off(rig, monkeypatch):
    monkeypatch.setattr(server, "CONNECTION_SECONDS", 0.5)
    slow = []
    for sent in (b"", b"G", b"GET /health HTTP/1.1\r\n", head()[:-1]):
        slow += [rig.connect() for _ in range(10)]
        for sock in slow[-10:]:
            sock.sendall(sent)
    authorization = f"Bearer {TOKEN}"
    for _ in range(10):
        sock = rig.connect()
        sock.sendall(
            head("/cache/clear", "POST", authorization=authorization, content_length=100) + b"{"
        )
        slow.append(sock)
    assert rig.http("GET", "/health", timeout=1.0)[0] == 200
    assert rig.get("/status")["phase"] == "serving"
    for sock in slow:
        with sock:
            assert b"200" not in ends(sock)
    assert "clear" not in rig.get("/status")["requests"]


def test_a_client_that_never_reads_its_answer_blocks_nobody(rig):
    with rig.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.sendall(head("/metrics"))
        assert rig.http("GET", "/metrics", timeout=2.0)[0] == 200


def test_more_connections_than_there_may_be_are_closed_at_once(rig, monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    held = [rig.connect() for _ in range(5)]
    for sock in held:
        sock.sendall(b"GET")
    # Once these are in, whoever comes is turned away.
    with rig.connect() as sock:
        assert ends(sock) == b""
    for sock in held:
        sock.close()
    while not answers(rig):  # until their ends were seen
        pass


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_is_413_before_it_is_kept(rig, monkeypatch, chunked):
    monkeypatch.setattr(body, "MAX_BODY", 1000)
    if chunked:
        length = {"transfer_encoding": "chunked"}
        piece = b"1f4\r\n" + b" " * 500 + b"\r\n"
    else:
        length = {"content_length": 1 << 40}
        piece = b" " * 500
    with rig.connect() as sock:
        sock.sendall(
            head(
                "/cache/clear",
                "POST",
                authorization=f"Bearer {TOKEN}",
                content_type="application/json",
                **length,
            )
        )
        for _ in range(3):
            sock.sendall(piece)
        assert ends(sock).startswith(b"HTTP/1.1 413")
    assert rig.http("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        *(b"\0" * 100 + b"\r\n\r\n", b"GET\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"\r\n" * 50),
        *(b"GET /health HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(300), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        *(head(content_length="x"), head(content_length=-1), head(transfer_encoding="nonsense")),
        head("/cache/clear", "POST", content_length=3, transfer_encoding="chunked"),
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET http://evil.example.org/health HTTP/1.1\r\nhost: evil.example.org\r\n\r\n",
        b"GET /" + b"a" * (4 << 20) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 700_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * (4 << 20) + b"\r\n\r\n",
        b"CONNECT evil.example.org:80 HTTP/1.1\r\nhost: evil.example.org\r\n\r\n",
    ],
    ids=range(17),
)  # fmt: skip
def test_bytes_that_are_no_good_request_are_refused_and_the_next_is_served(rig, sent, caplog):
    with rig.connect() as sock:
        try:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
        except (ConnectionResetError, BrokenPipeError, OSError):
            pass
        answer = ends(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    assert rig.http("GET", "/health")[0] == 200
    assert "Traceback" not in caplog.text


def test_an_upgrade_is_not_made(rig):
    with rig.connect() as sock:
        sock.sendall(head(connection="Upgrade", upgrade="websocket", sec_websocket_key="x"))
        assert ends(sock).startswith(b"HTTP/1.1 200")


def test_a_bug_is_500_in_json_and_in_the_log(rig, caplog):
    rig.service.tier_stats = None
    status, _, answer = rig.http("GET", "/status")
    assert (status, b"TypeError" in answer) == (500, True)
    assert rig.http("GET", "/health")[0] == 200
    rig.admin.close()
    assert "Traceback" in caplog.text


# --- starting and closing -------------------------------------------------------------------------


def test_an_address_that_is_taken_is_a_config_error(rig):
    _, port = rig.address
    for host, wanted in (
        ("127.0.0.1", port),
        ("192.0.2.1", 0),
        ("no such host", 0),
        ("::1", 70000),
    ):
        with pytest.raises(ConfigError, match="--http-port"):
            server.AdminServer(host, wanted, TOKEN, loop=rig.loop, service=rig.service)


def test_it_listens_on_ipv6_too():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with AdminRig(host="::1") as rig:
        assert rig.admin.endpoint.startswith("http://[::1]:")
        assert rig.get("/health") == {"status": "ok"}


def test_closing_is_quick_ends_what_is_under_way_and_leaves_no_thread():
    before = set(threading.enumerate())
    files = psutil.Process().num_fds()
    rig = AdminRig()
    held = [rig.connect() for _ in range(3)]
    held[0].sendall(b"GET /hea")
    leave = rig.block()
    held[1].sendall(head("/status"))
    rig.admin.close()
    rig.admin.close()
    with pytest.raises(OSError, match="refused"):
        rig.connect()
    leave.set()
    for sock in held:
        ends(sock)
        sock.close()
    rig.close()
    assert set(threading.enumerate()) == before
    assert psutil.Process().num_fds() <= files
