"""Files of settings: TOML or YAML, as their suffix says. Nothing in them is executed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BIGGEST_FILE = 1 << 20
"""Bytes; a file of settings has some hundreds."""


def read_file(path: Path) -> dict[str, object]:
    """The settings in a file.

    Raises:
        ConfigError: a file that is not there, of another kind, or not what its suffix says; or one
            that is no table of settings.
    """
    read = READERS.get(path.suffix)
    if read is None:
        raise ConfigError(f"{path}: expected a file that ends with {', '.join(READERS)}")
    try:
        with path.open("rb") as file:
            data = file.read(BIGGEST_FILE + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8: {error}") from error
    if len(data) > BIGGEST_FILE:
        raise ConfigError(f"{path}: expected at most {BIGGEST_FILE} bytes of settings")
    try:
        found = read(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path}: expected settings, each a name and its value")
    return found


def _read_toml(text: str) -> object:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # its own error is a ValueError
        raise ConfigError(f"not TOML: {_one_line(error)}") from error


def _read_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "YAML needs PyYAML: pip install 'lmcache-kernels[yaml]', or write TOML"
        ) from error

    class Loader(yaml.SafeLoader):
        """Refuses a key that comes twice, as TOML does; the safe loader takes the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [str(key.value) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.YAMLError(f"{key} is there twice")
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    try:
        found = yaml.load(text, Loader)  # a kind of safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not YAML: {_one_line(error)}") from error
    return {} if found is None else found  # an empty file is an empty table in TOML, too


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


READERS: dict[str, Callable[[str], object]] = {
    ".toml": _read_toml,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}
