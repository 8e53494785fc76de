"""The chunk store: who is writing, looking up and reading which chunks, and until when.

A chunk is invisible until its writer commits it. A lookup leases what it finds to a request, a
reader holds what it reads, a pin keeps what it names; none of that can be evicted, and everybody ends
only what is their own.

Pure: no I/O and no clock. ``now`` is in seconds and never goes back; it decides what has expired at
the moment of each call. Every call costs O(1) amortised for each chunk that it names, but a clear and
some changes of quotas look at all there are. Not safe for threads by itself.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from lmcache_kernels.errors import LocalProtocolError

from .accounts import QuotaUse
from .chunk_table import ChunkTable
from .counters import Counters
from .eviction import Eviction
from .finding import find
from .leases import LEASE_TTL, Leases
from .pins import PIN_LIMIT, Pins
from .quotas import Quotas
from .tickets import NO_TICKET, READ_TTL, WRITE_TTL, Reading, Reservation, Tickets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from .chunk_table import Chunk, ChunkKey, ChunkState
    from .pins import PinState

OTHERS = "*"
"""Stands for tenants that are not named."""

TIERS = -(1 << 62)
"""Owners up to this one are no workers but tiers below the arena."""


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
        quotas: of tenants, to begin with.
        pin_limit: part of the capacity that all pins together may hold.

    Attributes:
        on_publish: told which chunks of which owner can be found from now on.
        on_damage: told which chunks turned out not to hold what they should.

    Raises:
        ConfigError: a capacity or time to live that is not above 0, or a limit that is not in [0, 1].
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        write_ttl: float = WRITE_TTL,
        lease_ttl: float = LEASE_TTL,
        read_ttl: float = READ_TTL,
        eviction: Eviction | None = None,
        quotas: Quotas | None = None,
        pin_limit: float = PIN_LIMIT,
    ) -> None:
        self.counters = Counters()
        self._below = Counters()  # of what tiers write and read, which have counters of their own
        self.on_publish: Callable[[int, list[ChunkKey], float], None] = lambda *_: None
        self.on_damage: Callable[[list[ChunkKey], float], None] = lambda *_: None
        self._table = ChunkTable(capacity_bytes, eviction or Eviction(), quotas or Quotas())
        self._pins = Pins(self._table, pin_limit)
        self._leases = Leases(self._table, lease_ttl)
        numbers = itertools.count(NO_TICKET + 1)
        self._writes = Tickets(numbers, write_ttl, "write_ttl")
        self._reads = Tickets(numbers, read_ttl, "read_ttl")
        # A tier says itself when it is done, however long that takes: until then its thread uses the slots.
        self._tier_writes = Tickets(numbers, math.inf, "write_ttl")
        self._tier_reads = Tickets(numbers, math.inf, "read_ttl")

    def fits(self, nbytes: int) -> bool:
        """Could a slot of ``nbytes`` exist if the store were empty?"""
        return self._table.slots.round_up(nbytes) <= self._table.slots.capacity_bytes

    # --- writing ----------------------------------------------------------------------------------

    def reserve(
        self,
        owner: int,
        shard: bytes,
        digests: Sequence[bytes],
        nbytes: int,
        now: float,
        tenant: str = "",
    ) -> Reservation:
        """Slots of ``nbytes`` for chunks that ``owner`` is about to write for ``tenant``.

        Chunks that are resident or being written are left out. Of the others the first ones get
        slots, as many as there is room for once idle chunks, none of this call, have been evicted: of
        the tenant's own if it is at its quota.
        """
        self.tick(now)
        keys = [(shard, digest) for digest in digests]
        # Held meanwhile: room for the tail of a prefix must not be made out of its head.
        present = [chunk for key in keys if (chunk := self._table.resident(key)) is not None]
        self._table.hold(present)
        account = self._table.accounts.of(tenant)
        written: list[Chunk] = []
        indices = []
        try:
            for index, key in enumerate(keys):
                if key in self._table:
                    continue
                chunk = self._table.stage(key, nbytes, account)
                if chunk is None:
                    self._counters(owner).stores_no_room += 1
                    break
                written.append(chunk)
                indices.append(index)
        except BaseException:
            self._table.discard(written)
            raise
        finally:
            self._table.release(present)
        ticket = self._writes_of(owner).give(owner, written, now)
        return Reservation(ticket, indices, [chunk.offset for chunk in written])

    def commit(self, owner: int, ticket: int, now: float, *, without: Collection[int] = ()) -> bool:
        """Publish what the ticket's writer wrote, but discard the chunks ``without``, indices of the ticket.

        False, and nothing becomes visible, when ``owner`` has no such ticket, its time was up, or
        its chunks were cleared meanwhile.
        """
        self.tick(now)
        chunks = self._writes_of(owner).take(owner, ticket)
        if chunks is None:
            return False
        written = [chunk for index, chunk in enumerate(chunks) if index not in without]
        self._table.discard([chunks[index] for index in without])
        self._table.link(written)
        published = self._table.publish(written)
        self._counters(owner).committed(chunks)
        if published:
            self.on_publish(owner, [chunk.key for chunk in written if chunk.listed], now)
        return published > 0

    def give_up(self, owner: int, ticket: int) -> None:
        """What is being written is not published; the slots stay the writer's until it commits.

        Others may reserve the same chunks meanwhile.
        """
        for chunk in self._writes_of(owner).get(owner, ticket) or ():
            self._table.unlist(chunk)

    def abort(self, owner: int, ticket: int, now: float) -> bool:
        """Discard what the ticket's writer wrote; False when ``owner`` has no such ticket."""
        self.tick(now)
        written = self._writes.take(owner, ticket)
        if written is None:
            return False
        self._counters(owner).stores_aborted += 1
        self._discard(owner, written)
        return True

    # --- finding ----------------------------------------------------------------------------------

    def lookup(
        self,
        request: str,
        shards: Sequence[bytes],
        digests: Sequence[bytes],
        now: float,
        windows: Sequence[int] = (),
    ) -> int:
        """How many chunks, from the first on, are there as far as ``shards`` need them.

        A shard with a window of w chunks needs the last w of a hit, one without (0; so are all if no
        windows are given) all of it. Exactly what is needed is leased to ``request`` from now on, in
        place of what it held before.

        Raises:
            LocalProtocolError: no shards.
        """
        count = self.extend(request, shards, digests, now, windows)
        self.counters.asked += len(digests)
        self.counters.hit += count
        return count

    def extend(
        self,
        request: str,
        shards: Sequence[bytes],
        digests: Sequence[bytes],
        now: float,
        windows: Sequence[int] = (),
    ) -> int:
        """The same once more, for a lookup that was counted before.

        Raises:
            LocalProtocolError: no shards.
        """
        if not shards:
            raise LocalProtocolError("lookup: expected at least one shard, got none")
        self.tick(now)
        hit = find(self._table, shards, digests, windows)
        self._leases.put(request, hit.chunks(), now)
        return hit.count

    def slot_bytes(self, key: ChunkKey) -> int | None:
        """Of the chunk's slot; None if it is not resident."""
        chunk = self._table.resident(key)
        return None if chunk is None else chunk.slot_bytes

    def end_session(self, request: str) -> None:
        """End the lease of ``request`` if it has one; leases of others are not touched."""
        self._leases.end(request)

    # --- keeping ----------------------------------------------------------------------------------

    def pin(
        self,
        pin: str,
        shards: Sequence[bytes],
        digests: Sequence[bytes],
        seconds: float,
        now: float,
    ) -> int:
        """Keep the longest prefix of ``digests`` that is resident for every one of ``shards``.

        It stays for so many seconds, replaces an earlier pin of the same name, and is shorter where
        all pins together would hold more than they may. How many chunks of each shard those are.

        Raises:
            CapacityError: too many pins.
        """
        self.tick(now)
        hit = find(self._table, list(dict.fromkeys(shards)), digests)
        return self._pins.put(pin, zip(*hit.columns, strict=True), now + seconds)

    def unpin(self, pin: str) -> None:
        """End the pin if there is one of that name."""
        self._pins.end(pin)

    def pins(self, now: float) -> list[PinState]:
        """All there are, by name."""
        self.tick(now)
        return self._pins.states(now)

    # --- reading ----------------------------------------------------------------------------------

    def open_read(self, owner: int, shard: bytes, digests: Sequence[bytes], now: float) -> Reading:
        """Hold the longest resident prefix of ``digests`` in place until it is closed."""
        self.tick(now)
        found = self._table.prefix(shard, digests)
        if len(found) < len(digests):
            self.counters.loads_missing += 1
        self._table.hold(found)
        ticket = self._reads.give(owner, found, now)
        return Reading(ticket, [chunk.offset for chunk in found])

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

        ``failed``: what was read is of no use to the reader, though nothing is wrong with it. Chunks
        ``damaged`` (indices of the read) are not found any more from now on; their slots are free as
        soon as nobody else holds them.

        Raises:
            LocalProtocolError: an index that the read does not have; the read goes on.
        """
        self.tick(now)
        read = self._reads.get(owner, ticket)
        if read is None:
            return False
        bad = set(damaged)
        if bad and not (min(bad) >= 0 and max(bad) < len(read)):
            raise LocalProtocolError(
                f"damaged: expected indices in [0, {len(read)}), got {min(bad)} to {max(bad)}"
            )
        self._reads.take(owner, ticket)
        self.counters.read(read, bad, failed=failed)
        self.counters.damaged += sum(self._table.unlist(read[index]) for index in bad)
        self._pins.let_go_of_unlisted(read[index] for index in bad)
        self._table.release(read)
        if bad:
            self.on_damage([read[index].key for index in sorted(bad)], now)
        return True

    def hold(self, owner: int, keys: Sequence[ChunkKey], now: float) -> Reading:
        """Hold chunks where they are until :meth:`let_go`, for a tier.

        Raises:
            LocalProtocolError: one that is not resident.
        """
        self.tick(now)
        chunks = [chunk for key in keys if (chunk := self._table.resident(key)) is not None]
        if len(chunks) < len(keys):
            raise LocalProtocolError(f"hold: expected resident chunks, got {len(chunks)} of them")
        self._table.hold(chunks)
        ticket = self._tier_reads.give(owner, chunks, now)
        return Reading(ticket, [chunk.offset for chunk in chunks])

    def let_go(self, owner: int, ticket: int, now: float) -> list[ChunkKey]:
        """End a hold; which of its chunks nobody shall find any more."""
        self.tick(now)
        held = self._tier_reads.take(owner, ticket) or ()
        gone = [chunk.key for chunk in held if not chunk.listed]
        self._table.release(held)
        return gone

    # --- slots ------------------------------------------------------------------------------------

    def slot(
        self, owner: int, ticket: int, index: int, now: float, *, writing: bool
    ) -> tuple[int, int] | None:
        """Offset and size of the slot of chunk number ``index`` of a reservation, or of a read.

        None: ``owner`` has no such ticket or it no such chunk, or its time was up.
        """
        self.tick(now)
        chunks = (self._writes if writing else self._reads).get(owner, ticket)
        if chunks is None or not 0 <= index < len(chunks):
            return None
        return chunks[index].offset, chunks[index].slot_bytes

    # --- quotas -----------------------------------------------------------------------------------

    def set_quota(self, tenant: str | None, nbytes: int | None) -> None:
        """Let ``tenant`` use so many bytes, or those who have no quota of their own if None.

        ``nbytes`` None takes the quota away. What is above a lower one goes in the next
        :meth:`make_room`, as far as it is idle.

        Raises:
            ConfigError: no tenant's name, or a quota below 0; nothing has changed.
        """
        self._table.accounts.set_quota(tenant, nbytes)

    def change_quotas(self, quotas: Quotas) -> None:
        """All at once; see :meth:`set_quota`."""
        self._table.accounts.change(quotas)

    def named_quotas(self) -> dict[str, QuotaUse]:
        """Of every tenant that is named in the quotas, and under :data:`OTHERS` what the others with one
        use together: a salt may be a secret, and there may be any number of them."""
        uses = self.quotas()
        named = self._table.accounts.quotas.tenants
        found = {tenant: use for tenant, use in uses.items() if tenant in named}
        if self.default_quota is not None:
            others = sum(use.used_bytes for tenant, use in uses.items() if tenant not in named)
            found[OTHERS] = QuotaUse(self.default_quota, others)
        return found

    def quotas(self) -> dict[str, QuotaUse]:
        """Of every tenant that has a quota of its own, or has one and uses anything."""
        return self._table.accounts.uses()

    @property
    def default_quota(self) -> int | None:
        """Of tenants that have none of their own; None: no limit."""
        return self._table.accounts.quotas.default

    # --- housekeeping -----------------------------------------------------------------------------

    def drop_owner(self, owner: int) -> None:
        """Discard, never publish, what ``owner`` is writing, and end its reads."""
        for written in self._writes.take_all(owner):
            self.counters.stores_dropped += 1
            self._discard(owner, written)
        for read in self._reads.take_all(owner):
            self.counters.loads_dropped += 1
            self._table.release(read)

    def clear(self, shards: Iterable[bytes], now: float) -> int:
        """Let nobody find again what was reserved for ``shards``, or for any if there are none.

        Slots that are leased, read or written stay taken until that ends, and what is being written
        is not published then. How many chunks could be found until now.
        """
        self.tick(now)
        count = self._table.clear(shards)
        self._pins.let_go_of_unlisted()
        self.counters.cleared += count
        return count

    def tick(self, now: float) -> None:
        """End leases, reads, writers and pins whose time is up."""
        self._leases.expire(now)
        for owner, read in self._reads.expire(now):
            self._counters(owner).loads_expired += 1
            self._table.release(read)
        for owner, written in self._writes.expire(now):
            self._counters(owner).stores_expired += 1
            self._discard(owner, written)
        self._pins.expire(now)

    def make_room(self) -> None:
        """Evict what is above quotas, and ahead of need if so much is used; for the owner of the
        store, every second or so."""
        self._table.make_room()

    def change(self, watermark: float, ratio: float) -> None:
        """Make room ahead of need like this from now on; see :class:`.eviction.Eviction`."""
        self._table.change(watermark, ratio)

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
        written = [*self._writes.chunks(), *self._tier_writes.chunks()]
        return asdict(self.counters) | {
            "evicted": self._table.evicted,
            "evicted_bytes": self._table.evicted_bytes,
            "capacity_bytes": self._table.slots.capacity_bytes,
            "used_bytes": self._table.slots.used_bytes,
            "resident": len(self._table) - sum(chunk.listed for chunk in written),
            "idle": self._table.accounts.idle,
            "writing": len(written),
            "writes": len(self._writes),
            "leases": len(self._leases),
            "reads": len(self._reads) + len(self._tier_reads),
            "pins": len(self._pins),
            "pinned_bytes": self._pins.nbytes,
        }

    def _writes_of(self, owner: int) -> Tickets:
        return self._writes if owner > TIERS else self._tier_writes

    def _counters(self, owner: int) -> Counters:
        return self.counters if owner > TIERS else self._below

    def _discard(self, owner: int, written: Sequence[Chunk]) -> None:
        self._table.discard(written)
        self._counters(owner).discarded += len(written)
