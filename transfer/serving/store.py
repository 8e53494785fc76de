"""The chunk store: who is writing, looking up and reading which chunks, and until when.

A chunk is invisible until its writer commits it. A lookup leases what it finds to a request, a
reader holds what it reads; neither can be evicted, and everybody ends only what is their own.

Pure: no I/O and no clock. ``now`` is in seconds and never goes back; it decides what has expired at
the moment of each call. Every call costs O(1) amortised for each chunk that it names, but a clear
looks at all there are. Not safe for threads by itself.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from lmcache_kernels.errors import LocalProtocolError

from .chunk_table import Chunk, ChunkTable
from .counters import Counters
from .eviction import POLICIES, Eviction
from .expiring import Expiring

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from .chunk_table import ChunkKey, ChunkState

WRITE_TTL = 600.0
"""Seconds a writer has between reserve and commit: ten times what a worker waits for its device."""

LEASE_TTL = 300.0
"""Seconds a lookup keeps its chunks: longer than a request usually waits in an engine's queue."""

READ_TTL = 180.0
"""Seconds a reader has until it says that it is done: three times what a worker waits for its
device."""

MOST_EVICTED = 1 << 12
"""Chunks that are evicted ahead of need in one tick: some ten milliseconds, in which others wait."""

TIERS = -(1 << 62)
"""Owners up to this one are no workers but tiers below the arena."""

NO_TICKET = 0
"""The ticket of a reservation or read without chunks; there is nothing to commit."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Chunk ``indices[i]`` of the call goes into the slot at ``offsets[i]``."""

    ticket: int
    indices: list[int]
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Reading:
    """Where the first chunks of the call lie."""

    ticket: int
    offsets: list[int]


@dataclass(slots=True)
class _Transfer:
    owner: int
    chunks: list[Chunk] = field(default_factory=list)


class ChunkStore:
    """Keeps chunks in slots of a capacity.

    Args:
        capacity_bytes: of all slots together.
        write_ttl: seconds between reserve and commit after which a writer counts as dead. Its slots
            go to others then, so a live writer must have stopped writing by that time.
        lease_ttl: seconds after which a lookup's lease ends by itself.
        read_ttl: seconds after which a read ends by itself. Its slots go to others then, so a live
            reader must have stopped reading by that time, or check afterwards what it has read.
        eviction: when idle chunks go, and which.

    Attributes:
        on_publish: told which chunks of which owner can be found from now on.
        on_damage: told which chunks turned out not to hold what they should.

    Raises:
        ConfigError: a capacity or time to live that is not above 0.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        write_ttl: float = WRITE_TTL,
        lease_ttl: float = LEASE_TTL,
        read_ttl: float = READ_TTL,
        eviction: Eviction | None = None,
    ) -> None:
        self.counters = Counters()
        self._below = Counters()  # of what tiers write and read, which have counters of their own
        self._eviction = eviction or Eviction()
        self._table = ChunkTable(capacity_bytes, POLICIES[self._eviction.policy]())
        self._leases: Expiring[str, list[Chunk]] = Expiring(lease_ttl, "lease_ttl")
        self._writes: Expiring[int, _Transfer] = Expiring(write_ttl, "write_ttl")
        self._reads: Expiring[int, _Transfer] = Expiring(read_ttl, "read_ttl")
        self._tickets = itertools.count(NO_TICKET + 1)
        self.on_publish: Callable[[int, list[ChunkKey], float], None] = lambda *_: None
        self.on_damage: Callable[[list[ChunkKey], float], None] = lambda *_: None

    def fits(self, nbytes: int) -> bool:
        """Could a slot of ``nbytes`` exist if the store were empty?"""
        return self._table.slots.round_up(nbytes) <= self._table.slots.capacity_bytes

    # --- writing ----------------------------------------------------------------------------------

    def reserve(
        self, owner: int, shard: bytes, digests: Sequence[bytes], nbytes: int, now: float
    ) -> Reservation:
        """Slots of ``nbytes`` for chunks that ``owner`` is about to write.

        Chunks that are resident or being written are left out. Of the others the first ones get
        slots, as many as there is room for once idle chunks, none of this call, have been evicted.
        """
        self.tick(now)
        keys = [(shard, digest) for digest in digests]
        # Held meanwhile: room for the tail of a prefix must not be made out of its head.
        present = [chunk for key in keys if (chunk := self._table.resident(key)) is not None]
        self._table.hold(present)
        write = _Transfer(owner)
        indices = []
        try:
            for index, key in enumerate(keys):
                if key in self._table:
                    continue
                chunk = self._table.stage(key, nbytes)
                if chunk is None:
                    self._counters(owner).stores_no_room += 1
                    break
                write.chunks.append(chunk)
                indices.append(index)
        except BaseException:
            self._table.discard(write.chunks)
            raise
        finally:
            self._table.release(present)
        if not indices:
            return Reservation(NO_TICKET, [], [])
        ticket = next(self._tickets)
        self._writes.put(ticket, write, now)
        return Reservation(ticket, indices, [chunk.offset for chunk in write.chunks])

    def commit(self, owner: int, ticket: int, now: float, *, without: Collection[int] = ()) -> bool:
        """Publish what the ticket's writer wrote, but discard the chunks ``without``, indices of the ticket.

        False, and nothing becomes visible, when ``owner`` has no such ticket, its time was up, or
        its chunks were cleared meanwhile.
        """
        self.tick(now)
        write = self._take_write(owner, ticket)
        if write is None:
            return False
        written = [chunk for index, chunk in enumerate(write.chunks) if index not in without]
        self._table.discard([write.chunks[index] for index in without])
        self._table.link(written)
        published = self._table.publish(written)
        self._counters(owner).committed(write.chunks)
        if published:
            self.on_publish(owner, [chunk.key for chunk in written if chunk.listed], now)
        return published > 0

    def abort(self, owner: int, ticket: int, now: float) -> bool:
        """Discard what the ticket's writer wrote; False when ``owner`` has no such ticket."""
        self.tick(now)
        write = self._take_write(owner, ticket)
        if write is None:
            return False
        self._counters(owner).stores_aborted += 1
        self._discard(write)
        return True

    # --- finding ----------------------------------------------------------------------------------

    def lookup(
        self, request: str, shards: Sequence[bytes], digests: Sequence[bytes], now: float
    ) -> int:
        """How many chunks, from the first on, are resident for every one of ``shards``.

        Exactly those are leased to ``request`` from now on, in place of what it held before.

        Raises:
            LocalProtocolError: no shards.
        """
        count = self.extend(request, shards, digests, now)
        self.counters.asked += len(digests)
        self.counters.hit += count
        return count

    def extend(
        self, request: str, shards: Sequence[bytes], digests: Sequence[bytes], now: float
    ) -> int:
        """The same once more, for a lookup that was counted before.

        Raises:
            LocalProtocolError: no shards.
        """
        if not shards:
            raise LocalProtocolError("lookup: expected at least one shard, got none")
        self.tick(now)
        columns: list[list[Chunk]] = []
        count = len(digests)
        for shard in shards:
            columns.append(self._table.prefix(shard, digests[:count]))
            count = len(columns[-1])
        # Digest by digest, so that all shards lose the end of a prefix together.
        found = [chunk for row in zip(*columns, strict=False) for chunk in row]
        self._table.hold(found)
        self.end_session(request)
        if found:
            self._leases.put(request, found, now)
        return count

    def slot_bytes(self, key: ChunkKey) -> int | None:
        """Of the chunk's slot; None if it is not resident."""
        chunk = self._table.resident(key)
        return None if chunk is None else chunk.slot_bytes

    def end_session(self, request: str) -> None:
        """End the lease of ``request`` if it has one; leases of others are not touched."""
        self._table.release(self._leases.pop(request) or ())

    # --- reading ----------------------------------------------------------------------------------

    def open_read(self, owner: int, shard: bytes, digests: Sequence[bytes], now: float) -> Reading:
        """Hold the longest resident prefix of ``digests`` in place until it is closed."""
        self.tick(now)
        read = _Transfer(owner)
        read.chunks += self._table.prefix(shard, digests)
        if len(read.chunks) < len(digests):
            self.counters.loads_missing += 1
        if not read.chunks:
            return Reading(NO_TICKET, [])
        self._table.hold(read.chunks)
        ticket = next(self._tickets)
        self._reads.put(ticket, read, now)
        return Reading(ticket, [chunk.offset for chunk in read.chunks])

    def close_read(
        self,
        owner: int,
        ticket: int,
        damaged: Iterable[int],
        now: float,
        *,
        failed: bool = False,
    ) -> bool:
        """End a read; False when ``owner`` has no such ticket or its time was up.

        ``failed``: what was read is of no use to the reader, though nothing is wrong with it. Chunks ``damaged`` (indices of the read) are not found any more from now on; their slots are
        free as soon as nobody else holds them.

        Raises:
            LocalProtocolError: an index that the read does not have; the read goes on.
        """
        self.tick(now)
        read = self._reads.get(ticket)
        if read is None or read.owner != owner:
            return False
        bad = set(damaged)
        if bad and not (min(bad) >= 0 and max(bad) < len(read.chunks)):
            raise LocalProtocolError(
                f"damaged: expected indices in [0, {len(read.chunks)}), got {min(bad)} to {max(bad)}"
            )
        self._reads.pop(ticket)
        self.counters.read(read.chunks, bad, failed=failed)
        self.counters.damaged += sum(self._table.unlist(read.chunks[index]) for index in bad)
        self._table.release(read.chunks)
        if bad:
            self.on_damage([read.chunks[index].key for index in sorted(bad)], now)
        return True

    def hold(self, owner: int, keys: Sequence[ChunkKey], now: float) -> Reading:
        """Hold chunks where they are until :meth:`let_go`.

        Raises:
            LocalProtocolError: one that is not resident.
        """
        self.tick(now)
        chunks = [chunk for key in keys if (chunk := self._table.resident(key)) is not None]
        if len(chunks) < len(keys) or not chunks:
            raise LocalProtocolError(f"hold: expected resident chunks, got {len(chunks)} of them")
        self._table.hold(chunks)
        ticket = next(self._tickets)
        self._reads.put(ticket, _Transfer(owner, chunks), now)
        return Reading(ticket, [chunk.offset for chunk in chunks])

    def let_go(self, owner: int, ticket: int, now: float) -> list[ChunkKey] | None:
        """End a hold; which of its chunks nobody shall find any more. None: its time was up before,
        and the slots may have been others' since."""
        self.tick(now)
        read = self._reads.get(ticket)
        if read is None or read.owner != owner:
            return None
        self._reads.pop(ticket)
        gone = [chunk.key for chunk in read.chunks if not chunk.listed]
        self._table.release(read.chunks)
        return gone

    # --- slots ------------------------------------------------------------------------------------

    def slot(
        self, owner: int, ticket: int, index: int, now: float, *, writing: bool
    ) -> tuple[int, int] | None:
        """Offset and size of the slot of chunk number ``index`` of a reservation, or of a read.

        None: ``owner`` has no such ticket or it no such chunk, or its time was up.
        """
        self.tick(now)
        transfer = (self._writes if writing else self._reads).get(ticket)
        if transfer is None or transfer.owner != owner or not 0 <= index < len(transfer.chunks):
            return None
        chunk = transfer.chunks[index]
        return chunk.offset, chunk.slot_bytes

    # --- housekeeping -----------------------------------------------------------------------------

    def drop_owner(self, owner: int) -> None:
        """Discard, never publish, what ``owner`` is writing, and end its reads."""
        for ticket, write in list(self._writes.items()):
            if write.owner == owner:
                self._writes.pop(ticket)
                self.counters.stores_dropped += 1
                self._discard(write)
        for ticket, read in list(self._reads.items()):
            if read.owner == owner:
                self._reads.pop(ticket)
                self.counters.loads_dropped += 1
                self._table.release(read.chunks)

    def clear(self, shards: Iterable[bytes], now: float) -> int:
        """Let nobody find again what was reserved for ``shards``, or for any if there are none.

        Slots that are leased, read or written stay taken until that ends, and what is being written
        is not published then. How many chunks could be found until now.
        """
        self.tick(now)
        count = self._table.clear(shards)
        self.counters.cleared += count
        return count

    def tick(self, now: float) -> None:
        """End leases, reads and writers whose time is up."""
        for _, chunks in self._leases.expire(now):
            self._table.release(chunks)
        for _, read in self._reads.expire(now):
            self._counters(read.owner).loads_expired += 1
            self._table.release(read.chunks)
        for _, write in self._writes.expire(now):
            self._counters(write.owner).stores_expired += 1
            self._discard(write)

    def make_room(self) -> None:
        """Evict ahead of need if so much is used; for the owner of the store, every second or so."""
        slots, eviction = self._table.slots, self._eviction
        if eviction.watermark == 1 or slots.used_bytes < eviction.watermark * slots.capacity_bytes:
            return
        wanted = eviction.ratio * slots.capacity_bytes
        for _ in range(MOST_EVICTED):
            freed = self._table.evict()
            wanted -= freed
            if not freed or wanted <= 0:
                return

    def change(self, watermark: float, ratio: float) -> None:
        """Make room ahead of need like this from now on; see :class:`.eviction.Eviction`."""
        self._eviction = replace(self._eviction, watermark=watermark, ratio=ratio)

    def under_way(self) -> dict[str, int]:
        """What somebody has begun and not ended."""
        return {
            "stores": len(self._writes),
            "loads": len(self._reads),
            "requests that found something": len(self._leases),
        }

    def chunks(self, first: int, most: int) -> list[ChunkState]:
        """What is stored or being written; see :meth:`.ChunkTable.some`."""
        return self._table.some(first, most)

    def stats(self) -> dict[str, int]:
        """The counters, and what there is now."""
        written = [chunk for _, write in self._writes.items() for chunk in write.chunks]
        return asdict(self.counters) | {
            "evicted": self._table.evicted,
            "evicted_bytes": self._table.evicted_bytes,
            "capacity_bytes": self._table.slots.capacity_bytes,
            "used_bytes": self._table.slots.used_bytes,
            "resident": len(self._table) - sum(chunk.listed for chunk in written),
            "idle": self._table.idle,
            "writing": len(written),
            "writes": len(self._writes),
            "leases": len(self._leases),
            "reads": len(self._reads),
        }

    def _counters(self, owner: int) -> Counters:
        return self.counters if owner > TIERS else self._below

    def _take_write(self, owner: int, ticket: int) -> _Transfer | None:
        write = self._writes.get(ticket)
        if write is None or write.owner != owner:
            return None
        return self._writes.pop(ticket)

    def _discard(self, write: _Transfer) -> None:
        self._table.discard(write.chunks)
        self._counters(write.owner).discarded += len(write.chunks)
