"""Settings: what is read, what is refused, what is said about it."""

from __future__ import annotations

import logging

import pytest

from lmcache_kernels.adapters.messaging.curve import ClientKeys, create_keys
from lmcache_kernels.adapters.vllm.config import ConnectorConfig
from lmcache_kernels.errors import ConfigError


def read(**keys):
    return ConnectorConfig.from_extra({f"lmcache.mp.{key}": value for key, value in keys.items()})


def test_nothing_set_gives_the_defaults():
    for extra in (None, {}, {"other.key": 1}, {"lmcache.mp.port": None}):
        assert ConnectorConfig.from_extra(extra) == ConnectorConfig()
    assert ConnectorConfig().url == "tcp://localhost:5555"


def test_values_take_the_type_of_their_default():
    config = read(lookup_timeout="0.25", port="7000", chunk_size=512.0, load_async="off")
    assert config == ConnectorConfig(
        lookup_timeout=0.25, port=7000, chunk_size=512, load_async=False
    )


@pytest.mark.parametrize("text", ["1", "true", "YES", " on ", True])
def test_what_counts_as_true(text):
    assert read(load_async=text).load_async is True


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lookup_timeout", "abc"),
        ("lookup_timeout", 0),
        ("request_timeout", "inf"),
        ("connect_timeout", -1),
        ("heartbeat_interval", float("nan")),
        ("port", 0),
        ("port", 70000),
        ("port", "x"),
        ("port", 5555.7),
        ("port", True),
        ("port", float("inf")),
        ("host", ""),
        ("host", "127.0.0.1:6000"),
        ("host", "tcp://"),
        ("host", "tcp://127.0.0.1:6000"),
        ("host", "::1"),
        ("host", "ipc:///tmp/socket"),
        ("host", "two words"),
        ("host", True),
        ("request_timeout", True),
        ("chunk_size", 256.5),
        ("chunk_size", 0),
        ("load_async", "maybe"),
        ("mp_transfer_mode", "both"),
        ("curve_secret_key", "a"),
    ],
)
def test_a_value_that_cannot_work_is_refused_naming_its_key(key, value):
    with pytest.raises(ConfigError, match=rf"lmcache\.mp\.{key}"):
        read(**{key: value})


@pytest.mark.parametrize(
    ("configured", "environment", "mode"),
    [
        ({}, None, "engine_driven"),
        ({"mp_transfer_mode": "auto"}, "lmcache_driven", "engine_driven"),
        ({"mp_transfer_mode": "LMCACHE_DRIVEN"}, None, "lmcache_driven"),
        ({}, "lmcache_driven", "lmcache_driven"),
    ],
)
def test_who_copies_is_what_was_set_or_else_the_environments(
    configured, environment, mode, monkeypatch
):
    monkeypatch.delenv("LMCACHE_MP_TRANSFER_MODE", raising=False)
    if environment:
        monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", environment)
    config = read(**configured, layerwise=True, load_async=False)
    assert config.transfer_mode == mode
    assert config.loads_by_layer is config.stores_by_layer is (mode == "engine_driven")
    between = read(**configured, layerwise=True)
    assert (between.loads_by_layer, between.stores_by_layer) == (False, mode == "engine_driven")
    assert not read(**configured).stores_by_layer


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:5555"),
        ("tcp://10.0.0.7", "tcp://10.0.0.7:5555"),
        ("[::1]", "tcp://[::1]:5555"),
    ],
)
def test_a_host_may_come_with_or_without_a_scheme(host, url):
    assert read(host=host).url == url


def test_a_typo_is_named_once_and_every_setting_is_logged(caplog):
    caplog.set_level(logging.INFO)
    read(chunksize=128, port=6000)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "lmcache.mp.chunksize" in warnings[0]
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert "lmcache.mp.port = 6000 (overridden, default 5555)" in lines
    assert "lmcache.mp.chunk_size = 256" in lines


def test_keys_are_read_from_both_files_or_not_at_all(tmp_path):
    assert ConnectorConfig().keys() is None
    for name in ("engine", "server"):
        create_keys(tmp_path, name)
    secret, server = f"{tmp_path}/engine.key_secret", f"{tmp_path}/server.key"
    keys = read(curve_secret_key=secret, curve_server_key=server).keys()
    assert keys == ClientKeys.read(secret, server)
    with pytest.raises(ConfigError, match="curve_server_key: expected both or neither"):
        read(curve_server_key=server)
    with pytest.raises(ConfigError, match="no_such"):
        read(curve_secret_key="no_such", curve_server_key=server).keys()
