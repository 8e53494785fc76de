"""CURVE keys: who gets through, who does not, and what their files must be like."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk
from transfer_suite import CHUNK_TOKENS, load, names, store
from typer.testing import CliRunner

from lmcache_kernels.adapters.cli.main import app
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.connect import connect as connect_context
from lmcache_kernels.adapters.messaging.curve import ClientKeys, ServerKeys, create_keys
from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.errors import ConfigError, PeerGone
from lmcache_kernels.transfer.messages import Found, Lookup
from lmcache_kernels.views import group_of

REFUSED_AFTER = 1.5
"""Seconds that a client that must not get through tries to."""


def lookup() -> Lookup:
    return Lookup(request="r", shards=[b"s" * 32], digests=b"x" * 7)


@pytest.fixture
def files(tmp_path):
    """Keys of a server, of a client that it knows and of one that it does not."""
    for name in ("server", "other_server", "stranger"):
        create_keys(tmp_path, name)
    create_keys(tmp_path / "clients", "engine")
    secrets = {
        name: (tmp_path / name).with_suffix(".key_secret")
        for name in ("server", "other_server", "stranger", "clients/engine")
    }
    return SimpleNamespace(
        clients=tmp_path / "clients",
        server=ServerKeys.read(secrets["server"], tmp_path / "clients"),
        engine=ClientKeys.read(secrets["clients/engine"], tmp_path / "server.key"),
        stranger=ClientKeys.read(secrets["stranger"], tmp_path / "server.key"),
        misled=ClientKeys.read(secrets["clients/engine"], tmp_path / "other_server.key"),
        root=tmp_path,
    )


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0", "tcp://*:0"])
def test_whoever_has_a_key_is_served_also_where_others_could_reach_the_server(
    url, files, start_server, connect
):
    server = start_server(url, keys=files.server)
    port = server.url.rsplit(":", 1)[1]
    client = connect(f"tcp://127.0.0.1:{port}", keys=files.engine)
    assert client.request(lookup(), 5).result(10) == Found(chunks=7)


@pytest.mark.parametrize("who", ["stranger", "misled", "nobody"])
def test_whoever_has_no_right_key_gets_nothing_through_and_harms_nobody(
    who, files, start_server, connect
):
    server = start_server(keys=files.server)
    wrong = None if who == "nobody" else getattr(files, who)
    with CacheClient(server.url, keys=wrong) as client:
        words = "does not know our CURVE key" if who == "stranger" else "are the keys wrong"
        with pytest.raises(PeerGone, match=words):
            client.wait_ready(REFUSED_AFTER)
        assert isinstance(client.request(lookup(), 1).exception(5), PeerGone)
        assert server.service.asked == []
        right = connect(server.url, keys=files.engine)
        assert right.request(lookup(), 5).result(10) == Found(chunks=7)
        assert len(server.service.asked_of(Lookup)) == 1


def test_nobody_gets_in_where_nobody_checks_keys_any_more(files, start_server):
    server = start_server(keys=files.server)
    server.loop._gatekeeper.stop()
    for keys in (files.stranger, files.engine):
        with CacheClient(server.url, keys=keys) as client, pytest.raises(PeerGone):
            client.wait_ready(REFUSED_AFTER)
    assert server.service.asked == []


def test_a_client_with_keys_does_not_talk_to_a_server_without(files, start_server, connect):
    server = start_server()
    with CacheClient(server.url, keys=files.engine) as client:
        with pytest.raises(PeerGone):
            client.wait_ready(REFUSED_AFTER)
        assert server.service.asked == []
    assert connect(server.url).request(lookup(), 5).result(10) == Found(chunks=7)


def test_a_server_with_keys_ends_without_a_trace(files):
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        CacheServerLoop("tcp://127.0.0.1:0", incarnation="i", keys=files.server).close()
    assert len(os.listdir("/proc/self/task")) <= before
    with pytest.raises(ConfigError, match="cannot be bound"):
        CacheServerLoop("tcp://192.0.2.1:0", incarnation="i", keys=files.server)
    assert len(os.listdir("/proc/self/task")) <= before


def test_secrets_are_read_by_their_owner_only_and_never_shown(files):
    secret = files.root / "server.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((files.root / "server.key").stat().st_mode) == 0o644
    assert files.server.secret.decode() not in repr(files.server)
    assert files.engine.secret.decode() not in repr(files.engine)
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        ServerKeys.read(secret, files.clients)


def test_what_is_no_key_is_refused_naming_the_file(files):
    secret, public = files.root / "server.key_secret", files.root / "server.key"
    (files.root / "empty").mkdir()
    bad = files.root / "bad.key_secret"
    for text in ("", "curve\n", 'curve\n    public-key = "short"\n    secret-key = "short"\n'):
        bad.write_text(text)
        bad.chmod(0o600)
        with pytest.raises(ConfigError, match=r"bad\.key_secret"):
            ClientKeys.read(bad, public)
    for arguments, words in (
        ((files.root / "none", files.clients), "none"),
        ((public, files.clients), "public one"),
        ((secret, files.root / "none"), "directory"),
        ((secret, files.root / "empty"), "nobody could connect"),
    ):
        with pytest.raises(ConfigError, match=words):
            ServerKeys.read(*arguments)
    with pytest.raises(ConfigError, match="none"):
        ClientKeys.read(secret, files.root / "none")


def test_keys_are_never_overwritten(files):
    before = (files.root / "server.key_secret").read_bytes()
    for name in ("server", "", "a/b"):
        with pytest.raises(ConfigError):
            create_keys(files.root, name)
    assert (files.root / "server.key_secret").read_bytes() == before
    (files.root / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        create_keys(files.root / "file", "x")


def test_the_command_line_makes_keys_for_a_server_that_stores_and_loads(tmp_path):
    for where, name in ((tmp_path, "server"), (tmp_path / "clients", "engine")):
        made = CliRunner().invoke(app, ["keys", str(where), name])
        assert made.exit_code == 0
        assert f"{where / name}.key_secret" in made.output.replace("\n", "")
    again = CliRunner().invoke(app, ["keys", str(tmp_path), "server"])
    assert again.exit_code == 2
    assert "never overwritten" in again.output
    serve = [sys.executable, "-m", "lmcache_kernels.adapters.server", "--host", "0.0.0.0"]
    serve += ["--port", "0", "--l1-size-gb", "0.01", "--stop-on-eof"]
    serve += ["--chunk-size", str(CHUNK_TOKENS)]
    serve += ["--curve-secret-key", str(tmp_path / "server.key_secret")]
    half = subprocess.run(serve, capture_output=True, text=True, timeout=60)
    assert half.returncode == 2
    assert "both or neither" in half.stderr
    serve += ["--curve-clients", str(tmp_path / "clients")]
    keys = ClientKeys.read(tmp_path / "clients/engine.key_secret", tmp_path / "server.key")
    with subprocess.Popen(
        serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        port = server.stdout.readline().split(" (")[0].rsplit(":", 1)[1]
        with CacheClient(f"tcp://127.0.0.1:{port}", keys=keys) as client:
            client.wait_ready(20)
            assert client.request(lookup(), 5).exception(10).code == "bad_request"
        cache = make_cache(BY_NAME["kv_first_nhd"], blocks=12, device="cpu")
        cache.fill_random(1)
        group = group_of(cache.tensors, cache.axes)
        url = f"tcp://127.0.0.1:{port}"
        with connect_context(url, [group], chunk_tokens=CHUNK_TOKENS, keys=keys) as context:
            stored = names(1)
            assert store(context, stored, [0, 1]) == 1
            assert load(context, stored, [6, 7]) == 1
        assert torch.equal(oracle_chunk(cache, [6, 7]), oracle_chunk(cache, [0, 1]))
        server.stdin.close()
        assert server.wait(20) == 0
