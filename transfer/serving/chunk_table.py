"""Which chunk lies in which slot, and which of them may go when room is needed. Pure.

======== ============================================ ==============================================
state    meaning                                      left by
======== ============================================ ==============================================
staged   its writer is filling it and counts as its   publish -> idle; discard -> slot free;
         holder; nobody else is offered it            clear -> unlisted
idle     resident, nobody holds it                    hold -> held; evict, clear -> slot free
held     resident, some lease or reader holds it      last release -> idle; unlist, clear -> unlisted
unlisted not found any more and never again, but      last release, publish, discard -> slot free
         somebody may still be reading the slot, or
         writing into it
======== ============================================ ==============================================

Only idle chunks are evicted, in the order of a policy. The key of an unlisted chunk may be
staged again meanwhile, in another slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .slots import SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .eviction import EvictionPolicy

ChunkKey: TypeAlias = tuple[bytes, bytes]
"""(shard id, digest)."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk; only its table and the policy change it."""

    key: ChunkKey
    offset: int
    slot_bytes: int
    holders: int = 1  # leases and reads; at first its writer
    listed: bool = True
    resident: bool = False
    hits: int = 0  # how often it was found while idle; the policy takes some away again


class ChunkTable:
    """The chunks in a capacity; all but :meth:`clear` cost O(1) amortised for each chunk named.

    Args:
        capacity_bytes: of all slots together.
        policy: has no chunks yet.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy) -> None:
        self.evicted = 0
        self.slots = SlotAllocator(capacity_bytes)
        self._listed: dict[ChunkKey, Chunk] = {}  # staged and resident
        self._idle = policy
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
            if self.slots.free_bytes + self._idle_bytes < slot_bytes or not self.evict():
                return None
        chunk = self._listed[key] = Chunk(key, offset, slot_bytes)
        return chunk

    def evict(self) -> int:
        """Let the next idle chunk go; the bytes that are free now, 0 if there is none."""
        idle = self._idle.victim()
        if idle is None:
            return 0
        self._idle_bytes -= idle.slot_bytes
        self.unlist(idle)
        self.slots.free(idle.offset)
        self.evicted += 1
        return idle.slot_bytes

    def publish(self, written: Sequence[Chunk]) -> int:
        """Their writer is done: those that are still listed can be found; how many those are."""
        for chunk in written:
            chunk.resident = True
        self.release(written)
        return sum(chunk.listed for chunk in written)

    def discard(self, written: Sequence[Chunk]) -> None:
        """Their writer gave up."""
        for chunk in written:
            self.unlist(chunk)
        self.release(written)

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """One more holder for each."""
        for chunk in chunks:
            if chunk.holders == 0:
                self._idle.remove(chunk)
                self._idle_bytes -= chunk.slot_bytes
                chunk.hits += 1
            chunk.holders += 1

    def release(self, chunks: Sequence[Chunk]) -> None:
        """One holder of each leaves; backwards, so that a prefix is evicted from its end."""
        for chunk in reversed(chunks):
            chunk.holders -= 1
            if chunk.holders:
                continue
            if chunk.listed:
                self._idle.add(chunk)
                self._idle_bytes += chunk.slot_bytes
            else:
                self.slots.free(chunk.offset)

    def unlist(self, held: Chunk) -> bool:
        """Let nobody find this chunk again; False when that was so before."""
        if not held.listed:
            return False
        held.listed = False
        del self._listed[held.key]
        return True

    def clear(self, shards: Iterable[bytes]) -> int:
        """Unlist every chunk of ``shards``, or of any when there are none; how many were resident.

        It looks at every listed chunk.
        """
        wanted = frozenset(shards)
        cleared = [c for (shard, _), c in self._listed.items() if not wanted or shard in wanted]
        self.hold(cleared)  # so that the slots of idle ones are freed by the release
        for chunk in cleared:
            self.unlist(chunk)
        self.release(cleared)
        return sum(chunk.resident for chunk in cleared)
