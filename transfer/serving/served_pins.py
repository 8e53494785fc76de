"""The requests that keep chunks for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_kernels.errors import CapacityError
from lmcache_kernels.transfer.messages import Done, Found

from .request_checks import (
    RefusedError,
    check_name,
    check_pin_seconds,
    checked_digests,
    unique_shards,
)

if TYPE_CHECKING:
    from lmcache_kernels.transfer.messages import Pin, Reply, Unpin

    from .store import ChunkStore


class ServedPins:
    """Serves them.

    Args:
        store: the service's.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def pin(self, request: Pin, now: float) -> Reply:
        check_name(request.pin, "pin")
        check_pin_seconds(request.seconds)
        shards = unique_shards(request.shards)
        digests = checked_digests(request.digests)
        try:
            count = self._store.pin(request.pin, shards, digests, request.seconds, now)
        except CapacityError as error:
            raise RefusedError("busy", str(error)) from error
        return Found(chunks=count)

    def unpin(self, request: Unpin, now: float) -> Reply:
        check_name(request.pin, "pin")
        self._store.unpin(request.pin)
        return Done()
