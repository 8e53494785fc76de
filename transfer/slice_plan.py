"""How large the slices of a staged transfer are. Pure."""

from __future__ import annotations

SLICE_BYTES = 16 << 20
"""Most bytes of a slice. Between two copies the copy engine rests some 2 us, so slices of 2, 4, 8
and 16 MiB carry 0.95, 0.97, 0.98 and 0.99 of the link (H200, PCIe 5 x16, driver 580.159, 30 November
2026)."""

SLICES = 3
"""Slices a direction: one on the link, one at the kernel, one between them."""

FIRST_BYTES = 1 << 20
"""Of the slice at the end of the pipeline where one engine waits for the other: the first of a store
must be gathered before the link has anything to do, the last of a load is scattered after it."""


def slice_sizes(nbytes: int, most: int, *, small_first: bool, small_last: bool) -> list[int]:
    """Sizes of the slices of a chunk of ``nbytes``: even, but small at an end of the pipeline.

    Args:
        most: bytes of a slice.
        small_first, small_last: this end of the chunk is an end of the pipeline.
    """
    small = min(FIRST_BYTES, most, nbytes)
    first = [small] if small_first else []
    last = [small] if small_last and not small_first else []
    rest = nbytes - sum(first) - sum(last)
    count = -(-rest // most)
    middle = [-(-rest // count)] * count if count else []
    return first + middle + last


def layer_sizes(most: int) -> list[int]:
    """Sizes of the parts of every chunk that are loaded in the order of layers.

    The first are small, for the engine waits for layer 0; then they double up to ``most``.
    """
    sizes = [min(FIRST_BYTES, most)]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes
