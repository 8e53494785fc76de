"""The command line of a server."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lmcache_kernels.errors import ConfigError

from .config import SETTINGS, flag_of
from .kinds import Several
from .sources import ENVIRONMENT_PREFIX, FILE_VARIABLE, Sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .config import ServerConfig, Setting


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was asked for: settings, to print them only, to end with standard input."""

    sources: Sources
    print_config: bool
    stop_on_eof: bool


def parse(arguments: Sequence[str], environment: Mapping[str, str], program: str) -> CommandLine:
    """Read a command line; the values of settings are checked when they are read.

    Raises:
        ConfigError: flags that do not exist, or lack their value.
        SystemExit: after ``--help``.
    """
    said = vars(_parser(program).parse_args(arguments))
    file = said.pop("config") or environment.get(FILE_VARIABLE)
    print_config, stop_on_eof = said.pop("print_config"), said.pop("stop_on_eof")
    sources = Sources(said, environment, Path(file) if file else None)
    return CommandLine(sources, print_config, stop_on_eof)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage=f"{program} [FLAG VALUE]...",
        description="Run a cache server until it is told to end.",
        epilog=f"Each setting can also come from the environment ({ENVIRONMENT_PREFIX}PORT is --port) "
        "or from the file (port is --port). A flag wins over the environment, the environment over "
        "the file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"File of settings, TOML or YAML by its suffix; also {FILE_VARIABLE}.",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="Print all settings and where each comes from, as TOML, and end.",
    )
    parser.add_argument(
        "--stop-on-eof", action="store_true", help="End when standard input does, too."
    )
    for name, setting in SETTINGS.items():
        parser.add_argument(
            flag_of(name),
            metavar=setting.kind.metavar,
            default=argparse.SUPPRESS,
            action="append" if isinstance(setting.kind, Several) else "store",
            help=described(setting).replace("%", "%%"),
        )
    return parser


def flags_of(config: ServerConfig, names: Iterable[str]) -> list[str]:
    """Arguments that give these settings the values that they have here."""
    return [
        f"{flag_of(name)}={value}"
        for name in names
        for value in (
            getattr(config, name)
            if isinstance(SETTINGS[name].kind, Several)
            else [getattr(config, name)]
        )
    ]


def described(setting: Setting) -> str:
    """What a setting does, its unit and its default, for people."""
    return f"{setting.help} Default: {default_of(setting)}."


def default_of(setting: Setting) -> str:
    """With its unit; ``none`` for text that is empty."""
    default = setting.default
    shown = f"{default:g}" if isinstance(default, int | float) else default or "none"
    return f"{shown} {setting.unit}".rstrip()
