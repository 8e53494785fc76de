"""Python's garbage collector in a server: it never stops everything to look at everything.

A collection of the oldest generation looks at every chunk and every reference to one: 173 ms beside a million
of them, in which nobody is answered. Whatever the server lets go of is freed with its last reference, and
the cycles that an error or a request may leave are young, where collections go on.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEVER = 2**31 - 1  # collections of the middle generation, thousands of objects apart


@contextmanager
def young_collections_only() -> Iterator[None]:
    """Inside, the oldest generation is not collected by itself."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
