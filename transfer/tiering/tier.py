"""What a place below the arena can do: keep chunks, find them again, copy them in and out.

A tier keeps whole slots, header and payload, under the name of their chunk. Servers may share one; then
each finds what the others stored. A tier may lose a chunk whenever it likes and may be away for any
time: both are misses. It never gives out anything but the bytes that were put.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey

Place: TypeAlias = memoryview
"""The bytes of one slot in the arena: contiguous, writable, one-dimensional, format ``B``. They stay
where they are for the length of the call."""


class Tier(Protocol):
    """Batched, blocking, for several threads at once.

    Every call ends within a small multiple of a time that the tier is told when it is made; chunks
    for which there was none left are not there, or not kept. It raises
    :class:`~lmcache_kernels.errors.TierUnavailable`, never anything else, if the tier as a whole
    cannot be used, and may work again the next time. What concerns a single chunk is answered for that
    chunk. Ids that are not 32 bytes long are a :class:`~lmcache_kernels.errors.LocalProtocolError`
    before anything happens. Lists that are returned are as long as ``keys``, which never repeat
    themselves within a call.
    """

    name: str
    """One short word, for metrics and logs: ``files``, ``valkey``, ``mooncake``."""

    def attach(self, arena: memoryview) -> None:
        """All places will lie in here, as long as the tier is open; called once, before the others.

        A tier that is away is no error here: the calls that follow are.
        """
        ...

    def exists(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which chunks are here, as far as can be told without reading them."""
        ...

    def get_into(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        """Copy each chunk to its place; True where all of it is there, exactly as long as the place.

        Elsewhere the place holds anything: the chunk is not here, has another length or is damaged.
        """
        ...

    def put_from(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        """Keep a copy of each place; True where the chunk is here now, also if it was before.

        A chunk is seen by others whole or not at all.
        """
        ...

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Forget these; those that are not here are fine."""
        ...

    def clear(self, shards: Sequence[bytes]) -> None:
        """Forget every chunk of these shards; of any shard if none is named.

        May look at all there is, and take as long.
        """
        ...

    def stats(self) -> dict[str, int]:
        """Gauges of the tier's own, such as ``used_bytes``; empty if it knows none. Never blocks."""
        ...

    def close(self) -> None:
        """Release everything; bounded, idempotent. Calls under way in other threads end as they can,
        later ones raise :class:`~lmcache_kernels.errors.TierUnavailable`."""
        ...
