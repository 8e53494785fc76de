"""``lmcache-kernels top``: its pictures at every size, and what it makes of servers that are not there."""

from __future__ import annotations

import http.server
import io
import json
import socket
import threading
from contextlib import contextmanager

import msgspec
import pytest
from adminkit import TOKEN, WAIT, AdminRig
from rich.console import Console
from typer.testing import CliRunner

from lmcache_kernels.adapters.cli import polling
from lmcache_kernels.adapters.cli.main import app
from lmcache_kernels.adapters.cli.polling import Status, StatusPage, Tier
from lmcache_kernels.adapters.cli.top import run_top
from lmcache_kernels.adapters.cli.top_frame import Frame
from lmcache_kernels.errors import ConfigError, PeerGone

GIB = 1 << 30


def status(**changes) -> Status:
    """A server that has served for an hour."""
    before = {
        "version": "0.1.0",
        "incarnation": "one",
        "phase": "serving",
        "uptime_seconds": 3600.0,
        "chunk_tokens": 256,
        "lookups": {"answered": 7200, "tokens": 1_000_000, "hit_tokens": 500_000},
        "tiers": [
            {
                "tier": "l1",
                "hit_tokens": 400_000,
                "used_bytes": 12 * GIB,
                "capacity_bytes": 16 * GIB,
                "chunks": 123_456,
            },
            {
                "tier": "files",
                "hit_tokens": 100_000,
                "used_bytes": 99 * GIB,
                "details": {"away": 0},
            },
        ],
        "stores": {"ok": 3600, "chunks": 9, "bytes": 36 * 10**11, "failed": {"aborted": 36}},
        "loads": {"ok": 7200, "chunks": 9, "bytes": 72 * 10**11, "failed": {"damaged": 0}},
        "evicted": {"chunks": 360_000, "bytes": 1},
        "under_way": {"leases": 12, "stores": 3, "loads": 4, "requests_waiting": 5},
        "workers": [
            {"instance": n, "shard": "ab" * 32, "last_seen_seconds": 1.5, "copies": "worker"}
            for n in range(2)
        ],
        "requests": {"lookup": {"outcomes": {"ok": 7164, "bad_request": 36}, "seconds": 3.0}},
        "slowest": [
            {
                "operation": "prepare_retrieve",
                "outcome": "ok",
                "seconds": 0.5 / n,
                "chunks": 512,
                "seconds_ago": 20.0 * n,
            }
            for n in range(1, 11)
        ],
        "loop": {"busy_seconds": 720.0, "delay_seconds": 0.0001},
    }
    return msgspec.convert(before | changes, Status)


def drawn(frame: Frame, width: int, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), legacy_windows=False)
    console.print(frame)
    return console.file.getvalue().splitlines()


def frame(now: Status | None, **changes) -> Frame:
    return Frame("http://127.0.0.1:8080", now, **changes)


# --- pictures -------------------------------------------------------------------------------------


def test_averages_since_the_start():
    lines = drawn(frame(status()), 100)
    text = "\n".join(lines)
    for part in (
        *("serving", "up 60 min", "12.00/16.00 GiB", "123.5k", "40.0%", "99.00 GiB", "10.0%"),
        *("1.000 GB/s", "2.000 GB/s", "50.0% (in all 50.0%)", "hits since start", "busy"),
        *("20%, evicts 100/s", "3 st, 4 ld, 5 wait", "2 workers", "prepare_retrieve", "500.0 ms"),
    ):
        assert part in text, part


def test_what_happened_between_two_looks():
    before = status()
    now = msgspec.structs.replace(
        before,
        uptime_seconds=3602.0,
        lookups=msgspec.convert(
            {"answered": 7300, "tokens": 1_010_000, "hit_tokens": 509_000}, type(before.lookups)
        ),
        stores=msgspec.structs.replace(
            before.stores, ok=3620, bytes=before.stores.bytes + 3 * 10**9
        ),
        tiers=[Tier("l1", 405_000, 16 * GIB, 16 * GIB, 1), before.tiers[1]],
    )
    text = "\n".join(drawn(frame(now, before=before), 100))
    for part in ("hits in 2.0 s", "90.0% (in all 50.4%)", "1.500 GB/s", "10/s", "50/s", "50.0%"):
        assert part in text, part


def many(tiers: int, workers: int) -> Status:
    return status(
        tiers=[{"tier": f"tier-{n}", "used_bytes": n * GIB} for n in range(tiers)],
        workers=[
            {"instance": 2**62 + n, "shard": "cd" * 32, "last_seen_seconds": n, "copies": "server"}
            for n in range(workers)
        ],
    )


@pytest.mark.parametrize("width", [80, 81, 100, 127, 128, 200, 400])
@pytest.mark.parametrize("height", [24, 30, 60])
@pytest.mark.parametrize(("tiers", "workers"), [(1, 0), (1, 1), (4, 64), (2, 4000)])
def test_a_picture_fits_its_terminal(width, height, tiers, workers):
    lines = drawn(frame(many(tiers, workers), height=height), width, height)
    assert len(lines) < height, "the last line is the terminal's"
    assert max(map(len, lines)) <= width
    text = "\n".join(lines[1:])
    assert "…" not in text, "nothing is cut but the first line"
    assert text.count("tier-") == tiers
    assert "prepare_retrieve" in text
    if workers:
        assert "server" in text
        assert f"{workers} workers" in text


def test_more_room_shows_more():
    small = drawn(frame(many(1, 64), height=24), 80)
    tall = drawn(frame(many(1, 64), height=50), 80)
    assert len(tall) > len(small)


def test_a_silent_worker_comes_first():
    now = status(
        workers=[
            {"instance": n, "shard": "ab" * 32, "last_seen_seconds": n, "copies": "worker"}
            for n in (1, 99, 2)
        ]
    )
    text = "\n".join(drawn(frame(now), 80))
    assert text.index("99.0 s ago") < text.index("2.0 s ago") < text.index("1.0 s ago")


def test_a_tier_that_is_away_and_a_server_that_drains():
    now = status(tiers=[{"tier": "valkey", "details": {"away": 1}}], phase="draining")
    text = "\n".join(drawn(frame(now), 80))
    assert "draining" in text
    assert "away" in text


def test_a_server_that_is_away_is_told_above_what_was_known():
    lines = drawn(frame(status(), away="Connection refused"), 80)
    assert "AWAY, trying again: Connection refused" in lines[0]
    assert len(lines) > 10
    lines = drawn(frame(None, away="Connection refused"), 80)
    assert len(lines) == 1


def test_a_server_that_has_done_nothing():
    now = status(uptime_seconds=0.0, workers=[], slowest=[]).at_start()
    assert "0 workers" in "\n".join(drawn(frame(now), 80))


# --- a real server --------------------------------------------------------------------------------


def test_once_prints_a_real_server():
    with AdminRig() as rig:
        rig.register()
        rig.store(0, 4)
        rig.lookup(0, 8)
        done = CliRunner().invoke(app, ["top", "--once", "--url", rig.admin.endpoint])
    assert done.exit_code == 0, done.output
    for part in ("serving", "l1", "50.0%", "1 workers", "prepare_store"):
        assert part in done.output, part


def test_a_server_that_others_can_reach_wants_the_token(tmp_path):
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    with AdminRig(host="0.0.0.0") as rig:
        url = f"http://127.0.0.1:{rig.address[1]}"
        done = CliRunner().invoke(app, ["top", "--once", "--url", url])
        assert (done.exit_code, "status 401" in done.output) == (1, True)
        done = CliRunner().invoke(app, ["top", "--once", "--url", url, "--token-file", str(token)])
        assert (done.exit_code, "serving" in done.output) == (0, True)


def test_the_live_picture_goes_on_when_the_server_goes_and_comes(monkeypatch):
    """Every picture is looked at; the server ends after the second and another comes after that."""
    seen = []
    rigs = [AdminRig()]

    page = StatusPage(rigs[0].admin.endpoint)

    class Page:
        url = page.url

        def read(self):
            return page.read()

    class Stop(threading.Event):
        def wait(self, timeout=None):
            seen.append(console.file.getvalue())
            console.file.truncate(0)
            console.file.seek(0)
            nonlocal page
            if len(seen) == 2:
                rigs[0].close()
            if len(seen) == 3:
                rigs.append(AdminRig())
                page = StatusPage(rigs[1].admin.endpoint)
            if len(seen) == 5:
                self.set()
            return self.is_set()

    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr("lmcache_kernels.adapters.cli.top.StatusPage", lambda *_: Page())
    try:
        assert run_top(page.url, interval=0.1, console=console, stop=Stop()) == 0
    finally:
        rigs[-1].close()
    assert ["AWAY" in text for text in seen] == [False, False, True, False, False]
    assert "hits since start" in seen[0]
    assert "hits in" in seen[1]
    assert "hits since start" in seen[3], "another server: its numbers are not compared"


def test_an_interrupt_ends_it(monkeypatch):
    class Stop(threading.Event):
        def wait(self, timeout=None):
            raise KeyboardInterrupt

    console = Console(width=80, height=24, file=io.StringIO())
    assert run_top("http://127.0.0.1:1", console=console, stop=Stop()) == 0


# --- what answers is no server --------------------------------------------------------------------


@contextmanager
def answering(code: int, body: bytes, **headers):
    """An HTTP server with one answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(WAIT)
        server.server_close()


@pytest.mark.parametrize(
    ("code", "body"),
    [
        *(
            (200, b""),
            (200, b"{}"),
            (200, b"[1"),
            (200, b"\xff\xfe"),
            (200, b"<html>"),
            (200, b"null"),
        ),
        *((404, b"not here"), (500, b"\xff"), (503, b'{"error":"busy"}'), (200, b"[" * 100_000)),
        (200, json.dumps({"version": 1}).encode()),
    ],
)
def test_whatever_answers_is_told_and_harms_nobody(code, body):
    with answering(code, body) as url:
        with pytest.raises(PeerGone, match=url):
            StatusPage(url).read()
        done = CliRunner().invoke(app, ["top", "--once", "--url", url])
    assert done.exit_code == 1
    assert "Traceback" not in done.output


def test_a_fake_status_is_enough_and_unknown_fields_are_fine():
    body = msgspec.json.encode(msgspec.to_builtins(status()) | {"news": [1]})
    with answering(200, body) as url:
        assert StatusPage(url).read() == status()
        done = CliRunner().invoke(app, ["top", "--once", "--url", url + "/"])
    assert (done.exit_code, "12.00/16.00 GiB" in done.output) == (0, True)


def test_a_server_that_accepts_and_says_nothing_costs_the_timeout(monkeypatch):
    monkeypatch.setattr(polling, "TIMEOUT", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(PeerGone, match="timed out"),
    ):
        StatusPage(f"http://127.0.0.1:{silent.getsockname()[1]}").read()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://x", "http://", "file:///etc/passwd"])
def test_urls_that_are_none_are_refused(url):
    with pytest.raises((ConfigError, PeerGone)):
        StatusPage(url).read()


def test_a_token_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--token-file"):
        run_top("http://127.0.0.1:1", once=True, token_file=str(tmp_path / "none"))
