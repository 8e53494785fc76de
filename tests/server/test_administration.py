"""The HTTP side of a real server: where it listens, who may change what, and a port that is taken."""

from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.request

import pytest
from serverkit import logged_server

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.server.administration import MAX_TOKEN_FILE, admin_token
from lmcache_kernels.adapters.server.config import SETTINGS, ServerConfig, key_of
from lmcache_kernels.adapters.server.main import run
from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.messages import Ping, PrepareStore, Register

TOKEN = "a token of these tests"


def http(method, url, token=None):
    """Status and decoded answer."""
    request = urllib.request.Request(url, method=method)
    if token is not None:
        request.add_header("authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o640)
    return path


def test_a_server_tells_its_settings_reloads_and_is_not_ready_while_it_drains(tmp_path, token_file):
    path = tmp_path / "server.toml"
    tiers = tmp_path / "tiers"
    text = f"l2-tier = ['file://{tiers}']\nquota = ['a=1']\ndrain-timeout-seconds = 600\n"
    path.write_text(text)
    arguments = ["--config", str(path), "--http-port", "0", "--admin-token-file", str(token_file)]
    with logged_server(*arguments) as server, CacheClient(server.url) as client:
        url = server.wait_log(r"administration at (http://127\.0\.0\.1:\d+)")[1]
        client.wait_ready(20)
        assert http("GET", f"{url}/ready")[0] == 200
        settings = http("GET", f"{url}/config")[1]
        assert settings.keys() == {key_of(name) for name in SETTINGS}
        assert settings["http-port"] == {"value": "0", "origin": "--http-port"}
        assert settings["l2-tier"]["origin"] == f"{path}: l2-tier"
        assert http("GET", f"{url}/quota/a")[1]["quota_bytes"] == 1 << 30
        path.write_text(f"{text}port = 7\neviction-ratio = 0.5\n".replace("a=1", "a=2"))
        assert http("POST", f"{url}/reload")[0] == 401
        status, done = http("POST", f"{url}/reload", TOKEN)
        assert status == 200
        assert done["changed"].keys() == {"quota", "eviction_ratio"}
        assert done["waiting"] == {}, "the flag wins"
        assert http("GET", f"{url}/quota/a")[1]["quota_bytes"] == 2 << 30
        assert http("GET", f"{url}/config")[1]["eviction-ratio"]["value"] == "0.5"
        path.write_text("port = -1")
        status, refused = http("POST", f"{url}/reload", TOKEN)
        assert status == 400
        assert "port: expected" in refused["error"]
        client.request(Register(instance=1, shard=bytes(32), chunk_bytes=100), 20).result(30)
        client.request(PrepareStore(instance=1, digests=bytes(32)), 20).result(30)
        server.send(signal.SIGTERM)
        server.wait_log("ending in 600 s")
        status, why = http("GET", f"{url}/ready")
        assert (status, http("GET", f"{url}/health")[0]) == (503, 200), why
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        with pytest.raises(urllib.error.URLError):
            http("GET", f"{url}/health")


@pytest.fixture
def taken(monkeypatch):
    """The default port is one that somebody has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_taken_port_that_somebody_has_chosen_ends_the_start(taken, capsys):
    with pytest.raises(SystemExit) as ended:
        run(["--port", "0", "--l1-size-gb", "0.01", "--http-port", str(taken)], "serve")
    assert ended.value.code == 2
    assert f"port {taken}: cannot be bound" in capsys.readouterr().err


def test_a_taken_port_that_nobody_has_chosen_does_not():
    """Another server may have it: a second one on the machine still starts."""
    try:
        holder = socket.create_server(("127.0.0.1", SETTINGS["http_port"].default))
    except OSError:  # taken by whoever else runs here
        holder = None
    try:
        with logged_server(default_http=True) as server, CacheClient(server.url) as client:
            server.wait_log(
                "WARNING .*no metrics and no administration over HTTP: .* port 8080: cannot be bound"
            )
            client.wait_ready(20)
            assert client.request(Ping(), 20).result(30)
    finally:
        if holder is not None:
            holder.close()


def test_no_http_is_no_http():
    with logged_server() as server:
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert "administration" not in server.log()


# --- tokens ---------------------------------------------------------------------------------------


def test_a_token_is_the_line_in_its_file(token_file):
    assert admin_token(ServerConfig(admin_token_file=str(token_file))) == TOKEN
    assert admin_token(ServerConfig()) is None


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0o600, "cannot be read: .*No such file"),
        (TOKEN.encode(), 0o644, "everybody can read or change it; do chmod o="),
        (b"short\n", 0o600, "expected at least 16 printable ASCII characters"),
        (b"", 0o600, "expected at least 16"),
        (b"\xff" * 32, 0o600, "cannot be read"),
        ("ä".encode() * 16, 0o600, "expected at least 16 printable ASCII"),
        (b"one line of it\nand another", 0o600, "expected at least 16 printable ASCII"),
        (b"x" * (MAX_TOKEN_FILE + 1), 0o600, "expected a token, .* is longer"),
    ],
)
def test_a_token_that_cannot_be_used_ends_the_start(content, mode, words, tmp_path, monkeypatch):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        admin_token(ServerConfig(admin_token_file=str(path)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_http_that_others_can_reach_needs_a_token(host, monkeypatch, capsys):
    from lmcache_kernels.adapters.server import main

    monkeypatch.setattr(main.Arena, "create", lambda _: pytest.fail("memory was taken"))
    with pytest.raises(SystemExit):
        run(["--port", "0", "--http-host", host], "serve")
    assert "see --admin-token-file" in capsys.readouterr().err


def test_a_tier_that_cannot_be_is_named_before_memory_is_taken(monkeypatch, capsys, tmp_path):
    from lmcache_kernels.adapters.server import main

    monkeypatch.setattr(main.Arena, "create", lambda _: pytest.fail("memory was taken"))
    with pytest.raises(SystemExit):
        run(["--l2-tier", f"file://{tmp_path}?colour=red"], "serve")
    said = capsys.readouterr().err
    assert said.startswith("lmcache-kernels: --l2-tier: tier file://")
    assert "got colour" in said
