"""What every back end does with the arguments of a call: check them, cut them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_kernels.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.tiering.tier import Place

ID_BYTES = 32
"""Of a shard id, and of a digest."""


def check_keys(keys: Sequence[ChunkKey], places: Sequence[Place] | None = None) -> None:
    """
    Raises:
        LocalProtocolError: ids of another length, or not a place for each key.
    """
    for shard, digest in keys:
        if len(shard) != ID_BYTES or len(digest) != ID_BYTES:
            raise LocalProtocolError(
                f"chunk key: expected ids of {ID_BYTES} bytes, got {len(shard)} and {len(digest)}"
            )
    if places is not None and len(places) != len(keys):
        raise LocalProtocolError(f"places: expected {len(keys)}, got {len(places)}")


def check_shards(shards: Sequence[bytes]) -> None:
    """
    Raises:
        LocalProtocolError: ids of another length.
    """
    for shard in shards:
        if len(shard) != ID_BYTES:
            raise LocalProtocolError(f"shard id: expected {ID_BYTES} bytes, got {len(shard)}")


def batches(places: Sequence[Place], most_bytes: int, most: int) -> Iterator[range]:
    """Positions, in order, in batches of one place or of at most so many bytes and places."""
    first = nbytes = 0
    for position, place in enumerate(places):
        if position > first and (nbytes + len(place) > most_bytes or position - first == most):
            yield range(first, position)
            first, nbytes = position, 0
        nbytes += len(place)
    if places:
        yield range(first, len(places))


def names_in_batches(prefix: str, keys: Sequence[ChunkKey], most: int) -> list[list[str]]:
    """What the chunks are called where names are texts: the prefix and both ids in hex."""
    names = [f"{prefix}{shard.hex()}{digest.hex()}" for shard, digest in keys]
    return [names[first : first + most] for first in range(0, len(names), most)]
