"""What both directions of a worker's transfers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError, LocalProtocolError
from lmcache_kernels.transfer.messages import DIGEST_BYTES
from lmcache_kernels.transfer.pacing import paced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from lmcache_kernels.chunk_layout import ChunkLayout
    from lmcache_kernels.plane import CacheGroup
    from lmcache_kernels.transfer.moving.moves import Mover

    from .registration import Registration

DEVICE_TIMEOUT = 60.0
"""Seconds after which queued device work counts as lost; 60 s of link is 3 TB."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Attributes:
    instance: its id.
    groups, layout: its cache, and the chunks of it.
    server: its standing with the cache server.
    mover: moves chunks; one thread for each direction.
    span: makes a range for profilers, of a name.
    """

    instance: int
    groups: Sequence[CacheGroup]
    layout: ChunkLayout
    server: Registration
    mover: Mover
    span: Callable[[str], AbstractContextManager[Any]]


def shard_of(shard: Callable[[ChunkLayout], bytes], layout: ChunkLayout) -> bytes:
    """What the function that names a worker's slice of the model makes of the layout.

    Raises:
        ConfigError: no function, or one that returns no shard id.
    """
    found = shard(layout) if callable(shard) else shard
    if not callable(shard) or not isinstance(found, bytes) or len(found) != DIGEST_BYTES:
        raise ConfigError(
            f"shard: expected a function that returns {DIGEST_BYTES} bytes, as shard_id does, "
            f"got {found!r:.80}"
        )
    return found


def pack_digests(digests: Sequence[bytes]) -> bytes:
    """As messages have them.

    Raises:
        LocalProtocolError: one that is no digest.
    """
    for index, digest in paced(enumerate(digests)):
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
            raise LocalProtocolError(
                f"digests[{index}]: expected {DIGEST_BYTES} bytes, got {digest!r:.80}"
            )
    return b"".join(digests)
