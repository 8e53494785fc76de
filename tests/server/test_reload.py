"""Settings read again by a server that runs: what changes, what waits, and a file that is broken."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from serverkit import logged_server

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.curve import ClientKeys, create_keys
from lmcache_kernels.adapters.server import reload as reload_module
from lmcache_kernels.adapters.server.config import SETTINGS, key_of
from lmcache_kernels.adapters.server.control import Control
from lmcache_kernels.adapters.server.logs import JsonFormatter, ServerLog
from lmcache_kernels.adapters.server.reload import Reload, Reloaded
from lmcache_kernels.adapters.server.sources import Sources, shown, variable_of
from lmcache_kernels.errors import Closed, ConfigError, PeerGone, TransferTimeout
from lmcache_kernels.transfer.messages import Ping, Pong, PrepareStore, Register
from lmcache_kernels.transfer.serving.eviction import Eviction
from lmcache_kernels.transfer.serving.known_workers import Liveness
from lmcache_kernels.transfer.serving.quotas import Quotas

LIVE = {
    "eviction_trigger_watermark": 0.5,
    "eviction_ratio": 0.5,
    "quota": ("a=1", "*=0.5"),
    "worker_reap_timeout_seconds": 60.0,
    "worker_registration_grace_seconds": 700.0,
    "drain_timeout_seconds": 3.0,
    "log_format": "json",
    "log_level": "error",
}
"""Other values of the settings that may change."""


class Bench:
    """A reload whose server is this test; ``calls``: what it was given."""

    def __init__(self, path, flags=None, environment=None):
        self.path = path
        self.calls = []
        self.keys = None
        sources = Sources(flags or {}, environment or {}, path)
        self.reload = Reload(
            sources,
            sources.read(),
            None,
            lambda: self.keys,
            self.call,
            lambda *it: self.calls.append(it),
        )

    def call(self, function):
        future: Future[None] = Future()
        future.set_result(function())
        return future

    def write(self, **settings):
        lines = [f"{key_of(name)} = {shown(value)}\n" for name, value in settings.items()]
        self.path.write_text("".join(lines))


@pytest.fixture
def bench(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text("")
    return Bench(path)


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.INFO)


def test_the_table_of_this_test_has_every_setting_that_may_change():
    assert LIVE.keys() == {name for name, setting in SETTINGS.items() if setting.live}


def test_what_may_change_does_and_is_logged(bench, caplog):
    bench.write(**LIVE)
    done = bench.reload()
    assert done == Reloaded(
        changed={
            name: (shown(SETTINGS[name].default), shown(value)) for name, value in LIVE.items()
        }
    )
    ((config, keys),) = bench.calls
    assert {name: getattr(config, name) for name in LIVE} == LIVE
    assert keys is None
    assert bench.reload.running.config == config
    assert bench.reload.running.origin("log_level") == f"{bench.path}: log-level"
    assert len(caplog.records) == len(LIVE)
    line = f"eviction-ratio: 0.2 -> 0.5 ({bench.path}: eviction-ratio)"
    assert line in [record.message for record in caplog.records]


def test_what_is_taken_out_of_the_file_is_what_it_was(bench):
    bench.write(eviction_ratio=0.5)
    bench.reload()
    bench.write()
    assert bench.reload().changed == {"eviction_ratio": ("0.5", "0.2")}
    assert bench.reload.running.origin("eviction_ratio") == "default"
    assert bench.reload() == Reloaded()


def test_what_may_not_change_is_named_each_time_and_stays(bench, caplog):
    bench.write(port=7, l1_size_gb=1.0, eviction_ratio=0.5)
    for _ in range(2):
        caplog.clear()
        done = bench.reload()
        assert done.waiting == {"port": ("5555", "7"), "l1_size_gb": ("4.0", "1.0")}
        (warning,) = [it.message for it in caplog.records if it.levelname == "WARNING"]
        assert (
            warning == "changed, but only after a restart: port: 5555 -> 7, l1-size-gb: 4.0 -> 1.0"
        )
        config = bench.calls[-1][0]
        assert (config.port, config.l1_size_gb, config.eviction_ratio) == (5555, 4.0, 0.5)


@pytest.mark.parametrize(
    "text",
    ["eviction-ratio = 2", "eviction-ratio = 0.5\nprt = 1", "=", "worker-reap-timeout-seconds = 7"],
)
def test_a_broken_file_changes_nothing(text, bench, caplog):
    before = bench.reload.running
    bench.path.write_text(text)
    with pytest.raises(ConfigError):
        bench.reload()
    bench.path.unlink()
    with pytest.raises(ConfigError):
        bench.reload()
    assert bench.calls == []
    assert bench.reload.running is before
    assert [it.levelname for it in caplog.records] == ["ERROR", "ERROR"]
    assert "not reloaded, nothing is changed: " in caplog.text


def test_flags_and_the_environment_still_win(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text("")
    variable = {variable_of("log_level"): "warning"}
    bench = Bench(path, {"eviction_ratio": "0.3"}, variable)
    bench.write(eviction_ratio=0.5, log_level="error")
    assert bench.reload() == Reloaded()


def test_keys_that_came_and_went_are_counted(bench, caplog):
    bench.keys = SimpleNamespace(clients=frozenset({b"a", b"b"}))
    assert bench.reload() == Reloaded(keys_new=2)
    bench.keys = SimpleNamespace(clients=frozenset({b"b", b"c", b"d"}))
    assert bench.reload() == Reloaded(keys_new=2, keys_gone=1)
    assert "keys of clients: 2 new, 1 gone" in caplog.text
    assert bench.calls[-1][1] is bench.keys


def test_a_server_that_hangs_or_ends_is_told_of(bench, monkeypatch, caplog):
    monkeypatch.setattr(reload_module, "APPLY_TIMEOUT", 0.01)
    never, gone = Future(), Future()
    gone.set_exception(Closed("the server has stopped"))
    for future, error in ((never, TransferTimeout), (gone, Closed)):
        monkeypatch.setattr(bench.reload, "_call", lambda _, future=future: future)
        with pytest.raises(error):
            bench.reload()
    assert caplog.text.count("not reloaded") == 2


def test_reloads_come_one_after_the_other(bench, monkeypatch):
    """However many ask for them at once."""
    inside = threading.Semaphore(1)

    def call(function):
        assert inside.acquire(blocking=False)
        future = bench.call(function)
        inside.release()
        return future

    monkeypatch.setattr(bench.reload, "_call", call)
    threads = [threading.Thread(target=bench.reload) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(bench.calls) == 8


def test_every_live_setting_reaches_the_part_that_takes_it(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text("")
    sources = Sources({}, {}, path)
    given = []
    loop = SimpleNamespace(stop=None, call=None, admit=lambda keys: given.append(keys))
    service = SimpleNamespace(change=lambda *limits: given.append(limits))
    level = logging.root.level
    with ServerLog("text", "info") as log:
        control = Control(loop, service, log, sources.read(), sources, None)
        path.write_text("".join(f"{key_of(name)} = {shown(it)}\n" for name, it in LIVE.items()))
        control._apply(sources.read().config, "keys")
        quotas = Quotas({"a": 1 << 30}, 1 << 29)
        assert given == [(Eviction("lru", 0.5, 0.5), Liveness(60, 700), quotas), "keys"]
        assert control.drain.timeout == 3.0
        assert isinstance(log._handler.formatter, JsonFormatter)
        assert logging.root.level == logging.ERROR
    logging.root.setLevel(level)


# --- real servers ---------------------------------------------------------------------------------


def test_sighup_reads_the_file_again(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("drain-timeout-seconds: 600\n")
    with logged_server("--config", str(path)) as server, CacheClient(server.url) as client:
        client.wait_ready(20)
        path.write_text("log-format: json\ndrain-timeout-seconds: 0\nchunk-size: 16\n")
        server.send(signal.SIGHUP)
        server.wait_log(r'"message": "drain-timeout-seconds: 600.0 -> 0.0 \(')
        server.wait_log(r'"level": "warning".*only after a restart: chunk-size: 256 -> 16"')
        path.write_text("drain-timeout-seconds: -1\n")
        server.send(signal.SIGHUP)
        server.wait_log(r'"level": "error".*not reloaded, nothing is changed: .*server.yaml: drain')
        client.request(Register(instance=1, shard=bytes(32), chunk_bytes=100), 20).result(30)
        client.request(PrepareStore(instance=1, digests=bytes(32)), 20).result(30)
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert "under way, and lost: 1 stores" in server.log()


def test_keys_of_clients_are_read_again(tmp_path):
    create_keys(tmp_path, "server")
    for name in ("first", "second"):
        create_keys(tmp_path / "all", name)
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "first.key").write_bytes((tmp_path / "all/first.key").read_bytes())
    first, second = (
        ClientKeys.read(tmp_path / f"all/{name}.key_secret", tmp_path / "server.key")
        for name in ("first", "second")
    )
    path = tmp_path / "server.toml"
    path.write_text(
        f"curve-secret-key = '{tmp_path}/server.key_secret'\ncurve-clients = '{clients}'\n"
    )
    with logged_server("--config", str(path)) as server:
        with CacheClient(server.url, keys=first) as client:
            client.wait_ready(20)
        with CacheClient(server.url, keys=second) as client, pytest.raises(PeerGone):
            client.wait_ready(1.5)
        (clients / "second.key").write_bytes((tmp_path / "all/second.key").read_bytes())
        server.send(signal.SIGHUP)
        server.wait_log("keys of clients: 1 new, 0 gone")
        with CacheClient(server.url, keys=second) as client:
            client.wait_ready(20)
            (clients / "second.key").unlink()
            server.send(signal.SIGHUP)
            server.wait_log("keys of clients: 0 new, 1 gone")
            assert isinstance(client.request(Ping(), 20).result(30), Pong), "it stays connected"
        with CacheClient(server.url, keys=second) as client, pytest.raises(PeerGone):
            client.wait_ready(1.5)
        (clients / "first.key").write_text("nonsense")
        server.send(signal.SIGHUP)
        server.wait_log("not reloaded, nothing is changed: .*first.key")
        with CacheClient(server.url, keys=first) as client:
            client.wait_ready(20)


def test_systemd_is_told_what_goes_on(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text("")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with logged_server("--config", str(path), environment=environment) as server:
            assert manager.recv(100) == b"READY=1"
            server.send(signal.SIGHUP)
            assert manager.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            assert manager.recv(100) == b"READY=1"
            server.send(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert server.wait() == 0


def test_signals_that_come_while_it_starts_are_acted_upon_when_it_has(tmp_path, monkeypatch):
    from lmcache_kernels.adapters.server import main

    path = tmp_path / "server.toml"
    path.write_text("log-level = 'debug'")
    create, made = main.Arena.create, []

    def slow(nbytes):
        made.append(create(nbytes))
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return made[-1]

    monkeypatch.setattr(main.Arena, "create", slow)
    main.run(["--config", str(path), "--port", "0", "--l1-size-gb", "0.01"], "serve")
    assert len(made) == 1
