"""The one form of every result file: what was measured, on what, and how it compares.

A file is a :class:`Document` as JSON. ``seconds`` names everyone who took part; ``ours`` is this
library. A figure of one row is only ever compared with figures of the same row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from .timing import Spread  # noqa: TC001 - msgspec reads the fields' types

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 3
READABLE = (2, 3)
"""Schema 2 has no parts of a benchmark, no traffic beside a loop and no 99th percentiles."""

OURS = "ours"


class ResultError(ValueError):
    """A file that is no result, or contradicts itself."""


def title_of(case: str, direction: str, variant: str, ids: str, max_programs: int | None) -> str:
    """What a person calls a row: the case, and what is not as usual about it."""
    extras = [variant] if variant != "plain" else []
    extras += [ids] if ids != "random" else []
    extras += [f"{max_programs} programs"] if max_programs else []
    return ", ".join([f"{case} {direction}", *extras])


@dataclass(frozen=True)
class Row:
    """One case measured.

    Attributes:
        variant: which of the library's copies: "plain", "checksum".
        direction: what was done, for example "gather" or "push".
        ids: order or kind of the block ids.
        bytes: payload moved by a contender that is not in ``moved``.
        run_bytes: what lies dense in one piece on both sides; 0 where it means nothing.
        max_programs: bound on the kernel's grid.
        bit_exact: every copied byte was compared before anything was timed.
        traffic: how often a rate counts each byte: 2 where it is read from and written to one memory.
        ceiling: the contender nobody can beat; "" if there is none.
        seconds: per contender.
        moved: payload of contenders that moved a part only, because more would take too long.
        ratios: per other contender, the rate of ours over its rate.
        absent: why a contender did not take part.
        parts: where the time of ours went, in seconds.
        path: which way ours went, where there are several.
        part: of a benchmark that has several.
        beside: for a loop that is timed while a contender copies: per contender and direction, the
            bytes a second that it copied. Its ``seconds`` are of a step of the loop, and the ceiling
            is the loop alone.
        failures: what went wrong beside wrong bytes; nothing in a sound run.
        counts: what was counted.
    """

    case: str
    variant: str
    direction: str
    ids: str
    bytes: int
    run_bytes: int
    max_programs: int | None
    bit_exact: bool
    traffic: int
    ceiling: str
    seconds: dict[str, Spread]
    moved: dict[str, int] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    path: str = ""
    part: str = ""
    beside: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """Rows of two files with equal keys measured the same thing."""
        conditions = (self.case, self.variant, self.direction, self.ids, self.max_programs)
        return (self.part, *conditions, self.bytes)

    @property
    def title(self) -> str:
        case = f"{self.part} {self.case}".lstrip()
        conditions = title_of(case, self.direction, self.variant, self.ids, self.max_programs)
        return f"{conditions}, {self.bytes / 2**20:.0f} MiB" if self.bytes else conditions

    def rate(self, contender: str) -> float:
        """Payload bytes a second at the median; calls a second where no bytes are counted."""
        payload = self.moved.get(contender, self.bytes) or 1
        return payload / self.seconds[contender].p50

    def gb_s(self, contender: str) -> float:
        return self.traffic * self.rate(contender) / 1e9

    def of_ceiling(self, contender: str) -> float:
        return self.rate(contender) / self.rate(self.ceiling)

    def slowdown(self, contender: str) -> float:
        """How many times as long as alone a step of the loop takes."""
        return self.seconds[contender].p50 / self.seconds[self.ceiling].p50


@dataclass(frozen=True)
class Document:
    schema: int
    benchmark: str
    machine: dict[str, str]
    rows: list[Row]


def with_ratios(row: Row) -> Row:
    """The row with ``ratios`` computed from its times."""
    ratios = {name: row.rate(OURS) / row.rate(name) for name in row.seconds if name != OURS}
    return replace(row, ratios=ratios)


def problems(document: Document) -> list[str]:
    """What a result says that cannot be."""
    found = []
    if document.schema not in READABLE:
        found.append(f"schema: expected {SCHEMA}, got {document.schema}")
    for row in document.rows:
        where = row.title
        if OURS not in row.seconds:
            found.append(f"{where}: no time of {OURS!r}")
            continue
        if row.ceiling and row.ceiling not in row.seconds:
            found.append(f"{where}: no time of the ceiling {row.ceiling!r}")
        for name, spread in row.seconds.items():
            top = spread.p80 if spread.p99 is None else spread.p99
            if not 0 < spread.p20 <= spread.p50 <= spread.p80 <= top:
                found.append(f"{where}: quantiles of {name!r} out of order: {spread}")
        if row.ratios != with_ratios(row).ratios:
            found.append(f"{where}: ratios do not follow from the times")
        found += [f"{where}: no time of {name!r}" for name in row.beside if name not in row.seconds]
    return found


def write(document: Document, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def read(path: Path) -> Document:
    """
    Raises:
        ResultError: no result file, one of another schema, or one that contradicts itself.
    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=Document)
    except (OSError, msgspec.DecodeError) as error:
        raise ResultError(f"{path}: {error}") from error
    if found := problems(document):
        raise ResultError(f"{path}: {found[0]}")
    return document
