"""Block ids are checked on the host before anything is launched; a bad id moves no byte."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from .errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def as_ids(ids: Iterable[int], *, name: str) -> Sequence[int]:
    """The ids as a sequence of plain integers.

    Raises:
        LayoutError: something among them that is no integer.
    """
    if isinstance(ids, range):
        return ids
    try:
        return [*map(operator.index, ids)]
    except TypeError as error:
        raise LayoutError(f"{name}: expected integers: {error}") from error


def check_ids(ids: Sequence[int], num_blocks: int, *, name: str, unique: bool = False) -> None:
    """Check block ids of one side of a copy.

    Args:
        ids: block ids, any length.
        num_blocks: blocks that exist on that side.
        name: what to call the ids in a message.
        unique: refuse repeats, because two blocks written to one place have no defined winner.

    Raises:
        LayoutError: an id below 0 or not below ``num_blocks``, or a repeat where none may be.
    """
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= num_blocks:
        bad = low if low < 0 else high
        position = next(i for i, block in enumerate(ids) if block == bad)
        raise LayoutError(f"{name}[{position}]: expected 0 <= id < {num_blocks}, got {bad}")
    if unique and len(set(ids)) != len(ids):
        seen: set[int] = set()
        for position, block in enumerate(ids):
            if block in seen:
                raise LayoutError(
                    f"{name}[{position}]: block {block} named twice; "
                    "the bytes written last would win and which those are is undefined"
                )
            seen.add(block)


def check_pairing(dst_ids: Sequence[int], src_ids: Sequence[int]) -> None:
    """Raise LayoutError unless every destination block has exactly one source block."""
    if len(dst_ids) != len(src_ids):
        raise LayoutError(
            f"ids: expected as many destination as source blocks, "
            f"got {len(dst_ids)} and {len(src_ids)}"
        )
