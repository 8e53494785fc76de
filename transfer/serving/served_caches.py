"""The caches that workers have registered with this process, from opening to closing."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import KVTransferError
from lmcache_kernels.transfer.messages import ErrorReply, Registered

from .known_workers import KnownWorker
from .request_checks import RefusedError, check_cache, check_instance, check_shard
from .served_arena import ServedArena
from .served_cache import ServedCache, stopped

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.messages import RegisterCache, Reply

    from .cache_copies import CacheCopies
    from .inbox import Inbox
    from .known_workers import KnownWorkers
    from .later import Later
    from .store import ChunkStore

logger = logging.getLogger(__name__)

MAX_CACHES = 64
"""Registered caches, those that are being opened or closed among them. Each has two threads."""


class ServedCaches:
    """Everything here is for the service's thread; the caches have their own.

    The first registration imports torch.

    Args:
        store, workers: the service's.
        arena: where the store's slots are.
        chunk_tokens: tokens of one chunk.
        inbox: the service's.
    """

    def __init__(
        self,
        store: ChunkStore,
        workers: KnownWorkers,
        arena: Arena,
        chunk_tokens: int,
        inbox: Inbox,
    ) -> None:
        self._store = store
        self._workers = workers
        self._arena = ServedArena(arena)
        self._chunk_tokens = chunk_tokens
        self._inbox = inbox
        self._caches: set[ServedCache] = set()
        self._opening: dict[int, ServedCache] = {}  # the last one of each instance
        # Negative, so unlike any instance: what an old registration still does is not the new one's.
        self._owners = itertools.count(-1, -1)

    def __len__(self) -> int:
        """Caches that are open, or are being opened or closed."""
        return len(self._caches)

    def of(self, instance: int) -> list[ServedCache]:
        """Those of a worker: one that it may use, and others that are being closed."""
        return [cache for cache in self._caches if cache.instance == instance]

    # --- registration -----------------------------------------------------------------------------

    def register(self, request: RegisterCache, now: float, deadline: float) -> Later:
        """Open a cache; it replaces the worker's last one when it is open.

        Raises:
            RefusedError: a request that cannot be right, or too many caches.
        """
        check_instance(request.instance)
        check_shard(request.shard)
        check_cache(request)
        if len(self._caches) >= MAX_CACHES:
            raise RefusedError("busy", f"{MAX_CACHES} caches are registered already")
        self.forget(request.instance)
        cache = ServedCache(request.instance, next(self._owners), self._inbox.post)
        self._caches.add(cache)
        self._opening[request.instance] = cache
        later, over = self._inbox.answered(
            lambda task, now: self._opened(request, cache, task, now)
        )
        cache.open(lambda: self._open(request), over)
        cache.when_closed(lambda now: self._closed(cache))
        return later

    def forget(self, instance: int) -> None:
        """A registration of the instance that is not complete yet never will be."""
        opening = self._opening.pop(instance, None)
        if opening is not None:
            opening.retire()

    def gone(self, instance: int) -> Later | None:
        """Done, when the worker's retired caches are closed; None: they are."""
        return self._inbox.when_all(
            [cache.when_closed for cache in self.of(instance) if cache.retired]
        )

    def close(self, timeout: float) -> None:
        """Stop everything and let go of all caches; copies that take longer than that go on."""
        for cache in list(self._caches):
            cache.retire()
        if not self._inbox.work_until(lambda: not self._caches, timeout):
            logger.warning("%d caches are still in use after %g s", len(self._caches), timeout)
        self._arena.close()

    def _open(self, request: RegisterCache) -> CacheCopies:
        """In the cache's thread."""
        from .cache_copies import CacheCopies

        return CacheCopies(request, self._chunk_tokens, self._arena)

    def _opened(
        self, request: RegisterCache, cache: ServedCache, task: Future[Any], now: float
    ) -> Reply:
        latest = self._opening.get(request.instance) is cache
        if latest:
            del self._opening[request.instance]
        try:
            if not latest:
                raise RefusedError("stopped", "the worker has left or registered again since")
            copies = result_of(task, "bad_request")
            worker = KnownWorker(request.shard, copies.layout.nbytes, cache.owner, cache)
            self._workers.add(request.instance, worker, now)
        except RefusedError as refused:
            cache.retire()
            return ErrorReply(code=refused.code, message=str(refused))
        logger.info(
            "worker %d registered its cache: shard %s, %d bytes a chunk, on %s",
            *(request.instance, request.shard.hex()[:16], worker.chunk_bytes),
            copies.groups[0].device,
        )
        return Registered(arena_name=self._arena.name, arena_bytes=self._arena.nbytes)

    def _closed(self, cache: ServedCache) -> None:
        self._caches.discard(cache)
        self._store.drop_owner(cache.owner)


def result_of(task: Future[Any], code: str) -> Any:
    """What a task has returned; a RefusedError of ``code`` unless it has refused by itself."""
    if task.cancelled():
        raise stopped()
    try:
        return task.result()
    except RefusedError:
        raise
    except KVTransferError as error:
        raise RefusedError(code, str(error)) from error
    except Exception as error:
        logger.error("what a worker asked for failed", exc_info=error)
        raise RefusedError("failed", f"{type(error).__name__} in the server: {error}") from error
