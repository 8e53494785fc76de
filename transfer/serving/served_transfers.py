"""The stores and loads of workers that let the server copy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.transfer.messages import (
    Copied,
    Done,
    ErrorReply,
    LoadBlocks,
    Loaded,
    RegisterCache,
    Settle,
    StoreBlocks,
)

from .request_checks import (
    RefusedError,
    check_instance,
    check_tenant,
    check_transfers,
    checked_digests,
)
from .served_cache import stopped
from .served_caches import result_of
from .tickets import NO_TICKET

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmcache_kernels.transfer.messages import Reply, Request

    from .cache_copies import CacheCopies
    from .inbox import Inbox
    from .known_workers import KnownWorker, KnownWorkers
    from .later import Later
    from .served_cache import ServedCache
    from .served_caches import ServedCaches
    from .store import ChunkStore


class ServedTransfers:
    """Serves them. Copies run in the caches' threads; everything here is for the service's thread.

    Args:
        store, workers, inbox: the service's.
        caches: registered with it.

    Attributes:
        methods: what serves each request, given the time and a deadline by which it must be done, or
            not at all; raises RefusedError if it cannot be served.
    """

    def __init__(
        self, store: ChunkStore, workers: KnownWorkers, caches: ServedCaches, inbox: Inbox
    ) -> None:
        self._inbox = inbox
        self._store = store
        self._workers = workers
        self._caches = caches
        self.methods: dict[type[Request], Callable[[Any, float, float], Later | Reply]] = {
            RegisterCache: caches.register,
            StoreBlocks: self._store_blocks,
            LoadBlocks: self._load_blocks,
            Settle: self._settle,
        }

    def _store_blocks(self, request: StoreBlocks, now: float, deadline: float) -> Later | Reply:
        worker, cache, copies = self._served(request.instance, now)
        digests, blocks = _checked(request, copies, loading=False)
        check_tenant(request.tenant)
        cache.check_may_run(request.transfer)
        slots = self._store.reserve(
            cache.owner, worker.shard, digests, worker.slot_bytes, now, request.tenant
        )
        if not slots.indices:
            return Copied(ticket=NO_TICKET, chunks=0)
        ticket = slots.ticket
        cache.copying.add(ticket)

        def copied(task: Future[Any], now: float) -> Reply:
            cache.copying.discard(ticket)
            try:
                result_of(task, "failed")
                if cache.retired:
                    raise stopped()
                if now >= deadline:
                    raise RefusedError("expired", "the copy ended after the deadline")
            except RefusedError as refused:
                self._store.abort(cache.owner, ticket, now)
                return ErrorReply(code=refused.code, message=str(refused))
            return Copied(ticket=ticket, chunks=len(slots.indices))

        later, over = self._inbox.answered(copied)
        cache.run(
            "store",
            request.transfer,
            deadline,
            lambda permit: copies.gather(
                permit, request.event, digests, slots.offsets, slots.indices, blocks
            ),
            over,
        )
        return later

    def _load_blocks(self, request: LoadBlocks, now: float, deadline: float) -> Later | Reply:
        worker, cache, copies = self._served(request.instance, now)
        digests, blocks = _checked(request, copies, loading=True)
        cache.check_may_run(request.transfer)
        reading = self._store.open_read(cache.owner, worker.shard, digests, now)
        if not reading.offsets:
            return Loaded(chunks=0)

        def loaded(task: Future[Any], now: float) -> Reply:
            damaged: Sequence[int] = ()
            failed = True
            try:
                chunks, damaged = result_of(task, "failed")
                failed = False
            except RefusedError as refused:
                return ErrorReply(code=refused.code, message=str(refused))
            finally:
                self._store.close_read(cache.owner, reading.ticket, damaged, now, failed=failed)
            return Loaded(chunks=chunks)

        later, over = self._inbox.answered(loaded)
        cache.run(
            "load",
            request.transfer,
            deadline,
            lambda permit: copies.scatter(
                permit, request.event, digests, reading.offsets, blocks, request.skip_tokens
            ),
            over,
        )
        return later

    def _settle(self, request: Settle, now: float, deadline: float) -> Later | Reply:
        check_instance(request.instance)
        check_transfers(request.transfers)
        self._workers.seen(request.instance, now)
        caches = self._caches.of(request.instance)
        for cache in caches:
            cache.check_not_busy()
        later = self._inbox.when_all(
            [
                cache.when_closed if cache.retired else partial(cache.settle, request.transfers)
                for cache in caches
            ]
        )
        return later or Done()

    def _served(self, instance: int, now: float) -> tuple[KnownWorker, ServedCache, CacheCopies]:
        worker = self._workers.known(instance, now)
        cache = worker.cache
        if cache is None or cache.copies is None:
            raise RefusedError(
                "bad_request", f"worker {instance}: expected one that has registered its cache"
            )
        return worker, cache, cache.copies


def _checked(
    request: StoreBlocks | LoadBlocks, copies: CacheCopies, *, loading: bool
) -> tuple[list[bytes], list[tuple[int, ...]]]:
    """Digests and block ids of the request; RefusedError if any field cannot be right."""
    check_transfers([request.transfer])
    if isinstance(request, LoadBlocks) and request.skip_tokens < 0:
        raise RefusedError("bad_request", f"skip_tokens: expected >= 0, got {request.skip_tokens}")
    digests = checked_digests(request.digests)
    try:
        blocks = copies.check(request.blocks, request.event, len(digests), loading=loading)
    except LayoutError as error:
        raise RefusedError("bad_request", str(error)) from error
    return digests, blocks
