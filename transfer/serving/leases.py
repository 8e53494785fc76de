"""What lookups have found and requests are about to read. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .expiring import Expiring

if TYPE_CHECKING:
    from .chunk_table import Chunk, ChunkTable

LEASE_TTL = 300.0
"""Seconds a lookup keeps its chunks: longer than a request usually waits in an engine's queue."""


class Leases:
    """One for each request; it ends by itself ``ttl`` seconds after it was put.

    Args:
        table: where the chunks are.
        ttl: seconds, > 0; may be infinite.

    Raises:
        ConfigError: a time to live that is not above 0.
    """

    def __init__(self, table: ChunkTable, ttl: float) -> None:
        self._table = table
        self._leases: Expiring[str, list[Chunk]] = Expiring(ttl, "lease_ttl")

    def __len__(self) -> int:
        return len(self._leases)

    def put(self, request: str, found: list[Chunk], now: float) -> None:
        """Hold these, and not any more what the request held before."""
        self._table.hold(found)
        self.end(request)
        if found:
            self._leases.put(request, found, now)

    def end(self, request: str) -> None:
        """Let go of what the request holds, if anything."""
        self._table.release(self._leases.pop(request) or ())

    def expire(self, now: float) -> None:
        """End those whose time is up."""
        for _, chunks in self._leases.expire(now):
            self._table.release(chunks)
