"""Where the settings of a server come from: flags, the environment, a file, or nobody.

A flag wins over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError

from .config import SETTINGS, ServerConfig, flag_of, key_of
from .files import read_file
from .kinds import Several, without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

ENVIRONMENT_PREFIX = "LMCACHE_KERNELS_SERVE_"
"""Of environment variables: ``LMCACHE_KERNELS_SERVE_PORT`` is ``--port``."""

FILE_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
"""Names the file where the flag ``--config`` does not."""

DEFAULT = "default"
"""Origin of what nobody has set."""


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings that count, and for each that somebody has set, who."""

    config: ServerConfig
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """A flag, a variable, a key of a file, or :data:`DEFAULT`."""
        return self.origins.get(name, DEFAULT)

    def text(self) -> str:
        """All settings as a TOML file, each with its origin."""
        lines = [f"{key_of(name)} = {shown(getattr(self.config, name))}" for name in SETTINGS]
        width = max(map(len, lines))
        return "".join(
            f"{line:{width}}  # {self.origin(name)}\n"
            for line, name in zip(lines, SETTINGS, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Sources:
    """What was said when the server was started; :meth:`read` again for what the file says now.

    Attributes:
        flags: by the names of the settings, as text, or as texts where there may be several.
        environment: variables of the process; others than ours are left alone.
        file: its suffix says what it is: ``.toml``, ``.yaml`` or ``.yml``.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None

    def read(self) -> Effective:
        """The settings that follow.

        Raises:
            ConfigError: a file that cannot be read, a setting that does not exist, or a value that it
                does not take; says which, and where it comes from.
        """
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for name, value, origin in self._found():
            values[name], origins[name] = value, origin
        try:
            return Effective(ServerConfig(**values), origins)
        except ConfigError as error:  # each value is right by itself
            said = [where for name, where in origins.items() if key_of(name) in str(error)]
            raise ConfigError(f"{error} (from {', '.join(said)})") from error

    def _found(self) -> Iterator[tuple[str, Any, str]]:
        """Name, value and origin of whatever was said; the last one counts."""
        for key, value in ({} if self.file is None else read_file(self.file)).items():
            origin = f"{self.file}: {key}"
            name = _known(key, key_of, origin)
            yield name, _taken(SETTINGS[name].kind.of_value, value, origin), origin
        for variable, text in self.environment.items():
            ours = variable.startswith(ENVIRONMENT_PREFIX) and variable != FILE_VARIABLE
            if ours and text:  # empty is how a variable is unset where it cannot be removed
                name = _known(variable, variable_of, variable)
                yield name, _taken(SETTINGS[name].kind.of_text, text, variable), variable
        for name, said in self.flags.items():
            origin = flag_of(name)
            kind = SETTINGS[name].kind
            if isinstance(kind, Several):
                texts = [said] if isinstance(said, str) else said
                yield name, tuple(_taken(kind.kind.of_text, one, origin) for one in texts), origin
            else:
                yield name, _taken(kind.of_text, said, origin), origin


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def shown(value: Any) -> str:
    """A setting's value as a TOML file has it, without user and password of URLs."""
    return json.dumps(without_credentials(value))


def _known(said: str, spelled: Callable[[str], str], origin: str) -> str:
    """The setting that is spelled like that.

    Raises:
        ConfigError: none is.
    """
    names = {spelled(name): name for name in SETTINGS}
    if said in names:
        return names[said]
    near = difflib.get_close_matches(said, names, 1)
    hint = f": do you mean {near[0]}?" if near else ""
    raise ConfigError(f"{origin}: there is no such setting{hint}")


def _taken(take: Callable[[Any], Any], value: Any, origin: str) -> Any:
    try:
        return take(value)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
