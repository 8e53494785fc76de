"""Slots by message: the requests of workers that cannot map the arena."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from lmcache_kernels.transfer.messages import MAX_PART, Done, GetPart, Part, PutPart

from .request_checks import RefusedError

if TYPE_CHECKING:
    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.messages import Reply

    from .known_workers import KnownWorkers
    from .store import ChunkStore

    AnyPart: TypeAlias = PutPart | GetPart


class ServedParts:
    """Serves them; for the service's thread, which copies at most ``MAX_PART`` bytes at a time.

    A worker reaches only slots of its own tickets: those it has reserved and not committed for
    writing, those it holds for reading.

    Args:
        store, workers: the service's.
        arena: where the store's slots are.
    """

    def __init__(self, store: ChunkStore, workers: KnownWorkers, arena: Arena) -> None:
        self._store = store
        self._workers = workers
        self._arena = arena

    def put(self, request: PutPart, now: float) -> Reply:
        start, end = self._range(request, len(request.data), now)
        self._arena.view(start, end - start)[:] = request.data
        return Done()

    def get(self, request: GetPart, now: float) -> Reply:
        start, end = self._range(request, request.nbytes, now)
        return Part(data=bytes(self._arena.view(start, end - start)))

    def _range(self, request: AnyPart, nbytes: int, now: float) -> tuple[int, int]:
        """Where the part lies in the arena.

        Raises:
            RefusedError: nowhere that the worker may reach.
        """
        worker = self._workers.known(request.instance, now)
        if worker.cache is not None:
            raise RefusedError(
                "bad_request", f"worker {request.instance}: the server copies for it, not it itself"
            )
        writing = isinstance(request, PutPart)
        found = self._store.slot(worker.owner, request.ticket, request.index, now, writing=writing)
        if found is None:
            raise RefusedError(
                "unknown_ticket",
                f"{'store' if writing else 'retrieve'} {request.ticket} of worker "
                f"{request.instance}: it has no chunk {request.index} (any more)",
            )
        offset, slot_bytes = found
        if not (request.start >= 0 and 1 <= nbytes <= min(MAX_PART, slot_bytes - request.start)):
            raise RefusedError(
                "bad_request",
                f"part: expected 1 to {MAX_PART} bytes inside a slot of {slot_bytes}, got {nbytes} "
                f"at {request.start}",
            )
        return offset + request.start, offset + request.start + nbytes
