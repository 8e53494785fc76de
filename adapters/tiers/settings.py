"""The URL of a tier: where it is and how it is used. Pure.

``scheme://[user[:password]@]host[:port]/path?option=value&...``. A back end lists its options as the
fields of a frozen dataclass, made by :func:`number`, :func:`whole`, :func:`flag` and :func:`text`.
No message shows a password, nor a piece of a URL that may be one.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from lmcache_kernels.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

S = TypeVar("S")

PREFIX = r"[A-Za-z0-9_:/-]{1,64}"
"""What names in a shared store may begin with: nothing that a pattern of keys reads as special."""

_READ = "read"


@dataclass(frozen=True, slots=True)
class TierUrl:
    """A URL in its parts; ``str`` shows all but user and password and what is in the query."""

    scheme: str
    host: str
    port: int | None
    path: str
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    query: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> TierUrl:
        """
        Raises:
            ConfigError: not a URL.
        """
        scheme = url.partition(":")[0]
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _malformed(scheme, "a host and a port between 0 and 65535") from None
        if not parts.scheme or "://" not in url:
            raise ConfigError(
                "tier: expected a URL such as file:///var/cache/lmcache-kernels, got something "
                f"without a scheme of {len(url)} characters"
            )
        if parts.fragment or "@" in parts.path + parts.query:
            raise _malformed(scheme, "characters such as # / ? @ in a password written as %23 ...")
        return cls(
            parts.scheme,
            parts.hostname or "",
            port,
            unquote(parts.path),
            unquote(parts.username or ""),
            unquote(parts.password or ""),
            parts.query,
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    def settings(self, options: type[S]) -> S:
        """The options of the query; those that are not there as ``options`` has them.

        Raises:
            ConfigError: an option that is unknown, there twice, or has a value that it cannot have.
        """
        fields = {f.name: f for f in dataclasses.fields(options)}  # type: ignore[arg-type]
        given: dict[str, Any] = {}
        for name, value in parse_qsl(self.query, keep_blank_values=True):
            if name not in fields:
                shown = name if re.fullmatch("[a-z_]{1,32}", name) else "something else"
                raise ConfigError(
                    f"tier {self}: expected options among {', '.join(fields)}; got {shown}"
                )
            if name in given:
                raise ConfigError(f"tier {self}: {name}: expected once, got twice")
            try:
                given[name] = fields[name].metadata[_READ](value)
            except ValueError as error:
                raise ConfigError(f"tier {self}: {name}: {error}") from None
        return options(**given)


def number(default: float, least: float, most: float) -> float:
    """An option that is a number from ``least`` to ``most``."""

    def read(value: str) -> float:
        try:
            got = float(value)
        except ValueError:
            got = float("nan")
        if not least <= got <= most:
            raise ValueError(f"expected a number from {least:g} to {most:g}, got {value[:40]!r}")
        return got

    return _option(default, read)


def whole(default: int, least: int, most: int) -> int:
    """An option that is an integer from ``least`` to ``most``."""

    def read(value: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", value) or not least <= int(value) <= most:
            raise ValueError(f"expected an integer from {least} to {most}, got {value[:40]!r}")
        return int(value)

    return _option(default, read)


def flag(default: bool) -> bool:
    """An option that is 0 or 1."""

    def read(value: str) -> bool:
        if value not in ("0", "1"):
            raise ValueError(f"expected 0 or 1, got {value[:40]!r}")
        return value == "1"

    return _option(default, read)


def text(default: str, pattern: str) -> str:
    """An option that is a text of this pattern."""

    def read(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"expected a text like {pattern}, got {value[:40]!r}")
        return value

    return _option(default, read)


def _option(default: S, read: Callable[[str], S]) -> S:
    return field(default=default, metadata={_READ: read})


def _malformed(scheme: str, expected: str) -> ConfigError:
    shown = scheme if re.fullmatch("[a-z]{1,16}", scheme) else "tier"
    return ConfigError(f"{shown} URL: expected {expected}; it is not shown, for it may be secret")
