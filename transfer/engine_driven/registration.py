"""A worker's standing with the cache: registered with the server there is, its arena attached."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_kernels.errors import (
    Closed,
    KVTransferError,
    PeerGone,
    RemoteError,
)
from lmcache_kernels.transfer.arguments import check_port
from lmcache_kernels.transfer.asking import answer, ask
from lmcache_kernels.transfer.messages import Done, Register, Registered, Unregister

from .attachment import Attachment
from .inline_slots import InlineSlots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_kernels.transfer.messages import Reply, Request
    from lmcache_kernels.transfer.port import CachePort

    from .attachment import Attached

logger = logging.getLogger(__name__)

R = TypeVar("R", bound="Reply")

_CLOSED = "the transfer context is closed"


class Registration:
    """Registers when it is first needed, and again when the server restarted or forgot the worker.

    Safe for threads.

    Args:
        port: the cache.
        instance: id of the worker.
        shard: id of the slice it moves; ``chunk_tokens``, ``payload_bytes``: of one chunk.
        pin: register the arena with CUDA.
        timeout: seconds a single request may take.
    """

    def __init__(
        self,
        port: CachePort,
        *,
        instance: int,
        shard: bytes,
        chunk_tokens: int,
        payload_bytes: int,
        pin: bool,
        timeout: float,
    ) -> None:
        self._port = port
        self._instance = instance
        self._shard = shard
        self._chunk_tokens = chunk_tokens
        self._payload_bytes = payload_bytes
        self._pin = pin
        self._timeout = timeout
        self._lock = threading.Lock()  # held while a registration is awaited
        self._swap = threading.Lock()  # of the attachment; never held across a wait
        self._attachment: Attached | None = None
        self._closed = False

    @contextmanager
    def attached(self) -> Iterator[Attached]:
        """The arena of the current server, which stays mapped meanwhile.

        Raises:
            KVTransferError: no server, or a refused registration.
        """
        arena = self._hold_current()
        try:
            yield arena
        finally:
            arena.release()

    def _hold_current(self) -> Attached:
        with self._lock:
            if self._closed:
                raise Closed(_CLOSED)
            incarnation = self._port.incarnation
            if incarnation is None:
                raise PeerGone("no cache server is connected")
            current = self._attachment
            if current is None or current.incarnation != incarnation:
                current = self._register(incarnation)
            with self._swap:
                if self._attachment is not current:
                    raise Closed(_CLOSED)
                current.hold()
            return current

    def _register(self, incarnation: str) -> Attached:
        check_port(self._port, self._chunk_tokens)
        message = Register(
            instance=self._instance, shard=self._shard, chunk_bytes=self._payload_bytes
        )
        reply = ask(self._port, message, Registered, self._timeout)
        fresh = self._attach(reply, incarnation)
        self._replace(fresh)
        return fresh

    def _attach(self, registered: Registered, incarnation: str) -> Attached:
        how: dict[str, Any] = {
            "incarnation": incarnation,
            "shard": self._shard,
            "payload_bytes": self._payload_bytes,
            "pin": self._pin,
        }
        try:
            return Attachment(registered, **how)
        except KVTransferError as error:
            logger.warning(
                "the cache server's memory cannot be mapped, so chunks go through its socket, several "
                "times as slowly: let both processes have the same /dev/shm and user. %s",
                error,
            )
            return InlineSlots(instance=self._instance, **how)

    def _replace(self, fresh: Attached | None) -> None:
        """Swap the attachment; the old one goes when its last user has released it."""
        with self._swap:
            stale = fresh
            if not self._closed:
                stale, self._attachment = self._attachment, fresh
        if stale is not None:
            stale.retire()

    # --- requests ---------------------------------------------------------------------------------

    def prepare(self, arena: Attached, message: Request, reply_type: type[R]) -> R:
        """:meth:`ask`; when the server does not know this worker, the next use registers again."""
        try:
            return self.ask(arena, message, reply_type)
        except RemoteError as error:
            if error.code == "unknown_instance":
                with self._lock:
                    if self._attachment is arena:
                        self._replace(None)
            raise

    def ask(self, arena: Attached, message: Request, reply_type: type[R]) -> R:
        """The reply of the server that ``arena`` is of, or its error; bounded by the timeout."""
        return answer(self.tell(arena, message), message, reply_type, self._timeout)

    def tell(self, arena: Attached, message: Request) -> Future[Reply]:
        """Send without waiting, unless the server that ``arena`` is of has a successor here.

        That one counts its tickets from the start again: what is said of an old ticket must not
        reach it once it has given out its own.
        """
        with self._swap:
            if self._attachment is arena:
                return self._port.request(message, self._timeout)
        gone: Future[Reply] = Future()
        gone.set_exception(PeerGone("the cache server does not know this transfer any more"))
        return gone

    def close(self, timeout: float, *, unregister: bool) -> None:
        """Let go of the arena and accept nothing more.

        Args:
            unregister: tell the server, which then gives the worker's slots to others.
        """
        with self._swap:
            self._closed = True
            arena, self._attachment = self._attachment, None
        if arena is None:
            return
        arena.retire()
        if not unregister or self._port.incarnation != arena.incarnation:
            return
        try:
            ask(self._port, Unregister(instance=self._instance), Done, timeout)
        except KVTransferError as error:
            logger.info("could not unregister: %s", error)
