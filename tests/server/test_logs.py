"""The log: one JSON object a line, whatever is in it; and lines for people."""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.adapters.server.logs import JsonFormatter, ServerLog

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs", "Cc", "Zl", "Zp"]))
    | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner)
    ),
    max_leaves=8,
)


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


def lines_of(log_format, say):
    """What is written when ``say`` has the logger."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stderr", stream)
        with ServerLog(log_format, "info"):
            say(logging.getLogger("a.test"))
    return stream.getvalue()


def entry_of(say):
    text = lines_of("json", say)
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert text.isascii()
    entry = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    json.dumps(entry, ensure_ascii=False).encode()  # no halves of surrogate pairs
    return entry


def test_a_line_says_when_how_bad_who_and_what():
    before = datetime.now(timezone.utc) - timedelta(milliseconds=1)
    entry = entry_of(lambda logger: logger.warning("%d of %s", 3, "them", extra={"worker": 7}))
    at = datetime.fromisoformat(entry.pop("timestamp").replace("Z", "+00:00"))
    assert before <= at <= datetime.now(timezone.utc)
    assert at.tzinfo is not None
    assert entry == {
        "level": "warning",
        "logger": "a.test",
        "message": "3 of them",
        "fields": {"worker": 7},
    }


@given(message=st.text(st.characters()), fields=st.dictionaries(st.text(st.characters()), ANYTHING))
def test_whatever_is_said_is_one_object_on_one_line(message, fields):
    record = logging.makeLogRecord({"msg": message, "levelname": "INFO", "name": "n"})
    for name, value in fields.items():
        record.__dict__.setdefault(name, value)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert text.isascii()
    entry = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    json.dumps(entry, ensure_ascii=False).encode()
    if message.isascii():
        assert entry["message"] == message


@pytest.mark.parametrize("arguments", [("%d", "x"), ("%s", Rude()), ("%s %s", 1), ("", 1)])
def test_arguments_that_do_not_fit_are_told_and_nothing_is_raised(arguments):
    message, *values = arguments
    record = logging.makeLogRecord({"name": "n", "msg": message, "args": tuple(values)})
    assert repr(message) in json.loads(JsonFormatter().format(record))["message"]


def test_values_that_json_has_no_form_for():
    loop: list = []
    loop.append(loop)
    odd = {"nan": math.nan, "inf": -math.inf, "set": {1}, "bytes": b"\xff", "huge": 10**400}
    odd |= {
        "rude": Rude(),
        "loop": loop,
        "key": {1: {b"k": None}},
        "true": True,
        "pair": (1, "\ud800"),
    }
    fields = entry_of(lambda logger: logger.info("m", extra=odd))["fields"]
    assert fields["nan"] == "nan"
    assert fields["inf"] == "-inf"
    assert fields["set"] == [1]
    assert fields["bytes"] == r"b'\xff'"
    assert fields["huge"].startswith("1000")
    assert fields["rude"].startswith("<Rude")
    assert fields["key"] == {"1": {"b'k'": None}}
    assert fields["true"] is True
    assert fields["pair"] == [1, r"\ud800"]
    assert "..." in json.dumps(fields["loop"])


def test_a_traceback_is_in_its_line():
    def say(logger):
        try:
            raise ValueError("first\nsecond \udcff")
        except ValueError:
            logger.exception("it failed", stack_info=True)

    entry = entry_of(say)
    assert entry["message"] == "it failed"
    assert entry["exception"].startswith("Traceback (most recent call last):\n")
    assert entry["exception"].endswith("ValueError: first\nsecond \\udcff")
    assert entry["stack"].startswith("Stack (most recent call last):\n")


def test_text_is_for_people():
    text = lines_of("text", lambda logger: logger.info("hello %s", "you"))
    assert text.endswith(" INFO a.test: hello you\n")


def test_format_and_level_can_change_and_are_handed_back(capsys):
    before = logging.root.level, list(logging.root.handlers)
    logger = logging.getLogger("a.test")
    with ServerLog("text", "warning") as log:
        logger.info("unheard")
        log.change("json", "debug")
        logger.debug("heard")
    assert (logging.root.level, logging.root.handlers) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "heard"


def test_a_log_that_is_never_entered_changes_nothing():
    before = logging.root.level
    ServerLog("json", "debug")
    assert logging.root.level == before


def test_warnings_of_python_are_lines_too():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        entry = entry_of(lambda _: warnings.warn("old\nthing", DeprecationWarning, stacklevel=1))
    assert entry["logger"] == "py.warnings"
    assert "DeprecationWarning: old\nthing" in entry["message"]
