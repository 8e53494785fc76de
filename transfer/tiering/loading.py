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
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import RemoteProtocolError
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES, read_header
from lmcache_kernels.transfer.messages import Found
from lmcache_kernels.transfer.serving.finding import NO_WINDOW, find
from lmcache_kernels.transfer.serving.later import Later
from lmcache_kernels.transfer.serving.store import TIERS

from .link import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.serving.inbox import Inbox
    from lmcache_kernels.transfer.serving.store import ChunkStore

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
"""Loads under way of one tier, of all jobs."""

MOST_KEYS = 1 << 14
"""Names that one lookup asks tiers for: some 20 ms of the service's thread."""

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


@dataclass(frozen=True, slots=True)
class Asked:
    """A lookup: see :class:`~lmcache_kernels.transfer.messages.Lookup`. What comes up is charged to the
    ``tenant``."""

    request: str
    shards: Sequence[bytes]
    windows: Sequence[int]
    digests: Sequence[bytes]
    tenant: str = ""


@dataclass(eq=False)
class _Job:
    asked: Asked
    later: Later
    answer_by: float
    found: int  # chunks of the hit that is leased
    located: dict[ChunkKey, int] = field(default_factory=dict)  # index of the level
    wanted: deque[ChunkKey] = field(default_factory=deque)  # no load was ordered for them
    fetches: set[_Fetch] = field(default_factory=set)
    planned: bool = False
    announced: bool = False  # its caller knows that the reply comes later


@dataclass(eq=False)
class _Fetch:
    keys: list[ChunkKey]
    jobs: set[_Job]
    level: int
    ticket: int
    begun: float


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
        self._fetches: dict[_Fetch, None] = {}  # in the order in which they began

    def __len__(self) -> int:
        """Lookups that wait."""
        return len(self._jobs)

    def begin(
        self,
        asked: Asked,
        found: int,
        now: float,
        deadline: float,
    ) -> Found | Later:
        """The reply to a lookup for which the arena has the first ``found`` chunks, or that it comes.

        It replaces a lookup of the same request that still waits.
        """
        self.cancel(asked.request)
        digests = asked.digests[: found + min(MOST_CHUNKS, MOST_KEYS // len(asked.shards))]
        if len(digests) <= found or len(self._jobs) >= MOST_JOBS:
            return Found(chunks=found)
        if any(self._chunk_bytes(shard) is None for shard in asked.shards):
            return Found(chunks=found)
        answer_by = now + min(ANSWER_AFTER * (deadline - now), PATIENCE)
        job = _Job(replace(asked, digests=digests), Later(), answer_by, found)
        self._jobs[asked.request] = job
        self._locate(job, self._absent(job), 0, now)
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
        """Answer those whose time is up with what has arrived, and wait no longer for a load that hangs."""
        for fetch in [one for one in self._fetches if now - one.begun >= PATIENCE]:
            self._forget(fetch)
            self._store.give_up(LOADER, fetch.ticket)
            self._go_on(fetch, now, failed=True)
        for job in [job for job in self._jobs.values() if job.answer_by <= now]:
            self._end(job)

    def clear(self, shards: Sequence[bytes]) -> None:
        """Lookups that wait for something of these shards, or of any if none is named, find nothing."""
        for job in list(self._jobs.values()):
            if not shards or not frozenset(shards).isdisjoint(job.asked.shards):
                job.found = 0
                self._end(job)

    # --- where the chunks are ---------------------------------------------------------------------

    def _absent(self, job: _Job) -> list[ChunkKey]:
        """What a longer hit may need and is neither in the arena nor on its way to it."""
        asked = job.asked
        windows = asked.windows or [NO_WINDOW] * len(asked.shards)
        starts = [
            job.found if window == NO_WINDOW else max(0, job.found + 1 - window)
            for window in windows
        ]
        return [
            key
            for index, digest in enumerate(asked.digests)
            for shard, start in zip(asked.shards, starts, strict=True)
            if index >= start and not self._is_coming(key := (shard, digest))
        ]

    def _is_coming(self, key: ChunkKey) -> bool:
        """In the arena, or on its way to it."""
        return key in self._loading or self._store.slot_bytes(key) is not None

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
        """Want what the longest hit needs that can be reached."""
        job.planned = True
        asked = job.asked
        hit = find(_Reachable(self, job), asked.shards, asked.digests, asked.windows)
        job.wanted.extend(hit.chunks() if hit.count > job.found else ())

    # --- loading them -----------------------------------------------------------------------------

    def _advance(self, job: _Job, now: float) -> None:
        """Order what may be ordered; reply if nothing is left to wait for."""
        while job.wanted and len(job.fetches) < FETCHES_OF_A_JOB:
            if not self._order_batch(job, now):
                return
        if not job.fetches and not job.wanted:
            self._end(job)

    def _order_batch(self, job: _Job, now: float) -> bool:
        """Order the next chunks, as many as make up a batch; False if a tier has too much to do."""
        batch: dict[tuple[bytes, int], list[ChunkKey]] = {}
        count = nbytes = 0
        while job.wanted and count < BATCH_CHUNKS and nbytes < BATCH_BYTES:
            key = job.wanted.popleft()
            fetch = self._loading.get(key)
            if fetch is not None:
                fetch.jobs.add(job)
                job.fetches.add(fetch)
            elif self._store.slot_bytes(key) is None:
                # Not located: it was in the arena, and has gone since.
                level = job.located.get(key, NOWHERE)
                batch.setdefault((key[0], level), []).append(key)
                count += 1
                nbytes += HEADER_BYTES + (self._chunk_bytes(key[0]) or 0)
        busy = [key for (_, level), keys in batch.items() if self._is_busy(level) for key in keys]
        job.wanted.extendleft(reversed(busy))
        for (shard, level), keys in batch.items():
            if keys[0] in busy:
                continue
            if level == NOWHERE or not self._fetch(job, shard, level, keys, now):
                job.wanted.clear()  # what is behind them makes no hit longer
        return not (busy and job.wanted)

    def _is_busy(self, level: int) -> bool:
        return sum(fetch.level == level for fetch in self._fetches) >= MOST_FETCHES

    def _fetch(self, job: _Job, shard: bytes, level: int, keys: list[ChunkKey], now: float) -> bool:
        """Order one load; False if some of the chunks do not come."""
        chunk_bytes = self._chunk_bytes(shard)
        link = self._levels[level].link
        readable = self._levels[level].readable(shard)  # it was, before something was cleared
        if chunk_bytes is None or not readable or not link.may_try(now):
            return False
        nbytes = HEADER_BYTES + chunk_bytes
        digests = [digest for _, digest in keys]
        slots = self._store.reserve(LOADER, shard, digests, nbytes, now, job.asked.tenant)
        whole = len(slots.indices) == len(keys)  # else no room, or a worker is just storing them
        if not slots.indices:
            return False
        keys = [keys[index] for index in slots.indices]
        places = [self._arena.view(offset, nbytes) for offset in slots.offsets]
        fetch = _Fetch(keys, {job}, level, slots.ticket, now)
        job.fetches.add(fetch)
        self._loading |= dict.fromkeys(keys, fetch)
        self._fetches[fetch] = None

        def over(arrived: list[bool], now: float) -> None:
            bad = [
                index
                for index, key in enumerate(keys)
                if not (arrived[index] and _holds(places[index], key, chunk_bytes))
            ]
            self._over(fetch, bad, now)

        link.get_into(keys, places, now, over)
        return whole

    def _over(self, fetch: _Fetch, bad: list[int], now: float) -> None:
        self._forget(fetch)
        self._store.commit(LOADER, fetch.ticket, now, without=bad)
        unusable = set(bad)
        self._loaded(
            [key for index, key in enumerate(fetch.keys) if index not in unusable], fetch.level, now
        )
        self._go_on(fetch, now, failed=bool(bad))

    def _forget(self, fetch: _Fetch) -> None:
        """It is over, or nobody waits for it any more."""
        if fetch in self._fetches:
            del self._fetches[fetch]
            for key in fetch.keys:
                del self._loading[key]

    def _go_on(self, fetch: _Fetch, now: float, *, failed: bool) -> None:
        for job in fetch.jobs:
            job.fetches.discard(fetch)
            if self._waits(job):
                self._arrived(job, now)
                if failed:
                    job.wanted.clear()
        fetch.jobs.clear()
        for job in list(self._jobs.values()):
            if job.planned and self._waits(job):
                self._advance(job, now)

    def _arrived(self, job: _Job, now: float) -> None:
        before, asked = job.found, job.asked
        job.found = self._store.extend(
            asked.request, asked.shards, asked.digests, now, asked.windows
        )
        for digest in asked.digests[before : job.found]:
            level = job.located.get((asked.shards[0], digest))
            if level is None:  # it was here already, behind one that was not
                self._store.counters.hit += 1
            else:
                self._levels[level].link.counters.gained += 1

    def _waits(self, job: _Job) -> bool:
        return self._jobs.get(job.asked.request) is job

    def _end(self, job: _Job) -> None:
        del self._jobs[job.asked.request]
        if job.announced:
            self._store.counters.answered(len(job.asked.digests), job.found)
            self._inbox.reply(job.later, Found(chunks=job.found))


class _Reachable:
    """What a job can count on: in the arena, on its way to it, or located below. As keys."""

    def __init__(self, loads: TierLoads, job: _Job) -> None:
        self._is_coming = loads._is_coming
        self._located = job.located

    def prefix(self, shard: bytes, digests: Sequence[bytes]) -> list[ChunkKey]:
        keys = ((shard, digest) for digest in digests)
        return list(itertools.takewhile(self._is_there, keys))

    def resident(self, key: ChunkKey) -> ChunkKey | None:
        return key if self._is_there(key) else None

    def _is_there(self, key: ChunkKey) -> bool:
        return key in self._located or self._is_coming(key)


def _holds(place: memoryview, key: ChunkKey, chunk_bytes: int) -> bool:
    try:
        read_header(place, *key, chunk_bytes)
    except RemoteProtocolError as error:
        logger.warning("a tier gave out another chunk than it was asked for: %s", error)
        return False
    return True
