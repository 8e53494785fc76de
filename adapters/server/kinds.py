"""What values a setting takes, from text and from a file. Pure."""

from __future__ import annotations

import math
import reprlib
import sys
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from lmcache_kernels.errors import ConfigError


class Kind(Protocol):
    """Prints itself as what it expects: ``a whole number from 0 to 65535``."""

    @property
    def metavar(self) -> str:
        """Stands for the value in a list of flags."""
        ...

    def of_text(self, text: str) -> Any:
        """The value that a flag or an environment variable means.

        Raises:
            ConfigError: it means none.
        """
        ...

    def of_value(self, value: object) -> Any:
        """The value, as it has come out of a file or a program.

        Raises:
            ConfigError: not of this kind.
        """
        ...


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds.

    Attributes:
        low, high: bounds, themselves allowed; but not ``low`` if ``above``.
        whole: no fractions.
    """

    low: float
    high: float = math.inf
    above: bool = False
    whole: bool = False

    @property
    def metavar(self) -> str:
        return "N"

    def __str__(self) -> str:
        what = "a whole number" if self.whole else "a number"
        low, high = _plain(self.low), _plain(self.high)
        if self.above:
            return f"{what} above {low}" + (f", at most {high}" if self.high < math.inf else "")
        return f"{what} from {low} to {high}" if self.high < math.inf else f"{what}, at least {low}"

    def of_text(self, text: str) -> int | float:
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            _refuse(self, text)
        return self.of_value(value)

    def of_value(self, value: object) -> int | float:
        # A bool is an int to Python, and no number to who writes a file.
        if not isinstance(value, int | float) or isinstance(value, bool):
            _refuse(self, value)
        above = value > self.low if self.above else value >= self.low
        if not (above and value <= min(self.high, sys.float_info.max)):  # nor is NaN above anything
            _refuse(self, value)
        if self.whole and not isinstance(value, int):
            _refuse(self, value)
        return value if self.whole else float(value)


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; empty where the setting may be off."""

    metavar: str = "TEXT"
    may_be_empty: bool = True

    def __str__(self) -> str:
        return "printable text" if self.may_be_empty else "printable text, not empty"

    def of_text(self, text: str) -> str:
        return self.of_value(text)

    def of_value(self, value: object) -> str:
        if not isinstance(value, str) or not value.isprintable():
            _refuse(self, value)
        if not value and not self.may_be_empty:
            _refuse(self, value)
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some names."""

    names: tuple[str, ...]

    @property
    def metavar(self) -> str:
        return "|".join(self.names)

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"

    def of_text(self, text: str) -> str:
        return self.of_value(text)

    def of_value(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.names:
            _refuse(self, value)
        return value


@dataclass(frozen=True, slots=True)
class Several:
    """Any number of values of a kind: a flag that is given again, a list in a file, and in the
    environment what is between blanks."""

    kind: Kind

    @property
    def metavar(self) -> str:
        return self.kind.metavar

    def __str__(self) -> str:
        return f"a list, each of it {self.kind}"

    def of_text(self, text: str) -> tuple[Any, ...]:
        return tuple(self.kind.of_text(part) for part in text.split())

    def of_value(self, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            _refuse(self, value)
        return tuple(self.kind.of_value(part) for part in value)


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def _refuse(kind: Kind, value: object) -> NoReturn:
    raise ConfigError(f"expected {kind}, got {_SHORT.repr(without_credentials(value))}")


def without_credentials(value: Any) -> Any:
    """The value; of a URL with user or password, which may hold any character, neither of them. Also of
    those in a list; what is nested deeper is not shown."""
    if isinstance(value, list | tuple):
        return [without_credentials(one) if _is_plain(one) else "..." for one in value]
    if not _is_plain(value):
        return "..."
    if not isinstance(value, str) or "://" not in value or "@" not in value:
        return value
    return f"{value.partition('://')[0]}://***@{value.rpartition('@')[2]}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


_SHORT = reprlib.Repr()
_SHORT.maxstring = 80
