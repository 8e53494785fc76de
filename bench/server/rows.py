"""What the rows of all parts have in common: times of calls, of no bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.results import OURS, Row, with_ratios
from bench.timing import spread_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def row_of(
    part: str,
    case: str,
    variant: str,
    direction: str,
    seconds: Mapping[str, Sequence[float]],
    **more: Any,
) -> Row:
    """A row of the times of every contender."""
    fields: dict[str, Any] = {
        "part": part,
        "case": case,
        "variant": variant,
        "direction": direction,
        "ids": "random",
        "bytes": 0,
        "run_bytes": 0,
        "max_programs": None,
        "bit_exact": True,
        "traffic": 1,
        "ceiling": "",
        "seconds": {name: spread_of(times) for name, times in seconds.items()},
    }
    return with_ratios(Row(**(fields | more)))


def line(row: Row) -> str:
    """One row for the terminal."""
    ours = row.seconds[OURS]
    others = "".join(
        f"  {name} {spread.p50 * 1e6:.0f} us"
        for name, spread in row.seconds.items()
        if name != OURS
    )
    parts = "".join(f"  {name} {seconds * 1e6:.0f} us" for name, seconds in row.parts.items())
    return (
        f"{row.title:48} p50 {ours.p50 * 1e6:.0f} us  p99 {(ours.p99 or ours.p80) * 1e6:.0f} us"
        f"{others}{parts}"
    )
