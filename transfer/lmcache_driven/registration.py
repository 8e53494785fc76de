"""A worker's standing with a server that copies for it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from lmcache_kernels.errors import Closed, KVTransferError, PeerGone
from lmcache_kernels.transfer.arguments import check_port
from lmcache_kernels.transfer.asking import ask
from lmcache_kernels.transfer.memory.arena import has_owner
from lmcache_kernels.transfer.messages import Done, Registered, Unregister

if TYPE_CHECKING:
    from lmcache_kernels.transfer.messages import RegisterCache
    from lmcache_kernels.transfer.port import CachePort

logger = logging.getLogger(__name__)


class ServedRegistration:
    """Registers when it is first needed, and again when the server restarted or forgot the worker.

    Safe for threads.

    Args:
        port: the cache.
        message: the registration.
        chunk_tokens: tokens of one chunk, as the message means it.
        timeout: seconds it may take. A server's first registration loads torch.
    """

    def __init__(
        self, port: CachePort, message: RegisterCache, chunk_tokens: int, timeout: float
    ) -> None:
        self._port = port
        self._message = message
        self._chunk_tokens = chunk_tokens
        self._timeout = timeout
        self._lock = threading.Lock()  # held while a registration is awaited
        self._incarnation: str | None = None  # of the server that knows this worker
        self._arenas: dict[str, str] = {}  # by incarnation, of the last server
        self._closed = False

    def ensure(self) -> str:
        """The incarnation of the server, with which this worker is registered.

        Raises:
            KVTransferError: no server, or a refused registration.
        """
        with self._lock:
            if self._closed:
                raise Closed("the transfer context is closed")
            incarnation = self._port.incarnation
            if incarnation is None:
                raise PeerGone("no cache server is connected")
            if self._incarnation != incarnation:
                check_port(self._port, self._chunk_tokens)
                reply = ask(self._port, self._message, Registered, self._timeout)
                # What cannot be seen from here, in another container maybe, tells nothing later.
                seen = has_owner(reply.arena_name)
                self._arenas = {incarnation: reply.arena_name} if seen else {}
                self._incarnation = incarnation
                if self._closed:  # meanwhile
                    self._port.request(Unregister(instance=self._message.instance), self._timeout)
                    raise Closed("the transfer context was closed")
            return incarnation

    def forget(self) -> None:
        """The server does not know this worker any more; never waits."""
        self._incarnation = None

    def has_ended(self, incarnation: str) -> bool:
        """Whether the process of that server is known to have ended; never waits."""
        if self._port.incarnation not in (None, incarnation):
            return True
        arena = self._arenas.get(incarnation)
        return arena is not None and not has_owner(arena)

    def unregister(self, timeout: float) -> None:
        """Tell the server, if it knows this worker, and wait until it uses the cache no more."""
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is None or self._port.incarnation != incarnation:
            return
        try:
            ask(self._port, Unregister(instance=self._message.instance), Done, timeout)
        except KVTransferError as error:
            logger.info("could not unregister: %s", error)

    def close(self, timeout: float) -> None:
        """:meth:`unregister`, and accept nothing more."""
        self._closed = True
        self.unregister(timeout)
