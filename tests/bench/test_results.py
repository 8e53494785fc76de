"""Result files: what is written can be read, what contradicts itself cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.__main__ import DEVICES
from bench.results import SCHEMA, ResultError, problems, read, write
from bench.timing import Spread

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
COMMITTED = [path for path in sorted(RESULTS.glob("*.json")) if '"schema"' in path.read_text()]


def test_what_is_written_is_read(tmp_path, make_row, make_document):
    document = make_document(
        make_row(moved={"plain": 5}, absent={"lmcache": "not here"}, parts={"launch": 1e-6})
    )
    write(document, tmp_path / "a.json")
    assert read(tmp_path / "a.json") == document


def test_ratios_are_of_rates_so_a_contender_may_move_less(make_row):
    row = make_row(moved={"plain": 1 << 27})
    assert row.ratios["plain"] == pytest.approx(2 * 1.9 / 2.0)
    assert row.gb_s("ours") == pytest.approx(2 * (1 << 28) / 2e-3 / 1e9)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seconds": {"plain": Spread(1, 1, 1)}}, "no time of 'ours'"),
        ({"ceiling": "link"}, "no time of the ceiling 'link'"),
        ({"seconds": {"ours": Spread(2, 1, 3), "plain": Spread(1, 1, 1)}}, "out of order"),
        ({"seconds": {"ours": Spread(0, 1, 3), "plain": Spread(1, 1, 1)}}, "out of order"),
        ({"seconds": {"ours": Spread(1, 2, 3, 2.9), "plain": Spread(1, 1, 1)}}, "out of order"),
        ({"ratios": {"plain": 3.0}}, "ratios do not follow"),
        ({"beside": {"theirs": {"gather": 1.0}}}, "no time of 'theirs'"),
    ],
)
def test_a_row_that_contradicts_itself_is_named(make_row, make_document, change, complaint):
    row = replace(make_row(), **change)
    (found, *_) = problems(make_document(row))
    assert complaint in found
    assert row.title in found


@pytest.mark.parametrize(
    "text", ["", "[]", '{"machine": {}, "rows": []}', '{"schema": 1, "rows": "no"}']
)
def test_other_files_are_refused_with_their_name(tmp_path, text):
    path = tmp_path / "strange.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=r"strange\.json"):
        read(path)


def test_another_schema_is_refused(tmp_path, make_document):
    path = tmp_path / "new.json"
    write(replace(make_document(), schema=SCHEMA + 1), path)
    with pytest.raises(ResultError, match="schema: expected"):
        read(path)


def test_a_file_of_the_schema_before_is_read(tmp_path, make_row, make_document):
    path = tmp_path / "old.json"
    write(replace(make_document(make_row()), schema=SCHEMA - 1), path)
    text = path.read_text()
    for added in ('"part"', '"beside"', '"p99"'):
        assert added in text
        text = "\n".join(line for line in text.splitlines() if added not in line)
    path.write_text(
        text.replace(",\n  }", "\n  }").replace(",\n    }", "\n    }").replace(",\n   }", "\n   }")
    )
    assert read(path).rows == [make_row()]


def test_rows_of_other_parts_measured_something_else(make_row):
    assert make_row(part="link").key != make_row(part="latency").key
    assert make_row(part="link").title == f"link {make_row().title}"


def test_a_slowdown_is_of_the_loop_alone(make_row):
    row = make_row(milliseconds=2.1, ceiling_milliseconds=2.0, beside={"ours": {"gather": 5e10}})
    assert row.slowdown("ours") == pytest.approx(1.05)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results_are_whole_and_exact(path):
    document = read(path)
    assert document.rows
    assert all(row.bit_exact and not row.failures for row in document.rows)
    where = {"processor"} if DEVICES.get(document.benchmark) == 0 else {"gpu", "driver"}
    assert {*where, "torch", "triton", "commit", "date", "command"} <= set(document.machine)
