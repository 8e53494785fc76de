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

    def put(module: str, name: str, result: object = None) -> list:
        calls: list = []

        def called(*arguments, **options):
            calls.append(options or arguments)
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


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--help",),
        ("--port", "7", "--l1-size-gb=0.5", "--http-port", "-1"),
        ("--port", "-1", "words", "-x", "--stop-on-eof"),
    ],
)
def test_serve_hands_over_whatever_it_is_given(arguments, stand_in):
    """What is right the server itself knows best."""
    calls = stand_in(SERVER, "run")
    assert invoke("serve", *arguments).exit_code == 0
    assert calls == [(list(arguments), "lmcache-kernels serve")]


@pytest.mark.parametrize("code", [0, 1])
def test_the_demo_decides_the_exit_status(stand_in, code):
    calls = stand_in(f"{CLI}.demo", "run_demo", code)
    assert invoke("demo", "--size-mb", "8", "--device", "cpu").exit_code == code
    assert calls == [{"size_mb": 8, "device": "cpu"}]


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--size-mb", "0"),
        ("demo", "--device", "tpu"),
        ("nonsense",),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(stand_in, arguments):
    calls = stand_in(f"{CLI}.demo", "run_demo", 0)
    assert invoke(*arguments).exit_code == 2
    assert calls == []


def test_the_version_is_told():
    assert invoke("--version").output == f"lmcache-kernels {__version__}\n"


def test_an_error_we_know_is_one_line_and_exit_status_1(stand_in, monkeypatch):
    stand_in(SERVER, "run", CapacityError("arena: need 5, have 3"))
    monkeypatch.setattr(sys, "argv", ["lmcache-kernels", "serve"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == "lmcache-kernels: arena: need 5, have 3"
