"""Lookups that go on below the arena: what a tier has of a prefix is loaded, and then it is found.

A lookup that the arena answers only in part becomes a job. It asks the tiers, one after the other,
which of the missing chunks they have, and loads those that make the prefix longer, batch by batch from
the front. Each batch is published as it arrives and leased to the request at once. The reply comes when
no more can be had, or a little before the deadline with what has arrived by then.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import RemoteProtocolError
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES, read_header
from lmcache_kernels.transfer.messages import Found
from lmcache_kernels.transfer.serving.later import Later
from lmcache_kernels.transfer.serving.store import TIERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.serving.inbox import Inbox
    from lmcache_kernels.transfer.serving.store import ChunkStore, Reservation

    from .link import TierLink

logger = logging.getLogger(__name__)

LOADER = TIERS
"""Owner of what is being loaded."""

MOST_CHUNKS = 1 << 12
"""Of one lookup that tiers are asked for: a million tokens at 256 a chunk."""

MOST_JOBS = 1 << 10
"""Lookups that may wait for tiers; further ones get what the arena has."""

BATCH_BYTES = 32 << 20
"""Of one load: much more than a round trip is worth, and soon enough over for others."""

BATCH_CHUNKS = 256

MOST_FETCHES = 8
"""Loads under way, of all jobs and tiers."""

NOWHERE = -1
"""No level."""

FETCHES_OF_A_JOB = 2
"""One is on its way while the next is prepared."""

ANSWER_AFTER = 0.9
"""Of the time that the caller waits."""


class Level(Protocol):
    """What a job needs to know of a tier."""

    link: TierLink

    def readable(self, shard: bytes) -> bool:
        """May chunks of the shard come from here?"""
        ...


@dataclass(eq=False)
class _Job:
    request: str
    shards: Sequence[bytes]
    digests: Sequence[bytes]
    later: Later
    answer_by: float
    found: int  # chunks of the prefix that are leased
    next: int  # the first that no load was ordered for
    end: int  # behind the last that could be there; not known before all tiers were asked
    located: dict[ChunkKey, int] = field(default_factory=dict)  # index of the level
    fetches: set[_Fetch] = field(default_factory=set)
    planned: bool = False
    announced: bool = False  # its caller knows that the reply comes later


@dataclass(eq=False)
class _Fetch:
    keys: list[ChunkKey]
    jobs: set[_Job]


class TierLoads:
    """The jobs. Everything here is for the service's thread.

    Args:
        store: where chunks are wanted.
        arena: where its slots are.
        inbox: the service's.
        levels: the tiers, in the order in which they are asked.
        chunk_bytes: of a shard, if somebody is registered for it.
        loaded: told which chunks came from which level.
    """

    def __init__(
        self,
        store: ChunkStore,
        arena: Arena,
        inbox: Inbox,
        levels: Sequence[Level],
        chunk_bytes: Callable[[bytes], int | None],
        loaded: Callable[[list[ChunkKey], int, float], None],
    ) -> None:
        self._store = store
        self._arena = arena
        self._inbox = inbox
        self._levels = levels
        self._chunk_bytes = chunk_bytes
        self._loaded = loaded
        self._jobs: dict[str, _Job] = {}
        self._loading: dict[ChunkKey, _Fetch] = {}
        self._fetches = 0

    def __len__(self) -> int:
        """Lookups that wait."""
        return len(self._jobs)

    def begin(
        self,
        request: str,
        shards: Sequence[bytes],
        digests: Sequence[bytes],
        found: int,
        now: float,
        deadline: float,
    ) -> Found | Later:
        """The reply to a lookup for which the arena has the first ``found`` chunks, or that it comes.

        It replaces a lookup of the same request that still waits.
        """
        self.cancel(request)
        end = min(len(digests), found + MOST_CHUNKS)
        if end <= found or len(self._jobs) >= MOST_JOBS:
            return Found(chunks=found)
        if any(self._chunk_bytes(shard) is None for shard in shards):
            return Found(chunks=found)
        answer_by = now + ANSWER_AFTER * (deadline - now) if deadline < math.inf else math.inf
        job = _Job(request, shards, digests, Later(), answer_by, found, next=found, end=end)
        self._jobs[request] = job
        missing = [key for index in range(found, end) for key in self._absent(job, index)]
        self._locate(job, missing, 0, now)
        if not self._waits(job):
            return Found(chunks=job.found)
        job.announced = True
        return job.later

    def cancel(self, request: str) -> None:
        """Nobody waits for this lookup any more. What is on its way arrives all the same."""
        job = self._jobs.get(request)
        if job is not None:
            job.found = 0
            self._end(job)

    def due(self) -> float:
        """When :meth:`expire` has something to do."""
        return min((job.answer_by for job in self._jobs.values()), default=math.inf)

    def expire(self, now: float) -> None:
        """Answer those whose time is up with what has arrived."""
        for job in [job for job in self._jobs.values() if job.answer_by <= now]:
            self._end(job)

    # --- where the chunks are ---------------------------------------------------------------------

    def _absent(self, job: _Job, index: int) -> Iterable[ChunkKey]:
        """What of this row of the prefix is neither in the arena nor on its way to it."""
        for shard in job.shards:
            key = (shard, job.digests[index])
            if key not in self._loading and self._store.slot_bytes(key) is None:
                yield key

    def _locate(self, job: _Job, missing: list[ChunkKey], level: int, now: float) -> None:
        if not missing or level == len(self._levels):
            self._plan(job)
            self._advance(job, now)
            return
        tier = self._levels[level]
        asked = [key for key in missing if tier.readable(key[0])]

        def located(found: list[bool], now: float) -> None:
            here = {key for key, is_here in zip(asked, found, strict=True) if is_here}
            job.located |= dict.fromkeys(here, level)
            if self._waits(job):
                self._locate(job, [key for key in missing if key not in here], level + 1, now)

        if asked and tier.link.may_try(now):
            tier.link.exists(asked, now, located)
        else:
            self._locate(job, missing, level + 1, now)

    def _plan(self, job: _Job) -> None:
        job.planned = True
        for index in range(job.next, job.end):
            if any(key not in job.located for key in self._absent(job, index)):
                job.end = index

    # --- loading them -----------------------------------------------------------------------------

    def _advance(self, job: _Job, now: float) -> None:
        """Order what may be ordered; reply if nothing is left to wait for."""
        while (
            job.next < job.end
            and len(job.fetches) < FETCHES_OF_A_JOB
            and self._fetches < MOST_FETCHES
        ):
            self._order_batch(job, now)
        if not job.fetches and job.next >= job.end:
            self._end(job)

    def _order_batch(self, job: _Job, now: float) -> None:
        """Order the next rows, as many as make up a batch."""
        row_bytes = sum(HEADER_BYTES + (self._chunk_bytes(shard) or 0) for shard in job.shards)
        rows = max(1, min(BATCH_CHUNKS, BATCH_BYTES // row_bytes))
        stop = min(job.end, job.next + rows)
        wanted: dict[tuple[bytes, int], list[ChunkKey]] = {}
        for key in itertools.product(job.shards, job.digests[job.next : stop]):
            fetch = self._loading.get(key)
            if fetch is not None:
                fetch.jobs.add(job)
                job.fetches.add(fetch)
            elif self._store.slot_bytes(key) is None:
                # Not located: it was in the arena, and has gone since.
                wanted.setdefault((key[0], job.located.get(key, NOWHERE)), []).append(key)
        job.next = stop
        for (shard, level), keys in wanted.items():
            if level == NOWHERE:
                job.end = job.next
            else:
                self._fetch(job, shard, level, keys, now)

    def _fetch(self, job: _Job, shard: bytes, level: int, keys: list[ChunkKey], now: float) -> None:
        chunk_bytes = self._chunk_bytes(shard)
        link = self._levels[level].link
        if chunk_bytes is None or not link.may_try(now):
            job.end = job.next
            return
        nbytes = HEADER_BYTES + chunk_bytes
        slots = self._store.reserve(LOADER, shard, [digest for _, digest in keys], nbytes, now)
        if len(slots.indices) < len(keys):  # no room, or a worker is just storing them
            job.end = job.next
        if not slots.indices:
            return
        keys = [keys[index] for index in slots.indices]
        places = [self._arena.view(offset, nbytes) for offset in slots.offsets]
        fetch = _Fetch(keys, {job})
        job.fetches.add(fetch)
        self._loading |= dict.fromkeys(keys, fetch)
        self._fetches += 1

        def over(arrived: list[bool], now: float) -> None:
            bad = [
                index
                for index, key in enumerate(keys)
                if not (arrived[index] and _holds(places[index], key, chunk_bytes))
            ]
            self._over(fetch, slots, bad, level, now)

        link.get_into(keys, places, now, over)

    def _over(
        self, fetch: _Fetch, slots: Reservation, bad: list[int], level: int, now: float
    ) -> None:
        self._fetches -= 1
        for key in fetch.keys:
            del self._loading[key]
        self._store.commit(LOADER, slots.ticket, now, without=bad)
        unusable = set(bad)
        self._loaded(
            [key for index, key in enumerate(fetch.keys) if index not in unusable], level, now
        )
        for job in fetch.jobs:
            job.fetches.discard(fetch)
            if self._waits(job):
                self._arrived(job, now)
                if bad:
                    job.end = job.next
        for job in list(self._jobs.values()):
            if job.planned and self._waits(job):
                self._advance(job, now)

    def _arrived(self, job: _Job, now: float) -> None:
        before = job.found
        job.found = self._store.extend(job.request, job.shards, job.digests[: job.next], now)
        for digest in job.digests[before : job.found]:
            level = job.located.get((job.shards[0], digest))
            if level is None:  # it was here already, behind one that was not
                self._store.counters.hit += 1
            else:
                self._levels[level].link.counters.gained += 1

    def _waits(self, job: _Job) -> bool:
        return self._jobs.get(job.request) is job

    def _end(self, job: _Job) -> None:
        del self._jobs[job.request]
        if job.announced:
            self._store.counters.answered(len(job.digests), job.found)
            self._inbox.reply(job.later, Found(chunks=job.found))


def _holds(place: memoryview, key: ChunkKey, chunk_bytes: int) -> bool:
    try:
        read_header(place, *key, chunk_bytes)
    except RemoteProtocolError as error:
        logger.warning("a tier gave out another chunk than it was asked for: %s", error)
        return False
    return True
