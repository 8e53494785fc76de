"""What was stored in the arena goes down to the tiers, behind everybody's back.

Chunks wait as names only, so waiting keeps nothing in the arena: one that is evicted before its turn is
just not written. Those being written are held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lmcache_kernels.errors import RemoteProtocolError
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES, payload_bytes_of, read_header
from lmcache_kernels.transfer.serving.store import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.serving.store import ChunkStore

    from .link import TierLink

WRITER = TIERS - 1
"""Owner of what is being written."""

MOST_WAITING = 1 << 17
"""Names that wait for one tier; of more, the oldest are given up. About 30 MB."""

BATCH_BYTES = 32 << 20
BATCH_CHUNKS = 256

ARENA_PART = 1 / 32
"""Of the arena, what one batch may hold at most: nobody can have that memory meanwhile."""

BATCHES_UNDER_WAY = 2
"""Of one tier: the next is there when one is over."""


@dataclass(eq=False)
class _Queue:
    link: TierLink
    waiting: deque[ChunkKey] = field(default_factory=deque)
    under_way: int = 0


class WriteBack:
    """Everything here is for the service's thread.

    Args:
        store: whose chunks are written.
        arena: where its slots are.
        links: the tiers.
    """

    def __init__(self, store: ChunkStore, arena: Arena, links: Sequence[TierLink]) -> None:
        self._store = store
        self._arena = arena
        self._queues = [_Queue(link) for link in links]
        self._batch_bytes = min(BATCH_BYTES, ARENA_PART * arena.nbytes)

    @property
    def over(self) -> bool:
        """Everything is written that can be: a tier that is away takes nothing."""
        return all(
            not queue.under_way and (not queue.waiting or queue.link.away) for queue in self._queues
        )

    @property
    def waiting(self) -> int:
        """Chunks, once for each tier that they wait for."""
        return sum(len(queue.waiting) for queue in self._queues)

    def add(self, keys: Iterable[ChunkKey], now: float, levels: int | None = None) -> None:
        """Write them to the first so many tiers, to all if no number is given."""
        keys = list(keys)
        for queue in self._queues[:levels]:
            queue.waiting.extend(keys)
            while len(queue.waiting) > MOST_WAITING:
                queue.waiting.popleft()
                queue.link.counters.skipped += 1
        self.go_on(now)

    def forget(self, shards: frozenset[bytes]) -> None:
        """What waits of these shards, or of all if none is named, is not to be written any more."""
        for queue in self._queues:
            kept = [key for key in queue.waiting if shards and key[0] not in shards]
            queue.waiting = deque(kept)

    def go_on(self, now: float) -> None:
        """Begin what can be begun; also after a pause of a tier that was away."""
        for queue in self._queues:
            while queue.waiting and queue.under_way < BATCHES_UNDER_WAY:
                if not queue.link.may_try(now) or not self._write(queue, now):
                    break

    def _write(self, queue: _Queue, now: float) -> bool:
        """Begin a batch; False if nothing was left to write."""
        chosen: dict[ChunkKey, int] = {}
        nbytes = 0
        while queue.waiting and len(chosen) < BATCH_CHUNKS and nbytes < self._batch_bytes:
            key = queue.waiting.popleft()
            slot_bytes = self._store.slot_bytes(key)
            if slot_bytes is None:
                queue.link.counters.skipped += 1
            else:
                chosen[key] = slot_bytes
                nbytes += slot_bytes
        if not chosen:
            return False
        held = self._store.hold(WRITER, list(chosen), now)
        keys, places = [], []
        for (key, slot_bytes), offset in zip(chosen.items(), held.offsets, strict=True):
            place = self._place(key, offset, slot_bytes)
            if place is not None:
                keys.append(key)
                places.append(place)
        queue.under_way += 1
        queue.link.put_from(keys, places, now, partial(self._written, queue, keys, held.ticket))
        return True

    def _place(self, key: ChunkKey, offset: int, slot_bytes: int) -> memoryview | None:
        """The bytes to write; None if the slot does not hold the chunk that it should."""
        view = self._arena.view(offset, slot_bytes)
        try:
            payload_bytes = payload_bytes_of(view)
            if HEADER_BYTES + payload_bytes > slot_bytes:
                return None
            read_header(view, *key, payload_bytes)
        except RemoteProtocolError:
            return None
        return view[: HEADER_BYTES + payload_bytes]

    def _written(
        self, queue: _Queue, keys: list[ChunkKey], ticket: int, kept: list[bool], now: float
    ) -> None:
        queue.under_way -= 1
        gone = self._store.let_go(WRITER, ticket, now)
        stale = [key for key in gone if key in set(keys)]  # cleared or found damaged meanwhile
        if stale:
            queue.link.remove(stale, now, lambda done, now: None)
        self.go_on(now)
