"""Which idle chunk goes first when room is needed. Pure.

A policy is told when chunks become idle and when they are no longer: held by somebody, or gone. All
calls cost O(1) a chunk, amortised. Chunks of a prefix become idle from its end, so that a prefix loses
its tail first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .chunk_table import Chunk, ChunkKey


class EvictionPolicy(Protocol):
    def add(self, chunks: Sequence[Chunk]) -> None:
        """These, each found ``hits`` times since it was stored, are idle from now on; the last of them
        shall go first."""
        ...

    def remove(self, chunks: Sequence[Chunk]) -> None:
        """These idle ones are not any more."""
        ...

    def victim(self) -> Chunk | None:
        """The next to go, which is no longer idle then; None if there is none."""
        ...

    def __iter__(self) -> Iterator[Chunk]:
        """All that are idle, more or less in the order in which they would go."""
        ...

    def __len__(self) -> int:
        """How many are idle."""
        ...

    @property
    def nbytes(self) -> int:
        """Of their slots."""
        ...


class LeastRecentlyUsed:
    """First the one that has been idle for longest."""

    def __init__(self) -> None:
        self._idle = _Queue()

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._idle)

    def __len__(self) -> int:
        return self._idle.count

    @property
    def nbytes(self) -> int:
        return self._idle.nbytes

    def add(self, chunks: Sequence[Chunk]) -> None:
        self._idle.add(chunks)

    def remove(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._idle.remove(chunk)

    def victim(self) -> Chunk | None:
        return self._idle.pop()


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
        self._small, self._main = _Queue(), _Queue()
        self._gone: OrderedDict[ChunkKey, None] = OrderedDict()
        self._most = 0  # ever idle at once: so many names are remembered

    def __iter__(self) -> Iterator[Chunk]:
        return itertools.chain(self._small, self._main)

    def __len__(self) -> int:
        return self._small.count + self._main.count

    @property
    def nbytes(self) -> int:
        return self._small.nbytes + self._main.nbytes

    def add(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks if self._gone else ():
            if chunk.key in self._gone:
                del self._gone[chunk.key]
                chunk.hits += 1
        self._small.add([chunk for chunk in chunks if not chunk.hits])
        self._main.add([chunk for chunk in chunks if chunk.hits])
        self._most = max(self._most, len(self))

    def remove(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            batch = chunk.batch
            (self._small if batch is not None and batch in self._small else self._main).remove(
                chunk
            )

    def victim(self) -> Chunk | None:
        share = self.SMALL_SHARE * self.nbytes
        if self._small.count and (self._small.nbytes > share or not self._main.count):
            chunk = self._small.pop()
            if chunk is not None:
                self._gone[chunk.key] = None
                if len(self._gone) > self._most:
                    self._gone.popitem(last=False)
            return chunk
        while (chunk := self._main.pop()) is not None:
            # The first time it was found brought it here.
            chunk.hits = min(chunk.hits, self.MOST_ROUNDS + 1) - 1
            if not chunk.hits:
                return chunk
            self._main.add([chunk])
        return None


class Batch:
    """Chunks that became idle together, of which ``live`` still are; the last goes first."""

    __slots__ = ("chunks", "live")

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks
        self.live = len(chunks)


class _Queue:
    """Chunks by when they came, together or one by one.

    Those of a prefix come and leave together, so what is linked are batches: with a link for each
    chunk, a lookup in a cache of a million would spend most of its time waiting for memory.
    """

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self._batches: OrderedDict[Batch, None] = OrderedDict()

    def __contains__(self, batch: Batch) -> bool:
        return batch in self._batches

    def __iter__(self) -> Iterator[Chunk]:
        """In the order in which :meth:`pop` gives them."""
        for batch in self._batches:
            yield from (chunk for chunk in reversed(batch.chunks) if chunk.batch is batch)

    def add(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        batch = Batch(list(chunks))
        self._batches[batch] = None
        for chunk in chunks:
            chunk.batch = batch
            self.nbytes += chunk.slot_bytes
        self.count += len(chunks)

    def remove(self, chunk: Chunk) -> None:
        batch = chunk.batch
        if batch is None:
            raise KeyError(chunk.key)
        self._take(chunk, batch)
        if batch.live * SPARSE < len(batch.chunks):
            batch.chunks = [one for one in batch.chunks if one.batch is batch]

    def pop(self) -> Chunk | None:
        """The last of the oldest batch."""
        if not self.count:
            return None
        batch = next(iter(self._batches))
        while (chunk := batch.chunks.pop()).batch is not batch:
            pass
        self._take(chunk, batch)
        return chunk

    def _take(self, chunk: Chunk, batch: Batch) -> None:
        chunk.batch = None
        batch.live -= 1
        if not batch.live:
            del self._batches[batch]
        self.count -= 1
        self.nbytes -= chunk.slot_bytes


SPARSE = 4
"""A batch of which less than one in so many chunks is left is made anew, to let go of the others."""


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
