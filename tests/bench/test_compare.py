"""What moved between two results, and what only looks like it."""

from __future__ import annotations

import pytest

from bench.compare import changes, compare


@pytest.mark.parametrize(
    ("milliseconds", "moved"), [(2.0, ""), (2.01, ""), (2.2, "slower"), (1.8, "faster")]
)
def test_a_change_beyond_the_spread_is_flagged(make_row, make_document, milliseconds, moved):
    (found,) = changes(
        make_document(make_row()), make_document(make_row(milliseconds=milliseconds))
    )
    assert found.moved == moved
    assert found.ratio == pytest.approx(2.0 / milliseconds)


def test_a_machine_that_is_slower_altogether_is_no_change(make_row, make_document):
    slow = make_row(milliseconds=4.0, ceiling_milliseconds=3.8)
    (found,) = changes(make_document(make_row()), make_document(slow))
    assert found.moved == ""
    assert found.before == found.after == "0.950 of plain"


def test_without_a_ceiling_times_are_compared(make_row, make_document):
    seconds = make_row().seconds
    old = make_row(ceiling="", seconds={"ours": seconds["ours"]})
    new = make_row(ceiling="", seconds={"ours": seconds["plain"]})
    (found,) = changes(make_document(old), make_document(new))
    assert (found.before, found.after, found.moved) == ("2000.0 us", "1900.0 us", "faster")


def test_rows_of_one_side_and_other_machines_are_named(make_row, make_document):
    before = make_document(make_row("A"), make_row("B"), gpu="X")
    after = make_document(make_row("B"), make_row("C"), gpu="Y")
    lines = compare(before, after)
    assert "other gpu: X and Y" in lines
    assert [line for line in lines if line.startswith("only before")] == [
        "only before: A gather, 256 MiB"
    ]
    assert [line for line in lines if line.startswith("only after")] == [
        "only after: C gather, 256 MiB"
    ]
    assert len([line for line in lines if line.startswith("B gather")]) == 1


def test_other_conditions_are_other_rows(make_row, make_document):
    before = make_document(make_row(max_programs=16))
    assert changes(before, make_document(make_row(max_programs=32))) == []
