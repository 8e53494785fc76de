"""Block ids are checked on the host before anything is launched; a bad id moves no byte."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

ABSENT = -1
"""As a destination: the block that goes with it is left out. May stand in a list many times."""

IdBuffer: TypeAlias = memoryview
"""Ids as dense 32-bit integers."""

_COUNTING = np.arange(1 << 14, dtype=np.int32).data
"""0, 1, 2, ...: most ranges are parts of it."""

MANY = 64
"""Ids from which on numpy's fixed cost pays. Host of an H200, Python 3.12, 30 November 2026."""


def pack_ids(ids: Iterable[int], num_blocks: int, name: str, destination: bool) -> IdBuffer:
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
    if type(ids) is range:
        if ids.step == 1 and 0 <= ids.start <= ids.stop <= min(num_blocks, len(_COUNTING)):
            return _COUNTING[ids.start : ids.stop]
    elif type(ids) is np.ndarray:
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) >= MANY:
            return _pack_array(ids, num_blocks, name, destination)
        ids = ids.tolist()
    elif hasattr(ids, "__array__"):
        return pack_ids(_as_array(ids, name), num_blocks, name, destination)
    try:
        packed = memoryview(array("i", ids if type(ids) is list else list(ids)))
    except TypeError as error:
        raise LayoutError(f"{name}: expected integers: {error}") from error
    except OverflowError as error:
        raise LayoutError(f"{name}: expected ids below {num_blocks}: {error}") from error
    if len(packed) >= MANY:
        return _pack_array(np.frombuffer(packed, dtype=np.int32), num_blocks, name, destination)
    lowest = ABSENT if destination else 0
    if packed and (min(packed) < lowest or max(packed) >= num_blocks):
        raise _out_of_range(packed, lowest, num_blocks, name)
    if destination and len(set(packed)) != len(packed):
        _refuse_repeats(packed, name)
    return packed


def _as_array(ids: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(ids)
    except (TypeError, RuntimeError) as error:
        raise LayoutError(f"{name}: expected ids in host memory: {error}") from error


def _pack_array(
    ids: NDArray[np.integer[Any]], num_blocks: int, name: str, destination: bool
) -> IdBuffer:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise LayoutError(
            f"{name}: expected one axis of integers, got {ids.dtype} of shape {ids.shape}"
        )
    lowest = ABSENT if destination else 0
    if ids.size and not lowest <= int(ids.min()) <= int(ids.max()) < num_blocks:
        raise _out_of_range(ids.tolist(), lowest, num_blocks, name)
    if destination:
        ordered = np.sort(ids)
        if (ordered[1:] == ordered[:-1]).any():
            _refuse_repeats(ids.tolist(), name)
    return ids.astype(np.int32).data


def _refuse_repeats(ids: Sequence[int], name: str) -> None:
    seen: set[int] = set()
    for position, block in enumerate(ids):
        if block in seen and block != ABSENT:
            raise LayoutError(
                f"{name}[{position}]: block {block} named twice; "
                "the bytes written last would win and which those are is undefined"
            )
        seen.add(block)


def _out_of_range(ids: Iterable[int], lowest: int, end: int, name: str) -> LayoutError:
    position, bad = next((i, int(b)) for i, b in enumerate(ids) if not lowest <= b < end)
    return LayoutError(f"{name}[{position}]: expected {lowest} <= id < {end}, got {bad}")
