"""The command line: what it hands to whom, and how it ends."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from lmcache_kernels import __version__
from lmcache_kernels.adapters.cli import main
from lmcache_kernels.errors import CapacityError

CLI = "lmcache_kernels.adapters.cli"
SERVER = "lmcache_kernels.adapters.server.main"


@pytest.fixture
def stand_in(monkeypatch):
    """Put a function in place of the one a command loads; the list gets its calls."""

    def put(module: str, name: str, result: object = None) -> list[dict]:
        calls: list[dict] = []

        def called(**options):
            calls.append(options)
            if isinstance(result, Exception):
                raise result
            return result

        fake = ModuleType(module)
        setattr(fake, name, called)
        monkeypatch.setitem(sys.modules, module, fake)
        return calls

    return put


def invoke(*arguments: str):
    return CliRunner().invoke(main.app, arguments)


def test_serve_hands_over_its_options_and_their_defaults(stand_in):
    calls = stand_in(SERVER, "serve")
    assert invoke("serve").exit_code == 0
    options = ["--host", "::1", "--port", "7", "--l1-size-gb", "0.5", "--chunk-size", "64"]
    options += ["--eviction-policy", "s3fifo", "--eviction-trigger-watermark", "0.8"]
    options += ["--eviction-ratio", "0.1", "--worker-reap-timeout-seconds", "30"]
    options += ["--worker-registration-grace-seconds", "40"]
    options += ["--curve-secret-key", "s", "--curve-clients", "c"]
    assert invoke("serve", *options).exit_code == 0
    names = ("host", "port", "size_gb", "chunk_size")
    names += ("eviction_policy", "eviction_watermark", "eviction_ratio")
    names += ("worker_reap_timeout", "worker_registration_grace")
    names += ("curve_secret_key", "curve_clients")
    usual = ("127.0.0.1", 5555, 4.0, 256, "lru", 1.0, 0.2, 120, 600, "", "")
    chosen = ("::1", 7, 0.5, 64, "s3fifo", 0.8, 0.1, 30, 40, "s", "c")
    assert calls == [dict(zip(names, values, strict=True)) for values in (usual, chosen)]


@pytest.mark.parametrize("code", [0, 1])
def test_the_demo_decides_the_exit_status(stand_in, code):
    calls = stand_in(f"{CLI}.demo", "run_demo", code)
    assert invoke("demo", "--size-mb", "8", "--device", "cpu").exit_code == code
    assert calls == [{"size_mb": 8, "device": "cpu"}]


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "70000"),
        ("serve", "--l1-size-gb", "0"),
        ("serve", "--chunk-size", "0"),
        ("demo", "--size-mb", "0"),
        ("demo", "--device", "tpu"),
        ("nonsense",),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(stand_in, arguments):
    calls = [stand_in(SERVER, "serve"), stand_in(f"{CLI}.demo", "run_demo", 0)]
    assert invoke(*arguments).exit_code == 2
    assert calls == [[], []]


def test_the_version_is_told():
    assert invoke("--version").output == f"lmcache-kernels {__version__}\n"


def test_an_error_we_know_is_one_line_and_exit_status_1(stand_in, monkeypatch):
    stand_in(SERVER, "serve", CapacityError("arena: need 5, have 3"))
    monkeypatch.setattr(sys, "argv", ["lmcache-kernels", "serve"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == "lmcache-kernels: arena: need 5, have 3"
