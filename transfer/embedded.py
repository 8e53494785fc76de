"""A whole cache inside this process: the arena and the service, without a server or a socket."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from lmcache_kernels.errors import (
    CapacityError,
    Closed,
    KVTransferError,
    RemoteError,
    TransferTimeout,
)

from .arguments import integer
from .memory.arena import SHM_DIRECTORY, Arena
from .messages import ErrorReply
from .serving.known_workers import Liveness
from .serving.later import Later
from .serving.service import CacheService

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .messages import Reply, Request
    from .tiering.tier import Tier

logger = logging.getLogger(__name__)

TICK_INTERVAL = 1.0
"""Seconds at most between calls of the service's ``tick`` where there are tiers."""

_ERRORS: dict[str, Callable[[str], KVTransferError]] = {
    "expired": TransferTimeout,
    "no_space": CapacityError,
}
"""What an error reply is where nobody is remote; a RemoteError otherwise."""


class EmbeddedCache:
    """The :class:`~lmcache_kernels.transfer.port.CachePort` of this very process; safe for threads.

    Workers never count as silent, because they end with the cache. A thread is started when a worker
    first lets the cache copy by itself, or if there are tiers.

    Args:
        arena_bytes: host memory for chunks.
        chunk_tokens: tokens of one chunk.
        directory: where the arena's file goes; workers attach it in /dev/shm.
        tiers: below the arena, in the order in which they are asked; closed with the cache.

    Raises:
        ConfigError: a size that is no integer above 0, or a directory that cannot be used.
        CapacityError: not so much room in it.
        TierUnavailable: a tier that cannot use the arena.
    """

    def __init__(
        self,
        arena_bytes: int,
        chunk_tokens: int = 256,
        directory: Path = SHM_DIRECTORY,
        *,
        tiers: Sequence[Tier] = (),
    ) -> None:
        arena_bytes = integer("arena_bytes", arena_bytes, 1)
        chunk_tokens = integer("chunk_tokens", chunk_tokens, 1)
        self._incarnation = secrets.token_hex(16)
        self._chunk_tokens = chunk_tokens
        self._arena = Arena.create(arena_bytes, directory)
        self._woken = threading.Event()
        try:
            self._service = CacheService(
                arena_name=self._arena.name,
                arena_bytes=self._arena.nbytes,
                chunk_tokens=chunk_tokens,
                incarnation=self._incarnation,
                liveness=Liveness(math.inf, math.inf),
                arena=self._arena,
                tiers=tiers,
                wake=self._woken.set,
            )
        except BaseException:
            self._arena.close()
            raise
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: dict[Later, tuple[Future[Reply], float]] = {}  # with their deadlines
        self._thread: threading.Thread | None = None
        self._tick = TICK_INTERVAL if tiers else math.inf  # seconds
        if tiers:
            self._start()

    @property
    def incarnation(self) -> str | None:
        """Random id of this cache; None after :meth:`close`."""
        return None if self._closed else self._incarnation

    @property
    def chunk_tokens(self) -> int | None:
        return self._chunk_tokens

    def request(self, message: Request, timeout: float) -> Future[Reply]:
        """See :meth:`.port.CachePort.request`. Finished already, but for transfers that this copies."""
        future: Future[Reply] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: somebody will finish it
        outcome: Reply | Later | Exception = Closed("the cache is closed")
        with self._lock:
            if not self._closed:
                now = time.monotonic()
                outcome = self._service.handle(message, now, now + timeout)
                if isinstance(outcome, Later):
                    self._wait_for(outcome, future, now + timeout)
        if not isinstance(outcome, Later):
            _finish(future, outcome)
        return future

    def stats(self) -> dict[str, int]:
        """Counters and gauges of the service."""
        with self._lock:
            return self._service.stats()

    def close(self) -> None:
        """Accept nothing more, stop copying and remove the arena; idempotent, bounded.

        Who has attached the arena keeps its own mapping.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._woken.set()
        self._service.close()  # nobody else uses it any more
        with self._lock:
            self._arena.close()
            waiting = [future for future, _ in self._waiting.values()]
            self._waiting.clear()
        for future in waiting:
            _finish(future, Closed("the cache is closed"))

    def __enter__(self) -> EmbeddedCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- replies that come later ------------------------------------------------------------------

    def _wait_for(self, later: Later, future: Future[Reply], deadline: float) -> None:
        self._waiting[later] = future, deadline
        if self._thread is None:
            self._start()
        self._woken.set()

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._run, name="lmcache-kernels-embedded", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        wait = self._tick
        while True:
            self._woken.wait(wait if wait < math.inf else None)
            self._woken.clear()
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                over = self._take_over(now)
                if self._tick < math.inf:
                    self._tick_service(now)
                first = min((at for _, at in self._waiting.values()), default=math.inf)
                wait = min(self._tick, max(0.0, min(first, self._service.next_due()) - now))
            for future, outcome in over:
                _finish(future, outcome)

    def _tick_service(self, now: float) -> None:
        try:
            self._service.tick(now)
        except Exception:  # this thread is needed for whoever waits
            logger.exception("periodic work failed")

    def _take_over(self, now: float) -> list[tuple[Future[Reply], Reply | Exception]]:
        """Requests that were answered, or whose deadline has passed."""
        over: list[tuple[Future[Reply], Reply | Exception]] = []
        for later, reply in self._service.finished(now):
            future, _ = self._waiting.pop(later, (None, 0.0))
            if future is not None:
                over.append((future, reply))
        late = [later for later, (_, at) in self._waiting.items() if at <= now]
        for later in late:
            future, _ = self._waiting.pop(later)
            over.append((future, TransferTimeout("no reply within the time that was given")))
        return over


def _finish(future: Future[Reply], outcome: Reply | Exception) -> None:
    if isinstance(outcome, ErrorReply):
        outcome = _ERRORS.get(outcome.code, partial(RemoteError, outcome.code))(outcome.message)
    try:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except BaseException:  # a callback must not end this thread, whatever it raises
        logger.exception("a callback of a request failed")
