"""Which idle chunk goes first when room is needed. Pure.

A policy is told when a chunk becomes idle and when it is no longer: held by somebody, or gone. All
calls cost O(1), amortised for :meth:`victim`. Chunks of a prefix become idle from its end, so that a
prefix loses its tail first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .chunk_table import Chunk, ChunkKey


class EvictionPolicy(Protocol):
    def add(self, chunk: Chunk) -> None:
        """The chunk, found ``chunk.hits`` times since it was stored, is idle from now on."""
        ...

    def remove(self, chunk: Chunk) -> None:
        """An idle one is not any more."""
        ...

    def victim(self) -> Chunk | None:
        """The next to go, which is no longer idle then; None if there is none."""
        ...

    def __len__(self) -> int:
        """How many are idle."""
        ...


class LeastRecentlyUsed:
    """First the one that has been idle for longest."""

    def __init__(self) -> None:
        self._idle: OrderedDict[ChunkKey, Chunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, chunk: Chunk) -> None:
        self._idle[chunk.key] = chunk

    def remove(self, chunk: Chunk) -> None:
        del self._idle[chunk.key]

    def victim(self) -> Chunk | None:
        return self._idle.popitem(last=False)[1] if self._idle else None


class S3Fifo:
    """Chunks that nobody has found since they were stored go before those that somebody has.

    S3-FIFO (Yang et al., SOSP 2023) with three queues: new chunks wait in a small one, found ones in
    the main one, and of those that went unfound the names are remembered, so that one that is stored
    again soon counts as found. A main chunk gets another round for each further time it was found, up
    to three. So prompts that are never repeated push out each other and not the prefixes that are
    shared. Differently from the paper, chunks in use are in no queue, and come back at its end.
    """

    SMALL_SHARE = 0.1
    """Of the bytes of all idle chunks, what new ones may take before they go first."""

    MOST_ROUNDS = 3

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, Chunk] = OrderedDict()
        self._main: OrderedDict[ChunkKey, Chunk] = OrderedDict()
        self._gone: OrderedDict[ChunkKey, None] = OrderedDict()
        self._small_bytes = self._main_bytes = 0
        self._most = 0  # ever idle at once: so many names are remembered

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def add(self, chunk: Chunk) -> None:
        if chunk.key in self._gone:
            del self._gone[chunk.key]
            chunk.hits += 1
        if chunk.hits:
            self._main[chunk.key] = chunk
            self._main_bytes += chunk.slot_bytes
        else:
            self._small[chunk.key] = chunk
            self._small_bytes += chunk.slot_bytes
        self._most = max(self._most, len(self))

    def remove(self, chunk: Chunk) -> None:
        if self._small.pop(chunk.key, None) is not None:
            self._small_bytes -= chunk.slot_bytes
        else:
            del self._main[chunk.key]
            self._main_bytes -= chunk.slot_bytes

    def victim(self) -> Chunk | None:
        share = self.SMALL_SHARE * (self._small_bytes + self._main_bytes)
        if self._small and (self._small_bytes > share or not self._main):
            key, chunk = self._small.popitem(last=False)
            self._small_bytes -= chunk.slot_bytes
            self._gone[key] = None
            if len(self._gone) > self._most:
                self._gone.popitem(last=False)
            return chunk
        while self._main:
            key, chunk = self._main.popitem(last=False)
            # The first time it was found brought it here.
            chunk.hits = min(chunk.hits, self.MOST_ROUNDS + 1) - 1
            if not chunk.hits:
                self._main_bytes -= chunk.slot_bytes
                return chunk
            self._main[key] = chunk
        return None


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "s3fifo": S3Fifo}
"""By the names that a configuration gives them."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """When chunks go, and which.

    Attributes:
        policy: a name in :data:`POLICIES`.
        watermark: of the capacity, what may be used before some is freed ahead of need. At 1, room is
            made only when it is needed, which costs a store a microsecond or two a chunk; so nothing
            goes that could still have been found.
        ratio: of the capacity, how much is freed then.

    Raises:
        ConfigError: no such policy, or a number out of its range.
    """

    policy: str = "lru"
    watermark: float = 1.0
    ratio: float = 0.2

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"eviction policy: expected one of {', '.join(POLICIES)}, got {self.policy!r}"
            )
        for name, value in (("watermark", self.watermark), ("ratio", self.ratio)):
            if not 0 < value <= 1:
                raise ConfigError(f"eviction {name}: expected 0 < {name} <= 1, got {value}")
