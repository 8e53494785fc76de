"""Settings: one place for all of them, four sources, and one clear line about what cannot be right."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from serverkit import MODULE

from lmcache_kernels.adapters.server.config import SETTINGS, ServerConfig, flag_of, key_of
from lmcache_kernels.adapters.server.flags import flags_of, parse
from lmcache_kernels.adapters.server.kinds import Choice, Number, Text
from lmcache_kernels.adapters.server.main import run
from lmcache_kernels.adapters.server.sources import (
    DEFAULT,
    ENVIRONMENT_PREFIX,
    FILE_VARIABLE,
    Sources,
    shown,
    variable_of,
)
from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.serving.eviction import Eviction
from lmcache_kernels.transfer.serving.known_workers import Liveness
from lmcache_kernels.transfer.serving.quotas import Quotas

OTHERS = {
    "host": ("127.0.0.2", "127.0.0.3", "::1"),
    "port": (1, 2, 65535),
    "l1_size_gb": (0.5, 1.0, 2.25),
    "chunk_size": (16, 32, 64),
    "eviction_policy": ("s3fifo", "lru", "s3fifo"),
    "eviction_trigger_watermark": (0.5, 0.25, 0.75),
    "eviction_ratio": (0.5, 0.25, 1.0),
    "l2_tier": (("file:///a", "file:///b"), ("file:///c",), ("file:///d?size_gb=1", "file:///e")),
    "l2_store_policy": ("found", "none", "found"),
    "quota": (("a=1", "*=2"), ("b=0.5",), ("=1", "c=0")),
    "l1_write_ttl_seconds": (180.0, 200.0, 1e6),
    "l1_read_ttl_seconds": (181.0, 200.0, 1e6),
    "session_ttl_seconds": (1.0, 2.5, 3.0),
    "worker_reap_timeout_seconds": (0.0, 30.0, 40.5),
    "worker_registration_grace_seconds": (120.0, 700.0, 800.0),
    "curve_secret_key": ("a", "b c", 'd"\\'),
    "curve_clients": ("a", "b c", "d"),
    "http_host": ("127.0.0.2", "127.0.0.3", "::1"),
    "http_port": (-1, 0, 65535),
    "admin_token_file": ("a", "b c", "d"),
    "drain_timeout_seconds": (0.0, 0.5, 10.0),
    "log_format": ("json", "text", "json"),
    "log_level": ("debug", "error", "warning"),
}
"""For each setting values of a file, the environment and a flag."""

PAIR = {"curve_secret_key": "curve_clients", "curve_clients": "curve_secret_key"}
"""Settings that go together."""


def said(value):
    """As an environment variable has it."""
    return " ".join(value) if isinstance(value, tuple) else str(value)


def read(*arguments, environment=None):
    return parse(arguments, environment or {}, "serve").sources.read()


def refusal(*arguments, environment=None):
    with pytest.raises(ConfigError) as refused:
        read(*arguments, environment=environment)
    said = str(refused.value)
    assert "\n" not in said
    return said


@pytest.fixture
def file(tmp_path):
    def write(text, suffix=".toml"):
        path = tmp_path / f"server{suffix}"
        path.write_text(text) if isinstance(text, str) else path.write_bytes(text)
        return path

    return write


# --- the settings themselves ----------------------------------------------------------------------


def test_the_table_of_this_test_has_every_setting():
    assert OTHERS.keys() == SETTINGS.keys()


def test_every_setting_says_what_it_is_and_takes_its_default():
    config = ServerConfig()
    for name, setting in SETTINGS.items():
        assert setting.help.endswith("."), name
        assert setting.help[0].isupper(), name
        assert "  " not in setting.help, name
        value = setting.kind.of_value(setting.default)
        assert (value, type(value)) == (setting.default, type(setting.default)), name
        assert getattr(config, name) == setting.default
        assert setting.kind.of_text(said(setting.default)) == setting.default


def test_settings_are_what_the_parts_of_a_server_take():
    config = ServerConfig(
        l1_size_gb=0.5,
        eviction_policy="s3fifo",
        eviction_trigger_watermark=0.5,
        eviction_ratio=0.25,
        worker_reap_timeout_seconds=30,
        worker_registration_grace_seconds=40,
    )
    assert config.l1_bytes == 1 << 29
    assert config.eviction == Eviction("s3fifo", 0.5, 0.25)
    assert config.liveness == Liveness(30, 40)
    assert ServerConfig(worker_reap_timeout_seconds=0).liveness == Liveness(math.inf, math.inf)


def test_whole_numbers_become_fractions_where_those_are_allowed():
    assert type(ServerConfig(l1_size_gb=4).l1_size_gb) is float
    with pytest.raises(ConfigError, match=r"--port: expected a whole number .*, got 1\.0"):
        ServerConfig(port=1.0)


def test_quotas_are_what_the_store_takes():
    config = ServerConfig(quota=["a=1", "=0.5", "*=3"])
    assert config.quotas == Quotas({"a": 1 << 30, "": 1 << 29}, 3 << 30)
    assert ServerConfig().quotas == Quotas()


def test_no_password_is_shown(capsys):
    url = "valkey://user:hunter2@127.0.0.1:6379/0?prefix=p"
    run(["--l2-tier", url, "--print-config"], "serve")
    printed = capsys.readouterr().out
    assert "hunter2" not in printed
    assert 'l2-tier = ["valkey://***@127.0.0.1:6379/0?prefix=p"]' in printed


@pytest.mark.parametrize("password", ["it's", 'a"b', "a b", "a/b", "p@ss", "x://y"])
def test_no_password_is_shown_whatever_it_is_made_of(password):
    url = f"valkey://user:{password}@127.0.0.1:6379/0"
    for value in ((url,), url):
        assert shown(value).strip('[]"') == "valkey://***@127.0.0.1:6379/0"
    with pytest.raises(ConfigError) as refused:
        SETTINGS["l2_tier"].kind.of_value(url)
    assert password not in str(refused.value)


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().port = 1


# --- values ---------------------------------------------------------------------------------------


@given(st.floats() | st.integers() | st.text() | st.booleans() | st.none() | st.lists(st.none()))
def test_a_number_is_in_its_bounds_or_refused(value):
    kind = Number(0, 1, above=True)
    try:
        taken = kind.of_value(value)
    except ConfigError:
        assert isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1
    else:
        assert isinstance(taken, float)
        assert taken == value
        assert 0 < taken <= 1


@given(st.integers() | st.text() | st.sampled_from(["1e3", "1.0", "9" * 5000]))
def test_a_whole_number_of_text_is_one(value):
    kind, text = Number(-5, 5, whole=True), str(value)
    try:
        right = len(text) < 4000 and -5 <= int(text) <= 5
    except ValueError:
        right = False
    if right:
        assert kind.of_text(text) == int(text)
        return
    with pytest.raises(ConfigError, match="expected a whole number from -5 to 5, got") as refused:
        kind.of_text(text)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, -math.inf, math.nan, True, "1"])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ConfigError, match="expected a number, at least 0"):
        Number(0).of_value(value)


@pytest.mark.parametrize("value", ["a\nb", "\0", "\udcff", "\x7f", b"a", 1, None])
def test_text_that_cannot_be_shown_on_one_line_is_refused(value):
    with pytest.raises(ConfigError, match="expected printable text"):
        Text().of_value(value)


def test_what_a_kind_prints():
    assert str(Number(1, 1 << 20, whole=True)) == "a whole number from 1 to 1048576"
    assert str(Number(0.5)) == "a number, at least 0.5"
    assert str(Number(0, above=True)) == "a number above 0"
    assert str(Choice(("a", "b"))) == "one of a, b"


def test_a_value_that_refers_to_itself_many_times_is_shown_in_short():
    bomb: list = []
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(ConfigError) as refused:
        Number(0).of_value(bomb)
    assert len(str(refused.value)) < 1000


# --- who wins -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(
    name, suffix, file
):
    in_file, in_environment, in_flag = OTHERS[name]
    dump = {
        ".toml": lambda key, it: f"{key} = {shown(it)}\n",
        ".yaml": lambda k, v: yaml.dump({k: list(v) if isinstance(v, tuple) else v}),
    }
    text = dump[suffix](key_of(name), in_file)
    also = []
    if name in PAIR:
        also = [f"{flag_of(PAIR[name])}=x"]
    path = file(text, suffix)
    each = in_flag if isinstance(in_flag, tuple) else [in_flag]
    flag = [*(f"{flag_of(name)}={one}" for one in each), *also]
    variable = {variable_of(name): said(in_environment)}
    default = read()
    assert (getattr(default.config, name), default.origin(name)) == (
        SETTINGS[name].default,
        DEFAULT,
    )
    of_file = read("--config", str(path), *also)
    assert (getattr(of_file.config, name), of_file.origin(name)) == (
        in_file,
        f"{path}: {key_of(name)}",
    )
    of_variable = read("--config", str(path), *also, environment=variable)
    assert getattr(of_variable.config, name) == in_environment
    assert of_variable.origin(name) == variable_of(name)
    of_flag = read("--config", str(path), *flag, environment=variable)
    assert (getattr(of_flag.config, name), of_flag.origin(name)) == (in_flag, flag_of(name))
    others = set(SETTINGS) - {name, PAIR.get(name)}
    assert all(of_flag.origin(other) == DEFAULT for other in others)


def test_the_environment_can_name_the_file_and_the_flag_wins(file, tmp_path):
    first, second = file("port = 1"), tmp_path / "second.toml"
    second.write_text("port = 2")
    environment = {FILE_VARIABLE: str(first)}
    assert read(environment=environment).config.port == 1
    assert read("--config", str(second), environment=environment).config.port == 2


def test_an_empty_variable_is_none():
    environment = {variable_of("port"): "", variable_of("host"): "", FILE_VARIABLE: ""}
    assert read(environment=environment).config == ServerConfig()


def test_others_variables_are_left_alone():
    environment = {"PORT": "x", "LMCACHE_KERNELS_NVTX": "1", "LMCACHE_KERNELS_SERVER_PORT": "y"}
    assert read(environment=environment).config == ServerConfig()


def test_the_last_of_two_flags_counts():
    assert read("--port", "1", "--port=2").config.port == 2


# --- what cannot be right -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prot", "1"], "unrecognized arguments: --prot 1; see serve --help"),
        (["--po", "1"], "unrecognized arguments"),
        (["--port"], "--port: expected one argument"),
        (["5555"], "unrecognized arguments: 5555"),
        (["--port", "x"], "--port: expected a whole number from 0 to 65535, got 'x'"),
        (["--port", "1.0"], "--port: expected"),
        (["--port", ""], "--port: expected"),
        (["--l1-size-gb", "nan"], "--l1-size-gb: expected"),
        (["--l1-size-gb", "inf"], "--l1-size-gb: expected"),
        (["--chunk-size", "1048577"], "--chunk-size: expected"),
        (["--session-ttl-seconds", "0"], "--session-ttl-seconds: expected"),
        (
            ["--l1-write-ttl-seconds", "179"],
            "--l1-write-ttl-seconds: expected a number, at least 180",
        ),
        (["--l1-read-ttl-seconds", "-600"], "--l1-read-ttl-seconds: expected"),
        (["--drain-timeout-seconds", "-1"], "--drain-timeout-seconds: expected"),
        (["--log-level", "loud"], "--log-level: expected one of debug, info, warning, error"),
        (["--log-format", "xml"], "--log-format: expected one of text, json, got 'xml'"),
        (["--curve-clients", "x"], "expected both or neither (from --curve-clients)"),
        (["--http-port", "-2"], "--http-port: expected a whole number from -1 to 65535"),
        (["--l2-tier", ""], "--l2-tier: expected printable text, not empty"),
        (["--l2-store-policy", "some"], "--l2-store-policy: expected one of all, found, none"),
        (["--quota", "a"], "--quota: expected TENANT=GB, got 'a' (from --quota)"),
        (["--quota", "a=1,b=2"], "--quota: expected one TENANT=GB each time, got 'a=1,b=2'"),
        (["--quota", "a=x"], "--quota a: expected a number from 0 to 1000000, got 'x'"),
        (["--quota", "a/b=1"], "expected a tenant of at most 128 printable characters"),
        (["--host", "a\nb"], "--host: expected printable text"),
    ],
)
def test_a_flag_that_cannot_be_right_is_named(arguments, words):
    assert words in refusal(*arguments)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("PORT", "70000", "LMCACHE_KERNELS_SERVE_PORT: expected a whole number from 0 to 65535"),
        ("PRT", "1", "LMCACHE_KERNELS_SERVE_PRT: there is no such setting: do you mean LMCACHE_"),
        ("port", "1", "LMCACHE_KERNELS_SERVE_port: there is no such setting"),
        ("", "1", "LMCACHE_KERNELS_SERVE_: there is no such setting"),
        ("PORT", "tcp://10.0.0.1:5555", "LMCACHE_KERNELS_SERVE_PORT: expected"),
    ],
)
def test_a_variable_that_cannot_be_right_is_named(variable, text, words):
    assert words in refusal(environment={f"{ENVIRONMENT_PREFIX}{variable}": text})


@pytest.mark.parametrize(
    ("suffix", "text", "words"),
    [
        (".toml", "prt = 1", ": prt: there is no such setting: do you mean port?"),
        (
            ".toml",
            "l1_size_gb = 1",
            ": l1_size_gb: there is no such setting: do you mean l1-size-gb?",
        ),
        (".toml", "port = '1'", ": port: expected a whole number from 0 to 65535, got '1'"),
        (".toml", "port = 1.5", ": port: expected"),
        (".toml", "port = true", ": port: expected a whole number from 0 to 65535, got True"),
        (".toml", "l1-size-gb = nan", ": l1-size-gb: expected"),
        (".toml", f"l1-size-gb = {'9' * 5000}", "not TOML"),
        (".toml", f"l1-size-gb = {'9' * 400}", ": l1-size-gb: expected"),
        (".toml", "host = 1979-05-27", ": host: expected"),
        (".toml", 'host = "a\\nb"', ": host: expected"),
        (".toml", "[port]\nx = 1", ": port: expected"),
        (".toml", "port = 1\nport = 2", "not TOML"),
        (".toml", "port = \n", "not TOML"),
        (".toml", "x = " + "[" * 5000, "not TOML"),
        (".toml", b"host = '\xff'", "expected text in UTF-8"),
        (".toml", "#" * (1 << 20) + "\n", "expected at most 1048576 bytes"),
        (".toml", "worker-registration-grace-seconds = 1", "-seconds)"),
        (".yaml", "prt: 1", ": prt: there is no such setting: do you mean port?"),
        (".yaml", "port: '1'", ": port: expected a whole number from 0 to 65535, got '1'"),
        (".yaml", "port: yes", ": port: expected"),
        (".yaml", "port: 1\nport: 2", "not YAML: port is there twice"),
        (".yaml", "port", "expected settings, each a name and its value"),
        (".yaml", "- port: 1", "expected settings, each a name and its value"),
        (".yaml", "1: port", "expected settings, each a name and its value"),
        (".yaml", "? [a]\n: 1", "not YAML"),
        (".yaml", "port: [1", "not YAML"),
        (".yaml", "port: !!python/object/apply:os.getpid []", "not YAML"),
        (".yaml", "a: &a [x]\nport: *a", "there is no such setting"),
        (".yaml", "port: " + "[" * 5000, "not YAML"),
        (".yml", "port: -1", ": port: expected"),
        (".json", "{}", "expected a file that ends with .toml, .yaml, .yml"),
        ("", "", "expected a file that ends with"),
    ],
)
def test_a_file_that_cannot_be_right_is_named_with_its_key(suffix, text, words, file):
    path = file(text, suffix)
    said = refusal("--config", str(path))
    assert str(path) in said
    assert words in said


@pytest.mark.parametrize("length", [1, 200])
@pytest.mark.parametrize(
    "text", ["l2-tier = '{}'", "l2-tier = [1, '{}\\n']", "port = '{}'", "host = ['{}']"]
)
def test_no_message_shows_a_password(length, text, file):
    url = f"valkey://user:hunter2{'x' * length}@127.0.0.1:6379"
    said = refusal("--config", str(file(text.format(url))))
    assert "expected" in said
    assert "hunter2" not in said


def test_a_file_that_is_not_there_is_named(tmp_path):
    missing, folder = tmp_path / "missing.toml", tmp_path / "folder.toml"
    folder.mkdir()
    assert "No such file" in refusal("--config", str(missing))
    assert "Is a directory" in refusal("--config", str(folder))


def test_yaml_without_pyyaml_says_what_to_install(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    said = refusal("--config", str(file("port: 1", ".yaml")))
    assert "pip install 'lmcache-kernels[yaml]'" in said


def test_an_empty_file_changes_nothing(file):
    for suffix in (".toml", ".yaml"):
        assert read("--config", str(file("", suffix))).config == ServerConfig()


def test_settings_that_do_not_go_together_are_named_with_their_sources(file):
    path = file("worker-reap-timeout-seconds = 90")
    variable = variable_of("worker_registration_grace_seconds")
    said = refusal("--config", str(path), environment={variable: "60"})
    assert f"(from {path}: worker-reap-timeout-seconds, {variable})" in said


def test_what_cannot_be_right_ends_the_process_before_anything_is_opened(monkeypatch, capsys, file):
    from lmcache_kernels.adapters.server import main

    monkeypatch.setattr(main, "CacheServerLoop", lambda *_, **__: pytest.fail("a socket was bound"))
    monkeypatch.setattr(main.Arena, "create", lambda _: pytest.fail("memory was taken"))
    path = file("port = 'x'")
    with pytest.raises(SystemExit) as ended:
        run(["--config", str(path)], "serve")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"lmcache-kernels: {path}: port: expected")
    assert said.err.count("\n") == 1


# --- telling --------------------------------------------------------------------------------------


def test_what_is_printed_is_a_file_that_means_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(variable_of("host"), "::1")
    arguments = ["--port", "7", "--curve-secret-key", 'a "b" \\ é', "--curve-clients", "#c"]
    run([*arguments, "--print-config"], "serve")
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert len(lines) == len(SETTINGS)
    assert lines[1].split("#")[0].split() == ["port", "=", "7"]
    assert lines[1].endswith("  # --port")
    assert lines[0].endswith("  # LMCACHE_KERNELS_SERVE_HOST")
    assert lines[2].endswith("  # default")
    path = tmp_path / "printed.toml"
    path.write_text(printed)
    assert (
        read("--config", str(path)).config
        == read(*arguments, environment={variable_of("host"): "::1"}).config
    )


def test_arguments_for_a_process_mean_the_same():
    config = ServerConfig(**{name: values[0] for name, values in OTHERS.items()})
    assert read(*flags_of(config, SETTINGS)).config == config


def test_help_names_every_setting_and_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], {}, "serve")
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for name, setting in SETTINGS.items():
        assert f" {flag_of(name)} {setting.kind.metavar} " in said
        assert setting.help in said


def test_a_process_prints_its_settings_and_starts_without_what_it_does_not_need():
    """Neither torch nor the command line's looks are loaded."""
    script = (
        "import sys, lmcache_kernels.adapters.server.main as m; m.run(['--print-config'], 's');"
        "heavy = {'torch', 'triton', 'typer', 'rich', 'yaml', 'prometheus_client'} & {*sys.modules};"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(SETTINGS)


def test_settings_are_the_same_for_the_module_and_the_command():
    command = "from lmcache_kernels.adapters.cli.main import run; run()"
    said = []
    for program in (MODULE, [sys.executable, "-c", command, "serve"]):
        done = subprocess.run(
            [*program, "--port", "7", "--print-config"], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        said.append(done.stdout)
    assert said[0] == said[1]


def test_sources_without_anything_are_the_defaults():
    assert Sources().read().config == ServerConfig()
