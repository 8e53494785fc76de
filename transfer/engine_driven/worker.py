"""What both directions of a worker's transfers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError, LayoutError, LocalProtocolError
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


def pack_digests(digests: Sequence[bytes], *, repeats: bool = False) -> bytes:
    """As messages have them.

    Args:
        repeats: one may be there several times.

    Raises:
        LocalProtocolError: one that is no digest.
        LayoutError: one that is there twice and may not be.
    """
    for index, digest in paced(enumerate(digests)):
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
            raise LocalProtocolError(
                f"digests[{index}]: expected {DIGEST_BYTES} bytes, got {digest!r:.80}"
            )
    if not repeats and len(set(digests)) < len(digests):
        seen: set[bytes] = set()
        for index, digest in enumerate(digests):
            if digest in seen:
                raise LayoutError(f"digests[{index}]: named twice")
            seen.add(digest)
    return b"".join(digests)
