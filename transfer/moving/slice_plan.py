"""How large the slices of a staged transfer are. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

SLICES, SLICE_BYTES = 2, 41 << 20
"""How many slices a direction has, and the most bytes of one: one is on the link while a kernel fills or
empties the other. 40 MiB are four chunks of 10 MiB, or two of 17 to 20, with room between them. The copy
engine rests 2 to 3 us between two calls and the host needs 50 to 100 us for a slice, so slices of 2, 4, 8
and 16 MiB carry 0.95, 0.97, 0.98 and 0.99 of the link, and less where the host is slow. Beside matrix
products of 1.5 ms, which a kernel waits for, they bound the rate of stores (H200, PCIe 5 x16, driver
580.159, 30 November 2026)."""

GENTLE_SLICES, GENTLE_BYTES = 2, 6 << 20
"""Of a store while the engine decodes: what the kernel wrote is still in the L2 cache when the copy engine
reads it, which spares the memory two thirds of the traffic. A decode loop is slowed by 1.020 beside such
stores, by 1.044 beside those through larger slices; but matrix products of 1.5 ms leave them 10 GB/s
(measured likewise)."""

HEAD_BYTES = 3 << 20
"""Of the first part of a store, which a kernel writes to host memory itself while the first slice is
filled: with 1 MiB, 8 MiB reach 0.89 to 0.92 of the link, with 2, 3, 4 and 6 MiB 0.90, 0.92, 0.90 and 0.90
at least (measured likewise)."""

FIRST_BYTES = 1 << 20
"""Of the slice at the end of the pipeline where one engine waits for the other: the first of a store
must be gathered before the link has anything to do, the last of a load is scattered after it."""

SECOND_BYTES = 11 << 20
"""Of the slice beside that one: its kernels, some 0.6 us a MiB and 5 to 15 us a launch, shall be over when the
link is through with the other, which takes 19 us. One chunk of 10 MiB fits; larger parts are alone in it."""

ALONE_BYTES = 1 << 20
"""Copies of a slice that are as large as this on average are queued one by one, smaller ones in one call."""

WHOLE_BYTES = 4 << 20
"""A load of at most so many is one slice: a second copy would cost the link as much as a smaller last
kernel saves, some 3 us (H200, 30 November 2026), and the host more."""

HEAD_PROGRAMS = 64
"""On the grid of the kernel that writes the first part of a store to host memory itself, with one warp
each: they keep the link full until the copy engine has something to copy."""


def part_sizes(nbytes: int, most: int, *, first: int = 0, last: int = 0) -> list[int]:
    """Sizes of the parts of a chunk: even, but small at an end of the pipeline.

    Args:
        nbytes: of the chunk.
        most: bytes of a slice.
        first, last: bytes of the part at this end of the chunk, if it is an end of the pipeline; of both
            ends the first only.
    """
    start = [min(first, most, nbytes)] if first else []
    end = [min(last, most, nbytes)] if last and not first else []
    rest = nbytes - sum(start) - sum(end)
    count = -(-rest // most)
    middle = [-(-rest // count)] * count if count else []
    return start + middle + end


def head_bytes(nbytes: int) -> int:
    """Of the first part of a store, given those of its first chunk."""
    return max(min(HEAD_BYTES, nbytes // 2), FIRST_BYTES)


def fill(
    parts: Sequence[T], size: Callable[[T], int], most: int, ramp: Sequence[int]
) -> list[list[T]]:
    """The parts in slices of at most ``most`` bytes, the first of which are full with those of ``ramp``.

    A part that is larger is alone in its slice.
    """
    slices: list[list[T]] = []
    used, room = 0, 0
    for part in parts:
        if used + size(part) > room or not slices:
            room = min(ramp[len(slices)], most) if len(slices) < len(ramp) else most
            slices.append([])
            used = 0
        slices[-1].append(part)
        used += size(part)
    return slices


def layer_ends(places: Sequence[int]) -> list[int]:
    """Layers that are stored while an engine computes them: the places with which a part of a chunk ends.

    Only the last layer is left for when the engine is done; two come in one part before it, then four,
    and so on, for every part costs the host a launch a chunk.

    Args:
        places: of all layers, rising.
    """
    return [places[-(1 << k)] for k in reversed(range(1, len(places).bit_length()))]


def layer_sizes(most: int) -> list[int]:
    """Sizes of the parts of every chunk that are loaded in the order of layers.

    The first are small, for the engine waits for layer 0; then they double up to ``most``.
    """
    sizes = [min(FIRST_BYTES, most)]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes
