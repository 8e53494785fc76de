"""Which chunk lies in which slot, and which of them may go when room is needed. Pure.

======== ============================================ ==============================================
state    meaning                                      left by
======== ============================================ ==============================================
staged   its writer is filling it; nobody else is     publish -> idle; discard -> slot free
         offered it
idle     resident, nobody holds it                    hold -> held; evict, drop_idle -> slot free
held     resident, some lease or reader holds it      last release -> idle; unlist -> unlisted
unlisted not found any more, but somebody may still   last release -> slot free
         be reading the slot
======== ============================================ ==============================================

Only idle chunks are evicted, the least recently released first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .slots import SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ChunkKey: TypeAlias = tuple[bytes, bytes]
"""(shard id, digest)."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk; only its table changes it."""

    key: ChunkKey
    offset: int
    slot_bytes: int
    resident: bool = False
    holders: int = 0


class ChunkTable:
    """The chunks in a capacity; every operation costs O(1) amortised a chunk.

    Args:
        capacity_bytes: of all slots together.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.evicted = 0
        self.slots = SlotAllocator(capacity_bytes)
        self._listed: dict[ChunkKey, Chunk] = {}  # staged and resident
        self._idle: OrderedDict[ChunkKey, Chunk] = OrderedDict()  # first to go first
        self._idle_bytes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        """Is the chunk staged or resident?"""
        return key in self._listed

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def resident(self, key: ChunkKey) -> Chunk | None:
        chunk = self._listed.get(key)
        return chunk if chunk is not None and chunk.resident else None

    def stage(self, key: ChunkKey, nbytes: int) -> Chunk | None:
        """A slot of ``nbytes`` for a chunk that is not listed; None when eviction makes no room."""
        slot_bytes = self.slots.round_up(nbytes)
        while (offset := self.slots.allocate(nbytes)) is None:
            if not self._idle or self.slots.free_bytes + self._idle_bytes < slot_bytes:
                return None
            self._drop_first()
            self.evicted += 1
        chunk = self._listed[key] = Chunk(key, offset, slot_bytes)
        return chunk

    def publish(self, staged: Sequence[Chunk]) -> None:
        for chunk in staged:
            chunk.resident = True
        self.hold(staged)
        self.release(staged)

    def discard(self, staged: Iterable[Chunk]) -> None:
        for chunk in staged:
            del self._listed[chunk.key]
            self.slots.free(chunk.offset)

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """One more holder for each."""
        for chunk in chunks:
            if chunk.holders == 0 and self._idle.pop(chunk.key, None) is not None:
                self._idle_bytes -= chunk.slot_bytes
            chunk.holders += 1

    def release(self, chunks: Sequence[Chunk]) -> None:
        """One holder of each leaves; backwards, so that a prefix is evicted from its end."""
        for chunk in reversed(chunks):
            chunk.holders -= 1
            if chunk.holders:
                continue
            if self._listed.get(chunk.key) is chunk:
                self._idle[chunk.key] = chunk
                self._idle_bytes += chunk.slot_bytes
            else:
                self.slots.free(chunk.offset)

    def unlist(self, held: Chunk) -> bool:
        """Let nobody find this chunk again; False when that was so before."""
        if self._listed.get(held.key) is not held:
            return False
        del self._listed[held.key]
        return True

    def drop_idle(self) -> int:
        """Drop every idle chunk; how many there were."""
        count = len(self._idle)
        while self._idle:
            self._drop_first()
        return count

    def _drop_first(self) -> None:
        key, chunk = self._idle.popitem(last=False)
        self._idle_bytes -= chunk.slot_bytes
        del self._listed[key]
        self.slots.free(chunk.offset)
