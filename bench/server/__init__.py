"""The cache server: what a lookup and a store cost it, and how it does under load. Needs no GPU.

Parts are chosen by title: ``--only lookup``, ``stores`` or ``load``, or anything else that a title has in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import load, lookups, stores

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.options import Options
    from bench.results import Row

PARTS: dict[str, Callable[[Options], list[Row]]] = {
    lookups.PART: lookups.run,
    stores.PART: stores.run,
    load.PART: load.run,
}


def run(options: Options) -> list[Row]:
    """Measure every part, printing each row as it is done."""
    return [row for part in PARTS.values() for row in part(options)]
