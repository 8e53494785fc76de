"""How many chunks of a long transfer the device is given at a time. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

FIRST_CHUNKS = 4
"""Of the first batch; each has twice as many as the one before it."""

LEAST_BYTES = 4 << 20
"""Of a chunk. A chunk takes the host 15 to 50 us, in which the link carries up to 3 MB: while a batch of larger
ones is on the link, the next one, twice as long, is made ready. Smaller ones would only pay for more
batches."""


def batches(items: Sequence[T], chunk_bytes: int) -> Iterator[Sequence[T]]:
    """The items, one a chunk, so many at a time.

    So the link has something to do after the first few of hundreds were looked at.

    Args:
        chunk_bytes: of each.
    """
    start, count = 0, FIRST_CHUNKS if chunk_bytes >= LEAST_BYTES else len(items)
    while start < len(items):
        yield items[start : start + count]
        start += count
        count *= 2
