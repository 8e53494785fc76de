"""A cache as messages see it: every request gets one reply, whatever is wrong with it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import (
    PROTOCOL_VERSION,
    AbortStore,
    Clear,
    Cleared,
    CommitRetrieve,
    CommitStore,
    Done,
    EndSession,
    ErrorReply,
    Found,
    GetPart,
    Hello,
    Lookup,
    Pin,
    Ping,
    Pong,
    PrepareRetrieve,
    PrepareStore,
    PutPart,
    Register,
    Registered,
    Unpin,
    Unregister,
    Welcome,
)
from lmcache_kernels.transfer.tiering.loading import Asked
from lmcache_kernels.transfer.tiering.tiers import Tiers

from .inbox import Inbox
from .known_workers import KnownWorker, KnownWorkers, Liveness
from .leases import LEASE_TTL
from .pins import PIN_LIMIT
from .request_checks import (
    RefusedError,
    check_chunk_bytes,
    check_instance,
    check_name,
    check_shard,
    check_tenant,
    checked_digests,
    unique_needs,
    unique_shards,
)
from .served_caches import ServedCaches
from .served_parts import ServedParts
from .served_pins import ServedPins
from .served_transfers import ServedTransfers
from .store import ChunkStore
from .tickets import READ_TTL, WRITE_TTL
from .worker_transfers import WorkerTransfers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.messages import Reply, Request
    from lmcache_kernels.transfer.tiering.tier import Tier

    from .accounts import QuotaUse
    from .chunk_table import ChunkState
    from .eviction import Eviction
    from .known_workers import WorkerState
    from .later import Later
    from .pins import PinState
    from .quotas import Quotas

logger = logging.getLogger(__name__)


class CacheService:
    """Serves requests on a chunk store whose slots lie in one arena.

    Workers copy to and from the arena themselves, or register their caches and let this process do
    it, in threads that are not the caller's, or send what they cannot map. Not safe for threads by itself.

    Args:
        arena_name, arena_bytes: what workers attach.
        chunk_tokens: tokens of one chunk, told to whoever connects.
        incarnation: random id of this server's life.
        write_ttl: seconds a worker has to commit a store.
        lease_ttl: seconds a lookup keeps its chunks.
        read_ttl: seconds a worker has to end a retrieve.
        liveness: after how long a silent worker is dropped with all it was doing.
        eviction: which chunks go, and when.
        quotas: of tenants, to begin with.
        pin_limit: part of the arena that all pins together may hold.
        arena: the arena, if this process copies for workers that want it to, or from and to tiers.
        tiers: below the arena, in the order in which they are asked; closed with the service.
        tier_store_policy: what goes down to them, one of :data:`.policies.STORE_POLICIES`.
        wake: called, from any thread, when :meth:`finished` has something to do.

    Raises:
        ConfigError: a size or time that is not above 0, a limit that is not in [0, 1], a policy that
            does not exist, or tiers without an arena.
        TierUnavailable: a tier that cannot use the arena.
    """

    def __init__(
        self,
        *,
        arena_name: str,
        arena_bytes: int,
        chunk_tokens: int,
        incarnation: str,
        write_ttl: float = WRITE_TTL,
        lease_ttl: float = LEASE_TTL,
        read_ttl: float = READ_TTL,
        liveness: Liveness | None = None,
        eviction: Eviction | None = None,
        quotas: Quotas | None = None,
        pin_limit: float = PIN_LIMIT,
        arena: Arena | None = None,
        tiers: Sequence[Tier] = (),
        tier_store_policy: str = "all",
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._arena = Registered(arena_name=arena_name, arena_bytes=arena_bytes)
        self._chunk_tokens = chunk_tokens
        self._incarnation = incarnation
        self._store = ChunkStore(
            arena_bytes,
            write_ttl=write_ttl,
            lease_ttl=lease_ttl,
            read_ttl=read_ttl,
            eviction=eviction,
            quotas=quotas,
            pin_limit=pin_limit,
        )
        self._workers = KnownWorkers(self._store, arena_bytes, liveness or Liveness())
        self._inbox = Inbox(wake)
        self._caches: ServedCaches | None = None
        self._tiers: Tiers | None = None
        self._timed: dict[type[Request], Callable[[Any, float, float], Reply | Later]] = {
            Lookup: self._lookup
        }
        if arena is not None:
            self._caches = ServedCaches(
                self._store, self._workers, arena, chunk_tokens, self._inbox
            )
            served = ServedTransfers(self._store, self._workers, self._caches, self._inbox)
            self._timed |= served.methods
        self._workers_lost = 0
        self._refused = 0
        self._failed = 0
        transfers = WorkerTransfers(self._store, self._workers)
        pins = ServedPins(self._store)
        self._methods: dict[type[Request], Callable[[Any, float], Reply | Later]] = {
            Hello: self._hello,
            Ping: self._ping,
            Register: self._register,
            Unregister: self._unregister,
            EndSession: self._end_session,
            Pin: pins.pin,
            Unpin: pins.unpin,
            Clear: self._clear,
            PrepareStore: transfers.prepare_store,
            CommitStore: transfers.commit_store,
            AbortStore: transfers.abort_store,
            PrepareRetrieve: transfers.prepare_retrieve,
            CommitRetrieve: transfers.commit_retrieve,
        }
        if arena is not None:
            parts = ServedParts(self._store, self._workers, arena)
            self._methods |= {PutPart: parts.put, GetPart: parts.get}
        if tiers:
            if arena is None:
                raise ConfigError("tiers: expected an arena of this process to copy from and to")
            self._tiers = Tiers(
                tiers,
                self._store,
                self._inbox,
                arena,
                self._workers.chunk_bytes,
                tier_store_policy,
            )
            self._store.on_publish = self._tiers.published
            self._store.on_damage = self._tiers.damaged

    def handle(self, request: Request, now: float, deadline: float = math.inf) -> Reply | Later:
        """The reply to ``request``, or that it comes from :meth:`finished`; never raises.

        Args:
            request: any; what cannot be served is answered with an :class:`ErrorReply`.
            now: monotonic seconds; never goes back.
            deadline: from which on nobody waits for the reply, on the same clock.
        """
        try:
            timed = self._timed.get(type(request))
            if timed is not None:
                return timed(request, now, deadline)
            method = self._methods.get(type(request))
            if method is None:
                raise RefusedError(
                    "unsupported",
                    f"operation {type(request).__name__} is not served here (protocol version "
                    f"{PROTOCOL_VERSION})",
                )
            return method(request, now)
        except RefusedError as refused:
            self._refused += 1
            return ErrorReply(code=refused.code, message=str(refused))
        except Exception as error:
            self._failed += 1
            logger.exception("%s could not be served", type(request).__name__)
            return ErrorReply(
                code="internal",
                message=f"{type(request).__name__}: {type(error).__name__} in the server; its log "
                "has the trace",
            )

    def finished(self, now: float) -> list[tuple[Later, Reply]]:
        """Replies that are due now, each to what :meth:`handle` had returned; never raises."""
        if self._tiers is not None:
            self._inbox.do(self._tiers.expire, now)
        return self._inbox.finished(now)

    def next_due(self) -> float:
        """When :meth:`finished` will have something to do even if nobody wakes the caller."""
        return math.inf if self._tiers is None else self._tiers.due()

    def close(self, timeout: float = 5.0) -> None:
        """Stop copying, let go of the workers' caches and close the tiers, before the arena goes.

        Replies that were due are not given any more.
        """
        if self._caches is not None:
            self._caches.close(timeout)
        if self._tiers is not None:
            self._tiers.close(timeout)

    def tick(self, now: float) -> None:
        """Drop silent workers, end what has taken too long, make room; call every second or so."""
        for instance, seconds in self._workers.expire(now):
            self._workers_lost += 1
            logger.warning(
                "worker %d was silent for %g s: dropped, what it was writing is discarded",
                instance,
                seconds,
            )
        self._store.tick(now)
        self._store.make_room()
        if self._tiers is not None:
            self._tiers.tick(now)

    def change(self, eviction: Eviction, liveness: Liveness, quotas: Quotas) -> None:
        """Other limits from now on; the eviction policy stays what it is."""
        self._store.change(eviction.watermark, eviction.ratio)
        self._store.change_quotas(quotas)
        self._workers.change(liveness)

    def under_way(self) -> dict[str, int]:
        """How much of what is not over; all 0 is when nothing would be lost with this process's end,
        other than what is in the arena alone."""
        tiers = self._tiers
        return self._store.under_way() | {
            "lookups that wait for tiers": 0 if tiers is None else tiers.loads,
            "chunks on their way to tiers": 0
            if tiers is None or tiers.over
            else max(1, tiers.waiting),
        }

    @property
    def tiers_over(self) -> bool:
        """All that was stored has gone down to the tiers, as far as they take it."""
        return self._tiers is None or self._tiers.over

    def tier_stats(self) -> dict[str, dict[str, int | float]]:
        """Per tier its counters and gauges; see :class:`~lmcache_kernels.transfer.tiering.link.TierCounters`."""
        return {} if self._tiers is None else self._tiers.stats()

    @property
    def chunk_tokens(self) -> int:
        """Of one chunk."""
        return self._chunk_tokens

    @property
    def incarnation(self) -> str:
        """Random id of this server's life."""
        return self._incarnation

    def workers(self, now: float) -> list[WorkerState]:
        """Who is registered."""
        return self._workers.states(now)

    def chunks(self, first: int, most: int) -> list[ChunkState]:
        """Some of the chunks in the arena; see :meth:`.store.ChunkStore.chunks`."""
        return self._store.chunks(first, most)

    def stats(self) -> dict[str, int]:
        """Counters since the start and what there is now; see :class:`~.serving.counters.Counters`.

        Bytes of chunks are those of their payloads.
        """
        stats = self._store.stats()
        for what in ("stored", "loaded", "evicted"):
            stats[f"{what}_bytes"] -= HEADER_BYTES * stats[what]
        return stats | {
            "workers": len(self._workers),
            "workers_lost": self._workers_lost,
            "caches": 0 if self._caches is None else len(self._caches),
            "refused": self._refused,
            "failed": self._failed,
            "waiting_lookups": 0 if self._tiers is None else self._tiers.loads,
            "waiting_stores": 0 if self._tiers is None else self._tiers.waiting,
        }

    # --- quotas and pins --------------------------------------------------------------------------

    def set_quota(self, tenant: str | None, nbytes: int | None) -> None:
        """See :meth:`.store.ChunkStore.set_quota`."""
        self._store.set_quota(tenant, nbytes)

    def quotas(self) -> dict[str, QuotaUse]:
        """See :meth:`.store.ChunkStore.named_quotas`."""
        return self._store.named_quotas()

    @property
    def default_quota(self) -> int | None:
        """See :attr:`.store.ChunkStore.default_quota`."""
        return self._store.default_quota

    def pins(self, now: float) -> list[PinState]:
        """All there are, by name."""
        return self._store.pins(now)

    # --- connection -------------------------------------------------------------------------------

    def _hello(self, request: Hello, now: float) -> Reply:
        if request.protocol != PROTOCOL_VERSION:
            raise RefusedError(
                "unsupported",
                f"protocol version: expected {PROTOCOL_VERSION}, got {request.protocol}: install "
                "the same release on both sides",
            )
        return Welcome(
            protocol=PROTOCOL_VERSION,
            incarnation=self._incarnation,
            clock=now,
            chunk_tokens=self._chunk_tokens,
        )

    def _ping(self, request: Ping, now: float) -> Reply:
        registered = False
        if request.instance is not None:
            check_instance(request.instance)
            registered = self._workers.pinged(request.instance, now)
        return Pong(incarnation=self._incarnation, registered=registered)

    # --- workers ----------------------------------------------------------------------------------

    def _register(self, request: Register, now: float) -> Reply:
        check_instance(request.instance)
        check_shard(request.shard)
        check_chunk_bytes(request.chunk_bytes)
        self._forget_opening(request.instance)
        worker = KnownWorker(request.shard, request.chunk_bytes, owner=request.instance)
        self._workers.add(request.instance, worker, now)
        logger.info(
            "worker %d registered: shard %s, %d bytes a chunk",
            request.instance,
            request.shard.hex()[:16],
            request.chunk_bytes,
        )
        return self._arena

    def _unregister(self, request: Unregister, now: float) -> Reply | Later:
        check_instance(request.instance)
        self._forget_opening(request.instance)
        self._workers.remove(request.instance)
        later = None if self._caches is None else self._caches.gone(request.instance)
        return later or Done()

    def _forget_opening(self, instance: int) -> None:
        if self._caches is not None:
            self._caches.forget(instance)

    # --- scheduler --------------------------------------------------------------------------------

    def _lookup(self, request: Lookup, now: float, deadline: float) -> Reply | Later:
        check_name(request.request)
        check_tenant(request.tenant)
        shards, windows = unique_needs(request.shards, request.windows)
        digests = checked_digests(request.digests)
        found = self._store.lookup(request.request, shards, digests, now, windows)
        reply: Found | Later = Found(chunks=found)
        if self._tiers is not None:
            asked = Asked(request.request, shards, windows, digests, request.tenant)
            reply = self._tiers.looked_up(asked, found, now, deadline)
        if isinstance(reply, Found):
            self._store.counters.answered(len(digests), reply.chunks)
        return reply

    def _end_session(self, request: EndSession, now: float) -> Reply:
        check_name(request.request)
        if self._tiers is not None:
            self._tiers.end_session(request.request)
        self._store.end_session(request.request)
        return Done()

    def _clear(self, request: Clear, now: float) -> Reply:
        shards = unique_shards(request.shards) if request.shards else []
        if self._tiers is not None:
            self._tiers.clear(shards, now)
        cleared = self._store.clear(shards, now)
        logger.info(
            "cleared %d chunks of %s, here and in tiers",
            cleared,
            ", ".join(shard.hex()[:16] for shard in shards[:8]) or "every shard",
        )
        return Cleared(chunks=cleared)
