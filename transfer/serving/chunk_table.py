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

Only idle chunks are evicted, in the order of a policy; whose, :mod:`.accounts` says. The key of an
unlisted chunk may be staged again meanwhile, in another slot.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .accounts import Accounts
from .eviction import POLICIES
from .slots import SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .accounts import Account, Pool
    from .eviction import Batch, Eviction
    from .quotas import Quotas

MOST_EVICTED = 1 << 12
"""Chunks that are evicted ahead of need in one go: some ten milliseconds, in which others wait."""

ChunkKey: TypeAlias = tuple[bytes, bytes]
"""(shard id, digest)."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk; only its table and the policy change it."""

    key: ChunkKey
    offset: int
    slot_bytes: int
    account: Account
    holders: int = 1  # leases and reads; at first its writer
    listed: bool = True
    resident: bool = False
    hits: int = 0  # how often it was found while idle; the policy takes some away again
    batch: Batch | None = None  # the policy's: with whom it became idle
    follower: Chunk | None = None  # what was found behind it last; only a guess
    nbytes: int = 0  # that the slot was asked for


class ChunkState(NamedTuple):
    """What can be told of a chunk: ``nbytes`` of its slot, ``holders`` that use it, ``hits`` since it was
    stored, as far as the policy remembers; whether it can be found."""

    shard: bytes
    digest: bytes
    nbytes: int
    holders: int
    hits: int
    resident: bool


class ChunkTable:
    """The chunks in a capacity; all but :meth:`clear` cost O(1) amortised for each chunk named.

    Args:
        capacity_bytes: of all slots together.
        eviction: when idle chunks go, and which.
        quotas: of tenants, to begin with.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, capacity_bytes: int, eviction: Eviction, quotas: Quotas) -> None:
        self.evicted = self.evicted_bytes = 0
        self.accounts = Accounts(POLICIES[eviction.policy], quotas)
        self._eviction = eviction
        self.slots = SlotAllocator(capacity_bytes)
        # Staged and resident, by the first byte of the digest: a dict that grows is copied, and with
        # all in one that would take a tenth of a second.
        self._listed: list[dict[ChunkKey, Chunk]] = [{} for _ in range(256)]

    def __contains__(self, key: ChunkKey) -> bool:
        """Is the chunk staged or resident?"""
        return key in self._listed[key[1][0]]

    def __len__(self) -> int:
        return sum(map(len, self._listed))

    def resident(self, key: ChunkKey) -> Chunk | None:
        chunk = self._listed[key[1][0]].get(key)
        return chunk if chunk is not None and chunk.resident else None

    def some(self, first: int, most: int) -> list[ChunkState]:
        """Chunks in an order that stays while nothing comes or goes, from number ``first`` on, ``most``
        of them."""
        every = itertools.chain.from_iterable(part.values() for part in self._listed)
        some = itertools.islice(every, first, first + most)
        return [ChunkState(*c.key, c.slot_bytes, c.holders, c.hits, c.resident) for c in some]

    def prefix(self, shard: bytes, digests: Sequence[bytes]) -> list[Chunk]:
        """The resident chunks of a shard, from the first digest on until one is not.

        Where a prefix was found before, each chunk leads to the next, and that is all that a lookup
        touches: in a cache of a million every look at a table is a wait for memory.
        """
        found: list[Chunk] = []
        listed, before = self._listed, None
        for digest in digests:
            chunk = None if before is None else before.follower
            if chunk is None or chunk.key != (shard, digest) or not chunk.listed:
                chunk = listed[digest[0]].get((shard, digest))
                if chunk is None:
                    break
                if before is not None:
                    before.follower = chunk
            if not chunk.resident:
                break
            found.append(chunk)
            before = chunk
        return found

    def link(self, written: Sequence[Chunk]) -> None:
        """They are likely to be looked up in this order."""
        for before, chunk in itertools.pairwise(written):
            if before.listed:
                before.follower = chunk

    def stage(self, key: ChunkKey, nbytes: int, account: Account) -> Chunk | None:
        """A slot of ``nbytes`` for a chunk that is not listed; None when eviction makes no room.

        An account at its quota makes room among its own chunks alone. Where the capacity is used up,
        chunks of the pool of the most idle bytes go, whoever asks.
        """
        slot_bytes = self.slots.round_up(nbytes)
        while account.room < slot_bytes:
            idle_bytes = account.pool.policy.nbytes
            if account.room + idle_bytes < slot_bytes or not self._evict_from(account.pool):
                return None
        while (offset := self.slots.allocate(nbytes)) is None:
            free_bytes = self.slots.free_bytes + self.accounts.idle_bytes
            if free_bytes < slot_bytes or not self.evict():
                return None
        chunk = Chunk(key, offset, slot_bytes, account, nbytes=nbytes)
        self._listed[key[1][0]][key] = chunk
        self.accounts.charge(account, slot_bytes)
        return chunk

    def evict(self) -> int:
        """Let the next idle chunk go; the bytes that are free now, 0 if there is none."""
        return self._evict_from(self.accounts.fullest())

    def change(self, watermark: float, ratio: float) -> None:
        """Make room ahead of need like this from now on; see :class:`.eviction.Eviction`."""
        self._eviction = replace(self._eviction, watermark=watermark, ratio=ratio)

    def make_room(self) -> None:
        """Let go of what accounts have above their quotas, and ahead of need if so much is used."""
        self._evict_above_quotas(MOST_EVICTED)
        watermark, capacity = self._eviction.watermark, self.slots.capacity_bytes
        if watermark == 1 or self.slots.used_bytes < watermark * capacity:
            return
        wanted = self._eviction.ratio * capacity
        for _ in range(MOST_EVICTED):
            freed = self.evict()
            wanted -= freed
            if not freed or wanted <= 0:
                return

    def _evict_above_quotas(self, most: int) -> None:
        """At most so many chunks; or so many accounts are looked at."""
        for account in self.accounts.above_quota(most):
            if most <= 0:
                return
            while most > 0 and account.room < 0 and self._evict_from(account.pool):
                most -= 1
            self.accounts.looked_at(account)
            most -= 1

    def _evict_from(self, pool: Pool) -> int:
        idle = self.accounts.victim(pool)
        if idle is None:
            return 0
        self.unlist(idle)
        self._free(idle)
        self.evicted += 1
        self.evicted_bytes += idle.nbytes
        return idle.slot_bytes

    def _free(self, chunk: Chunk) -> None:
        self.slots.free(chunk.offset)
        self.accounts.credit(chunk.account, chunk.slot_bytes)

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
        idle = []
        for chunk in chunks:
            if not chunk.holders:
                idle.append(chunk)
                chunk.hits += 1
            chunk.holders += 1
        self.accounts.remove_idle(idle)

    def release(self, chunks: Sequence[Chunk]) -> None:
        """One holder of each leaves; a prefix is evicted from its end."""
        idle = []
        for chunk in chunks:
            chunk.holders -= 1
            if chunk.holders:
                continue
            if chunk.listed:
                idle.append(chunk)
            else:
                self._free(chunk)
        self.accounts.add_idle(idle)

    def unlist(self, held: Chunk) -> bool:
        """Let nobody find this chunk again; False when that was so before."""
        if not held.listed:
            return False
        held.listed = False
        held.follower = None  # else what has gone keeps what has gone
        del self._listed[held.key[1][0]][held.key]
        return True

    def clear(self, shards: Iterable[bytes]) -> int:
        """Unlist every chunk of ``shards``, or of any when there are none; how many were resident.

        It looks at every listed chunk.
        """
        wanted = frozenset(shards)
        cleared = [
            chunk
            for part in self._listed
            for (shard, _), chunk in part.items()
            if not wanted or shard in wanted
        ]
        self.hold(cleared)  # so that the slots of idle ones are freed by the release
        for chunk in cleared:
            self.unlist(chunk)
        self.release(cleared)
        return sum(chunk.resident for chunk in cleared)
