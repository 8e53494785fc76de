"""Which chunks a lookup finds: as many as are there for every shard, and of each shard what it needs.

A shard without a window needs all chunks of a hit. One with a window of w chunks (its layers attend no
further back) needs the last w, and those before may be gone. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .chunk_table import ChunkKey

T = TypeVar("T")

NO_WINDOW = 0
"""The window of a shard that needs everything."""


class Places(Protocol[T]):
    """Where chunks may be: a :class:`~.chunk_table.ChunkTable`, or all that can be reached from there."""

    def prefix(self, shard: bytes, digests: Sequence[bytes]) -> list[T]:
        """The chunks of a shard, from the first digest on until one is not there."""
        ...

    def resident(self, key: ChunkKey) -> T | None:
        """The chunk, if it is there."""
        ...


@dataclass(frozen=True)
class Hit(Generic[T]):
    """The first ``count`` chunks are a hit; of each shard, what it needs of them, the last one last."""

    count: int
    columns: list[list[T]]

    def chunks(self) -> list[T]:
        """Digest by digest, so that all shards lose the end of a prefix together."""
        padded: list[list[T | None]] = [
            [None] * (self.count - len(column)) + column for column in self.columns
        ]
        return [chunk for row in zip(*padded, strict=True) for chunk in row if chunk is not None]


def find(
    places: Places[T],
    shards: Sequence[bytes],
    digests: Sequence[bytes],
    windows: Sequence[int] = (),
) -> Hit[T]:
    """The longest hit; O(1) amortised for each digest and shard.

    Args:
        windows: of each shard, in chunks, or :data:`NO_WINDOW`; nothing: no shard has one.
    """
    columns: list[list[T]] = [[] for _ in shards]
    tails: dict[int, _Tail[T]] = {}
    count = len(digests)
    for number, shard in enumerate(shards):
        if windows and windows[number] != NO_WINDOW:
            tails[number] = _Tail(places, shard, digests, windows[number])
        else:
            columns[number] = places.prefix(shard, digests[:count])
            count = len(columns[number])
    agreed = None
    while agreed != count:
        agreed = count
        for tail in tails.values():
            count = tail.fit(count)
    for number in range(len(shards)):
        columns[number] = (
            tails[number].needed(count) if number in tails else columns[number][:count]
        )
    return Hit(count, columns)


class _Tail(Generic[T]):
    """The end of hits in a shard with a window. Looks at a digest at most once."""

    def __init__(
        self, places: Places[T], shard: bytes, digests: Sequence[bytes], window: int
    ) -> None:
        self._places = places
        self._shard = shard
        self._digests = digests
        self._window = window
        self._found: dict[int, T] = {}
        self._begin = len(digests)  # from here on all was looked at that a hit may need

    def fit(self, count: int) -> int:
        """The longest hit of at most ``count`` chunks, no longer than at the call before."""
        self._begin = min(self._begin, count)
        while self._begin > max(0, count - self._window):
            self._begin -= 1
            chunk = self._places.resident((self._shard, self._digests[self._begin]))
            if chunk is None:
                count = self._begin
            else:
                self._found[self._begin] = chunk
        return count

    def needed(self, count: int) -> list[T]:
        """Of a hit of ``count`` chunks, which must fit."""
        return [self._found[index] for index in range(max(0, count - self._window), count)]
