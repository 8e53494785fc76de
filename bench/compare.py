"""Two results of one benchmark side by side.

A time is taken as a part of its own run's ceiling where there is one, so that a machine in another
mood does not look like a change of the code. Something moved if the two runs' p20 to p80 do not
meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .results import OURS, ResultError

if TYPE_CHECKING:
    from .results import Document, Row


@dataclass(frozen=True)
class Change:
    """``ratio``: how many times as fast ours became. ``moved``: "faster", "slower" or ""."""

    title: str
    before: str
    after: str
    ratio: float
    moved: str


def changes(before: Document, after: Document) -> list[Change]:
    """Of the rows that both have, in the order of ``after``."""
    old = {row.key: row for row in before.rows}
    return [_change(old[row.key], row) for row in after.rows if row.key in old]


def compare(before: Document, after: Document) -> list[str]:
    """The comparison as lines of text.

    Raises:
        ResultError: results of two different benchmarks.
    """
    if before.benchmark != after.benchmark:
        raise ResultError(
            f"expected two results of one benchmark, got {before.benchmark} and {after.benchmark}"
        )
    lines = [
        f"before: {before.machine.get('commit')} {before.machine.get('date')}",
        f"after:  {after.machine.get('commit')} {after.machine.get('date')}",
        *(
            f"other {name}: {before.machine.get(name)} and {after.machine.get(name)}"
            for name in ("gpu", "driver", "cuda", "torch", "triton")
            if before.machine.get(name) != after.machine.get(name)
        ),
        f"{'':62} {'before':>14} {'after':>14}  times as fast",
    ]
    found = changes(before, after)
    lines += [f"{c.title:62} {c.before:>14} {c.after:>14}  {c.ratio:.3f} {c.moved}" for c in found]
    lines += _only_in("before", before, after) + _only_in("after", after, before)
    return lines


def _change(before: Row, after: Row) -> Change:
    (old_low, old, old_high), (low, new, high) = _costs(before), _costs(after)
    moved = "faster" if high < old_low else "slower" if low > old_high else ""
    return Change(after.title, figure(before), figure(after), old / new, moved)


def figure(row: Row) -> str:
    """What ours reached in this row, as a person wants to see it."""
    if row.ceiling:
        return f"{row.of_ceiling(OURS):.3f} of {row.ceiling.replace('_', ' ')}"
    return f"{row.seconds[OURS].p50 * 1e6:.1f} us"


def _costs(row: Row) -> tuple[float, float, float]:
    """p20, p50, p80 of ours, in units of the ceiling's median where there is one."""
    spread = row.seconds[OURS]
    unit = row.seconds[row.ceiling].p50 if row.ceiling else 1.0
    return spread.p20 / unit, spread.p50 / unit, spread.p80 / unit


def _only_in(name: str, document: Document, other: Document) -> list[str]:
    known = {row.key for row in other.rows}
    return [f"only {name}: {row.title}" for row in document.rows if row.key not in known]
