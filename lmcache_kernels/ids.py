"""Block ids are checked on the host before anything is launched; a bad id moves no byte."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

ABSENT = -1
"""As a destination: the block that goes with it is left out. May stand in a list many times."""

IdBuffer: TypeAlias = memoryview
"""Ids as dense 32-bit integers."""

_COUNTING = np.arange(1 << 14, dtype=np.int32).data
"""0, 1, 2, ...: ranges are parts of it."""

MANY = 64
"""Ids from which on numpy's fixed cost pays. Host of an H200, Python 3.12, 30 November 2026."""


def pack_ids(
    ids: Iterable[int], num_blocks: int, *, name: str, destination: bool = False
) -> IdBuffer:
    """Check the block ids of one side of a copy and make them 32-bit.

    Args:
        ids: integers: any iterable; cheapest are a range, a list and a numpy array.
        num_blocks: blocks that exist on that side.
        name: what to call the ids in a message.
        destination: refuse repeats, because two blocks written to one place have no defined
            winner; allow :data:`ABSENT`.

    Raises:
        LayoutError: something that is no integer, an id below 0 or not below ``num_blocks``, or a
            repeat where none may be.
    """
    lowest = ABSENT if destination else 0
    end = min(num_blocks, 1 << 31)
    if isinstance(ids, range):
        if ids and not lowest <= min(ids[0], ids[-1]) <= max(ids[0], ids[-1]) < end:
            raise _out_of_range(ids, lowest, end, name)
        if ids.step == 1 and 0 <= ids.start <= ids.stop <= len(_COUNTING):
            return _COUNTING[ids.start : ids.stop]
        return np.arange(ids.start, ids.stop, ids.step, dtype=np.int32).data
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise LayoutError(
                f"{name}: expected one axis of integers, got {ids.dtype} of shape {ids.shape}"
            )
        if len(ids) >= MANY:
            if not lowest <= int(ids.min()) <= int(ids.max()) < end:
                raise _out_of_range(ids, lowest, end, name)
            return _unless_repeated(ids.astype(np.int32).data, destination, name)
        ids = ids.tolist()
    elif not isinstance(ids, (list, tuple)):
        ids = list(ids)
    try:
        packed = memoryview(array("i", ids))
        within = not ids or (lowest <= min(ids) and max(ids) < end)
    except TypeError as error:
        raise LayoutError(f"{name}: expected integers: {error}") from error
    except OverflowError:
        within = False
    if not within:
        raise _out_of_range(ids, lowest, end, name)
    return _unless_repeated(packed, destination, name)


def check_pairing(dst_ids: IdBuffer, src_ids: IdBuffer) -> None:
    """Raise LayoutError unless every destination block has exactly one source block."""
    if len(dst_ids) != len(src_ids):
        raise LayoutError(
            f"ids: expected as many destination as source blocks, "
            f"got {len(dst_ids)} and {len(src_ids)}"
        )


def _unless_repeated(packed: IdBuffer, destination: bool, name: str) -> IdBuffer:
    if not destination:
        return packed
    if len(packed) < MANY:
        differ = len(set(packed)) == len(packed)
    else:
        ordered = np.sort(np.frombuffer(packed, dtype=np.int32))
        differ = not (ordered[1:] == ordered[:-1]).any()
    if differ:
        return packed
    seen: set[int] = set()
    for position, block in enumerate(packed):
        if block in seen and block != ABSENT:
            raise LayoutError(
                f"{name}[{position}]: block {block} named twice; "
                "the bytes written last would win and which those are is undefined"
            )
        seen.add(block)
    return packed


def _out_of_range(ids: Iterable[int], lowest: int, end: int, name: str) -> LayoutError:
    position, bad = next((i, int(b)) for i, b in enumerate(ids) if not lowest <= b < end)
    return LayoutError(f"{name}[{position}]: expected 0 <= id < {end}, got {bad}")
