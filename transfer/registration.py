"""A worker's standing with the cache: registered with the server there is, its arena attached."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, TypeVar

from lmcache_kernels.errors import (
    Closed,
    KVTransferError,
    PeerGone,
    RemoteError,
    RemoteProtocolError,
)

from .attachment import Attachment
from .messages import Register, Registered, Unregister

if TYPE_CHECKING:
    from .messages import Reply, Request
    from .port import CachePort

logger = logging.getLogger(__name__)

R = TypeVar("R", bound="Reply")


class Registration:
    """Registers when it is first needed, and again when the server restarted or forgot the worker.

    Safe for threads.

    Args:
        port: the cache.
        instance: id of the worker.
        shard: id of the slice it moves; ``payload_bytes``: of one chunk.
        pin: register the arena with CUDA.
        timeout: seconds a single request may take.
    """

    def __init__(
        self,
        port: CachePort,
        *,
        instance: int,
        shard: bytes,
        payload_bytes: int,
        pin: bool,
        timeout: float,
    ) -> None:
        self._port = port
        self._instance = instance
        self._shard = shard
        self._payload_bytes = payload_bytes
        self._pin = pin
        self._timeout = timeout
        self._lock = threading.Lock()  # held while a registration is awaited
        self._attachment: Attachment | None = None
        self._closed = False

    def attached(self) -> Attachment:
        """The arena of the current server, held; the caller releases it.

        Raises:
            KVTransferError: no server, a refused registration, or an arena that cannot be attached.
        """
        with self._lock:
            if self._closed:
                raise Closed("the transfer context is closed")
            incarnation = self._port.incarnation
            if incarnation is None:
                raise PeerGone("no cache server is connected")
            current = self._attachment
            if current is None or current.incarnation != incarnation:
                current = self._attach(incarnation)
            current.hold()
            return current

    def _attach(self, incarnation: str) -> Attachment:
        reply = self.ask(
            Register(instance=self._instance, shard=self._shard, chunk_bytes=self._payload_bytes),
            Registered,
        )
        fresh = Attachment(
            reply,
            incarnation=incarnation,
            shard=self._shard,
            payload_bytes=self._payload_bytes,
            pin=self._pin,
        )
        stale, self._attachment = self._attachment, fresh
        if stale is not None:
            stale.retire()
        return fresh

    def ask(self, message: Request, reply_type: type[R]) -> R:
        """The reply to ``message``, or its error; bounded by the timeout."""
        # The port keeps the deadline; the second bound only guards against a port that does not.
        reply = self._port.request(message, self._timeout).result(self._timeout + 1.0)
        if not isinstance(reply, reply_type):
            raise RemoteProtocolError(
                f"reply to {type(message).__name__}: expected {reply_type.__name__}, "
                f"got {type(reply).__name__}"
            )
        return reply

    def ask_as_worker(self, message: Request, reply_type: type[R]) -> R:
        """:meth:`ask`; when the server does not know this worker, the next use registers again."""
        try:
            return self.ask(message, reply_type)
        except RemoteError as error:
            if error.code == "unknown_instance":
                with self._lock:
                    stale, self._attachment = self._attachment, None
                if stale is not None:
                    stale.retire()
            raise

    def tell(self, message: Request) -> None:
        """Send without waiting: the server also finds out by itself, later."""
        self._port.request(message, self._timeout)

    def close(self, timeout: float) -> None:
        """Unregister, let go of the arena, accept nothing more."""
        with self._lock:
            self._closed = True
            attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        if self._port.incarnation == attachment.incarnation:
            try:
                done = self._port.request(Unregister(instance=self._instance), timeout)
                done.result(timeout + 1.0)  # as in ask
            except (KVTransferError, FutureTimeout) as error:
                logger.info("could not unregister: %s", error)
        attachment.retire()
