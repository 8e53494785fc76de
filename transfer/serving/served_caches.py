"""The caches that workers have registered with this process, from opening to closing."""

from __future__ import annotations

import itertools
import logging
import queue
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from lmcache_kernels.errors import KVTransferError
from lmcache_kernels.transfer.messages import Done, ErrorReply, Registered

from .known_workers import KnownWorker
from .later import Later
from .request_checks import RefusedError, check_cache, check_instance, check_shard
from .served_arena import ServedArena
from .served_cache import ServedCache, stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.messages import RegisterCache, Reply

    from .cache_copies import CacheCopies
    from .known_workers import KnownWorkers
    from .store import ChunkStore

    Action: TypeAlias = Callable[[float], None]
    """To be called in the service's thread, with the time."""

    Over: TypeAlias = Callable[[Any, float], None]
    """To be called there with a task that is over, and the time."""

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
        wake: called from any thread when :meth:`finished` has something to do.
    """

    def __init__(
        self,
        store: ChunkStore,
        workers: KnownWorkers,
        arena: Arena,
        chunk_tokens: int,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._workers = workers
        self._arena = ServedArena(arena)
        self._chunk_tokens = chunk_tokens
        self._wake = wake
        self._caches: set[ServedCache] = set()
        self._opening: dict[int, ServedCache] = {}  # the last one of each instance
        # Negative, so unlike any instance: what an old registration still does is not the new one's.
        self._owners = itertools.count(-1, -1)
        self._posted: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._replies: list[tuple[Later, Reply]] = []

    def __len__(self) -> int:
        """Caches that are open, or are being opened or closed."""
        return len(self._caches)

    def of(self, instance: int) -> list[ServedCache]:
        """Those of a worker: one that it may use, and others that are being closed."""
        return [cache for cache in self._caches if cache.instance == instance]

    # --- replies ----------------------------------------------------------------------------------

    def finished(self, now: float) -> list[tuple[Later, Reply]]:
        """Do what the caches' threads have left to do here; the replies that are due."""
        with suppress(queue.Empty):
            while True:
                self._posted.get_nowait()(now)
        replies, self._replies = self._replies, []
        return replies

    def answered(self, produce: Callable[[Any, float], Reply]) -> tuple[Later, Over]:
        """A reply that comes later, and what to call when ``produce`` can make it."""
        later = Later()

        def over(task: Any, now: float) -> None:
            try:
                reply = produce(task, now)
            except Exception as error:
                logger.exception("the end of a transfer could not be served")
                reply = ErrorReply(code="internal", message=type(error).__name__)
            self._replies.append((later, reply))

        return later, over

    def when_all(self, events: Sequence[Callable[[Action], None]]) -> Later | None:
        """Done, when each of the events has called the action it was given; None: there is none."""
        if not events:
            return None
        later, over = self.answered(lambda _, now: Done())
        left = len(events)

        def one_over(now: float) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                over(None, now)

        for event in events:
            event(one_over)
        return later

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
        cache = ServedCache(request.instance, next(self._owners), self._post)
        self._caches.add(cache)
        self._opening[request.instance] = cache
        later, over = self.answered(lambda task, now: self._opened(request, cache, task, now))
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
        return self.when_all([cache.when_closed for cache in self.of(instance) if cache.retired])

    def close(self, timeout: float) -> None:
        """Stop everything and let go of all caches; copies that take longer than that go on."""
        end = time.monotonic() + timeout
        for cache in list(self._caches):
            cache.retire()
        with suppress(queue.Empty):
            while self._caches:
                left = max(0.0, end - time.monotonic())
                self._posted.get(timeout=left)(time.monotonic())
        if self._caches:
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

    def _post(self, action: Action) -> None:
        self._posted.put(action)
        self._wake()


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
