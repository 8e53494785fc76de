"""The log of the server's process: lines for people, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

DEEPEST = 4
"""Levels of a field's value; what lies deeper is shown as Python shows it, shortened."""


class JsonFormatter(logging.Formatter):
    """One JSON object, in ASCII and on one line, for each record, whatever is in it.

    Keys: ``timestamp`` (UTC, ISO 8601), ``level``, ``logger``, ``message``; and where there are such,
    ``fields`` (what was given as ``extra``) and ``exception`` and ``stack`` (tracebacks).
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        entry: dict[str, Any] = {
            "timestamp": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": _text(record.name),
            "message": _text(_message_of(record)),
        }
        extra = {name: it for name, it in vars(record).items() if name not in _ALWAYS_THERE}
        if extra:
            entry["fields"] = _plain(extra)
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = _text(self.formatException(record.exc_info))
        if record.stack_info:
            entry["stack"] = _text(record.stack_info)
        return json.dumps(entry)


class ServerLog:
    """Standard error as the log of this process, Python's warnings among it, while the context lasts."""

    def __init__(self, log_format: str, log_level: str) -> None:
        self._handler = logging.StreamHandler()
        self._wanted = log_format, log_level
        self._before = logging.root.level

    def change(self, log_format: str, log_level: str) -> None:
        """Log like this from now on; see :data:`.config.LOG_FORMATS` and :data:`.config.LOG_LEVELS`."""
        as_json = log_format == "json"
        self._handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT_FORMAT))
        logging.root.setLevel(log_level.upper())

    def __enter__(self) -> ServerLog:
        self._before = logging.root.level
        self.change(*self._wanted)
        logging.root.addHandler(self._handler)
        logging.captureWarnings(True)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.captureWarnings(False)
        logging.root.removeHandler(self._handler)
        logging.root.setLevel(self._before)


_ALWAYS_THERE = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # arguments that do not fit the format
        return f"{record.msg!r} {_shown(record.args)}"


def _text(text: str) -> str:
    """The same, but for halves of surrogate pairs, which many readers of JSON stumble over."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: object, depth: int = 0) -> Any:
    """What JSON has for a value."""
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) < _BIGGEST_NUMBER:  # no NaN, either
        return value
    if depth < DEEPEST and isinstance(value, Mapping):
        return {_text(str(key)): _plain(one, depth + 1) for key, one in value.items()}
    if depth < DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [_plain(one, depth + 1) for one in value]
    return _shown(value)


def _shown(value: object) -> str:
    try:
        return _text(_SHORT.repr(value))
    except Exception:  # not even that
        return f"<{type(value).__name__}>"


_BIGGEST_NUMBER = 1 << 63  # others are read as strings by those who care
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 1000
