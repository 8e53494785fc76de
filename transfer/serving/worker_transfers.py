"""The stores and loads of workers that copy themselves: slots to write and to read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lmcache_kernels.errors import LocalProtocolError
from lmcache_kernels.transfer.messages import Done, LoadSlots, StoreSlots

from .request_checks import RefusedError, check_tenant, checked_digests

if TYPE_CHECKING:
    from lmcache_kernels.transfer.messages import (
        AbortStore,
        CommitRetrieve,
        CommitStore,
        PrepareRetrieve,
        PrepareStore,
        Reply,
    )

    from .known_workers import KnownWorker, KnownWorkers
    from .store import ChunkStore

logger = logging.getLogger(__name__)


class WorkerTransfers:
    """Serves them. A store that the server has copied is committed here, too.

    Args:
        store, workers: the service's.
    """

    def __init__(self, store: ChunkStore, workers: KnownWorkers) -> None:
        self._store = store
        self._workers = workers

    def prepare_store(self, request: PrepareStore, now: float) -> Reply:
        worker = self._worker(request.instance, now)
        digests = checked_digests(request.digests)
        check_tenant(request.tenant)
        slots = self._store.reserve(
            worker.owner, worker.shard, digests, worker.slot_bytes, now, request.tenant
        )
        return StoreSlots(ticket=slots.ticket, indices=slots.indices, offsets=slots.offsets)

    def commit_store(self, request: CommitStore, now: float) -> Reply:
        worker = self._writer(request, now)
        if not self._store.commit(worker.owner, request.ticket, now):
            raise _unknown_ticket("store", request)
        return Done()

    def abort_store(self, request: AbortStore, now: float) -> Reply:
        worker = self._writer(request, now)
        if not self._store.abort(worker.owner, request.ticket, now):
            raise _unknown_ticket("store", request)
        return Done()

    def prepare_retrieve(self, request: PrepareRetrieve, now: float) -> Reply:
        worker = self._worker(request.instance, now)
        digests = checked_digests(request.digests)
        reading = self._store.open_read(worker.owner, worker.shard, digests, now)
        return LoadSlots(ticket=reading.ticket, offsets=reading.offsets)

    def commit_retrieve(self, request: CommitRetrieve, now: float) -> Reply:
        worker = self._worker(request.instance, now)
        try:
            known = self._store.close_read(
                worker.owner, request.ticket, request.damaged, now, failed=request.failed
            )
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
