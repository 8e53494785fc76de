"""A whole cache inside this process: the arena and the service, without a server or a socket."""

from __future__ import annotations

import math
import secrets
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lmcache_kernels.errors import Closed, RemoteError

from .arena import SHM_DIRECTORY, Arena
from .messages import ErrorReply
from .service import CacheService

if TYPE_CHECKING:
    from pathlib import Path

    from .messages import Reply, Request


class EmbeddedCache:
    """The :class:`~lmcache_kernels.transfer.port.CachePort` of this very process; safe for threads.

    Workers never count as silent, because they end with the cache.

    Args:
        arena_bytes: host memory for chunks.
        chunk_tokens: tokens of one chunk.
        directory: where the arena's file goes; workers attach it in /dev/shm.

    Raises:
        ConfigError: a size below 1 or a directory that cannot be used.
        CapacityError: not so much room in it.
    """

    def __init__(
        self, arena_bytes: int, chunk_tokens: int = 256, directory: Path = SHM_DIRECTORY
    ) -> None:
        self._incarnation = secrets.token_hex(16)
        self._chunk_tokens = chunk_tokens
        self._arena = Arena.create(arena_bytes, directory)
        self._service = CacheService(
            arena_name=self._arena.name,
            arena_bytes=self._arena.nbytes,
            chunk_tokens=chunk_tokens,
            incarnation=self._incarnation,
            worker_ttl=math.inf,
        )
        self._lock = threading.Lock()
        self._closed = False

    @property
    def incarnation(self) -> str | None:
        """Random id of this cache; None after :meth:`close`."""
        return None if self._closed else self._incarnation

    @property
    def chunk_tokens(self) -> int | None:
        return self._chunk_tokens

    def request(self, message: Request, timeout: float) -> Future[Reply]:
        """A finished future: the reply, or RemoteError, or Closed. Nothing is waited for."""
        future: Future[Reply] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(Closed("the cache is closed"))
                return future
            reply = self._service.handle(message, time.monotonic())
        if isinstance(reply, ErrorReply):
            future.set_exception(RemoteError(reply.code, reply.message))
        else:
            future.set_result(reply)
        return future

    def stats(self) -> dict[str, int]:
        """Counters and gauges of the service."""
        with self._lock:
            return self._service.stats()

    def close(self) -> None:
        """Accept nothing more and remove the arena; idempotent.

        Who has attached the arena keeps its own mapping.
        """
        with self._lock:
            self._closed = True
            self._arena.close()

    def __enter__(self) -> EmbeddedCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
