"""A cache as messages see it: every request gets one reply, whatever is wrong with it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import LocalProtocolError

from .known_workers import KnownWorker, KnownWorkers
from .messages import (
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
    LoadSlots,
    Lookup,
    Ping,
    Pong,
    PrepareRetrieve,
    PrepareStore,
    PutPart,
    Register,
    Registered,
    StoreSlots,
    Unregister,
    Welcome,
)
from .request_checks import (
    RefusedError,
    check_chunk_bytes,
    check_instance,
    check_name,
    check_shard,
    checked_digests,
    unique_shards,
)
from .served_caches import ServedCaches
from .served_parts import ServedParts
from .served_transfers import ServedTransfers
from .store import LEASE_TTL, READ_TTL, WRITE_TTL, ChunkStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from .arena import Arena
    from .later import Later
    from .messages import Reply, Request

logger = logging.getLogger(__name__)

WORKER_TTL = 120.0
"""Seconds of silence after which a worker counts as dead; workers ping far more often."""


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
        worker_ttl: seconds after which a silent worker is dropped with all it was doing.
        arena: the arena, if this process copies for workers that want it to.
        wake: called, from any thread, when :meth:`finished` has something to do.

    Raises:
        ConfigError: a size or time that is not above 0.
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
        worker_ttl: float = WORKER_TTL,
        arena: Arena | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._arena = Registered(arena_name=arena_name, arena_bytes=arena_bytes)
        self._chunk_tokens = chunk_tokens
        self._incarnation = incarnation
        self._store = ChunkStore(
            arena_bytes, write_ttl=write_ttl, lease_ttl=lease_ttl, read_ttl=read_ttl
        )
        self._workers = KnownWorkers(self._store, arena_bytes, worker_ttl)
        self._caches: ServedCaches | None = None
        self._served: ServedTransfers | None = None
        if arena is not None:
            self._caches = ServedCaches(self._store, self._workers, arena, chunk_tokens, wake)
            self._served = ServedTransfers(self._store, self._workers, self._caches)
        self._refused = 0
        self._failed = 0
        self._methods: dict[type[Request], Callable[[Any, float], Reply | Later]] = {
            Hello: self._hello,
            Ping: self._ping,
            Register: self._register,
            Unregister: self._unregister,
            Lookup: self._lookup,
            EndSession: self._end_session,
            Clear: self._clear,
            PrepareStore: self._prepare_store,
            CommitStore: self._commit_store,
            AbortStore: self._abort_store,
            PrepareRetrieve: self._prepare_retrieve,
            CommitRetrieve: self._commit_retrieve,
        }
        if arena is not None:
            parts = ServedParts(self._store, self._workers, arena)
            self._methods |= {PutPart: parts.put, GetPart: parts.get}

    def handle(self, request: Request, now: float, deadline: float = math.inf) -> Reply | Later:
        """The reply to ``request``, or that it comes from :meth:`finished`; never raises.

        Args:
            request: any; what cannot be served is answered with an :class:`ErrorReply`.
            now: monotonic seconds; never goes back.
            deadline: from which on nobody waits for the reply, on the same clock.
        """
        try:
            if self._served is not None and self._served.serves(request):
                return self._served.handle(request, now, deadline)
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
        return [] if self._caches is None else self._caches.finished(now)

    def close(self, timeout: float = 5.0) -> None:
        """Stop copying and let go of the workers' caches, before the arena goes.

        Replies that were due are not given any more.
        """
        if self._caches is not None:
            self._caches.close(timeout)

    def tick(self, now: float) -> None:
        """Drop silent workers and end what has taken too long; call every few seconds."""
        for instance in self._workers.expire(now):
            logger.warning(
                "worker %d was silent for %g s: dropped, what it was writing is discarded",
                instance,
                self._workers.ttl,
            )
        self._store.tick(now)

    def stats(self) -> dict[str, int]:
        """Counters since the start and what there is now; see :class:`~.store.Counters`."""
        return self._store.stats() | {
            "workers": len(self._workers),
            "caches": 0 if self._caches is None else len(self._caches),
            "refused": self._refused,
            "failed": self._failed,
        }

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
            registered = self._workers.seen(request.instance, now) is not None
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

    def _lookup(self, request: Lookup, now: float) -> Reply:
        check_name(request.request)
        shards = unique_shards(request.shards)
        digests = checked_digests(request.digests)
        return Found(chunks=self._store.lookup(request.request, shards, digests, now))

    def _end_session(self, request: EndSession, now: float) -> Reply:
        check_name(request.request)
        self._store.end_session(request.request)
        return Done()

    def _clear(self, request: Clear, now: float) -> Reply:
        shards = unique_shards(request.shards) if request.shards else []
        return Cleared(chunks=self._store.clear(shards, now))

    # --- transfers --------------------------------------------------------------------------------

    def _prepare_store(self, request: PrepareStore, now: float) -> Reply:
        worker = self._worker(request.instance, now)
        digests = checked_digests(request.digests)
        slots = self._store.reserve(worker.owner, worker.shard, digests, worker.slot_bytes, now)
        return StoreSlots(ticket=slots.ticket, indices=slots.indices, offsets=slots.offsets)

    def _commit_store(self, request: CommitStore, now: float) -> Reply:
        worker = self._writer(request, now)
        if not self._store.commit(worker.owner, request.ticket, now):
            raise _unknown_ticket("store", request)
        return Done()

    def _abort_store(self, request: AbortStore, now: float) -> Reply:
        worker = self._writer(request, now)
        if not self._store.abort(worker.owner, request.ticket, now):
            raise _unknown_ticket("store", request)
        return Done()

    def _prepare_retrieve(self, request: PrepareRetrieve, now: float) -> Reply:
        worker = self._worker(request.instance, now)
        digests = checked_digests(request.digests)
        reading = self._store.open_read(worker.owner, worker.shard, digests, now)
        return LoadSlots(ticket=reading.ticket, offsets=reading.offsets)

    def _commit_retrieve(self, request: CommitRetrieve, now: float) -> Reply:
        worker = self._worker(request.instance, now)
        try:
            known = self._store.close_read(worker.owner, request.ticket, request.damaged, now)
        except LocalProtocolError as error:
            raise RefusedError("bad_request", str(error)) from error
        if not known:
            raise _unknown_ticket("retrieve", request)
        if request.damaged:
            logger.warning(
                "worker %d found %d damaged chunks; they are dropped",
                request.instance,
                len(set(request.damaged)),
            )
        return Done()

    # --- inside -----------------------------------------------------------------------------------

    def _worker(self, instance: int, now: float) -> KnownWorker:
        """The worker, which must be one that copies itself."""
        worker = self._workers.known(instance, now)
        if worker.cache is not None:
            raise RefusedError(
                "bad_request", f"worker {instance}: the server copies for it, not it itself"
            )
        return worker

    def _writer(self, request: CommitStore | AbortStore, now: float) -> KnownWorker:
        """The worker, whose ticket must not be one that is still being copied."""
        worker = self._workers.known(request.instance, now)
        if worker.cache is not None and request.ticket in worker.cache.copying:
            raise _unknown_ticket("store", request)
        return worker


def _unknown_ticket(what: str, request: CommitStore | AbortStore | CommitRetrieve) -> RefusedError:
    return RefusedError(
        "unknown_ticket",
        f"{what} {request.ticket} of worker {request.instance}: not known; ended, expired, "
        "cleared, or never prepared",
    )
