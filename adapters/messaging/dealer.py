"""The client's socket: a DEALER that forgets what it could not deliver, and tells of connections."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_kernels.errors import ConfigError, TransportError

from .session import SILENT
from .sockets import bounded_socket, receive

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from .curve import ClientKeys
    from .sockets import Context, Socket

logger = logging.getLogger(__name__)

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
"""Longest pause between attempts to connect, and every pause between attempts to open a socket."""

_ONE_TURN = 1000  # replies read before anything else gets its turn

_CAUSES = {
    zmq.Event.CLOSED: "nothing listens there",
    zmq.Event.CONNECTED: SILENT,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: SILENT,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: SILENT,
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the server does not know our CURVE key",
    zmq.Event.DISCONNECTED: None,
}
"""Events that mean there is no connection (yet, or any more), and why if they tell."""


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """A connection was made, or there is none, because of ``cause`` if that is known."""

    connected: bool
    cause: str | None = None


class Dealer:
    """Never blocks but in :meth:`wait`; for one thread, apart from its making.

    A socket serves one connection: when that ends, a new one takes its place, so that nothing it
    still holds reaches a server that comes later. (ZMQ_IMMEDIATE would do the same, but libzmq
    4.3 then aborts the process if it was reading a message of several frames.) While none can be
    opened, because descriptors are short for example, there is no connection; it goes on trying.

    Raises:
        ConfigError: a URL that cannot be connected to.
        TransportError: the first socket could not be opened.
    """

    def __init__(self, url: str, context: Context | None, keys: ClientKeys | None = None) -> None:
        self._url = url
        self._keys = keys
        self._owns_context = context is None
        self._context = context if context is not None else zmq.Context()
        self._socket: Socket | None = None  # None, as the monitor: there is none at the moment
        self._monitor: Socket | None = None
        self._reopen_at: float | None = None  # monotonic seconds
        try:
            self._open()
        except (ConfigError, TransportError):
            self.close()
            raise

    def _open(self) -> None:
        self._was_connected = False
        try:
            self._socket = bounded_socket(self._context, zmq.DEALER)
            self._socket.set(zmq.IPV6, "[" in self._url)  # else a name would mean its IPv6 address
            self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
            self._socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
            if self._keys is not None:
                self._keys.apply(self._socket)
            self._monitor = self._socket.get_monitor_socket(
                zmq.Event.HANDSHAKE_SUCCEEDED | functools.reduce(operator.or_, _CAUSES)
            )
        except zmq.ZMQError as error:
            raise TransportError(f"{self._url}: no socket could be opened: {error}") from error
        try:
            self._socket.connect(self._url)
        except (zmq.ZMQError, TypeError) as error:
            raise ConfigError(
                f"url: expected tcp://HOST:PORT or ipc://PATH, got {self._url!r}: {error}"
            ) from error

    def _reopen(self) -> str | None:
        """Take a new socket; if there is none, why, and try again later."""
        self._close_sockets()
        try:
            self._open()
        except (ConfigError, TransportError) as error:
            self._close_sockets()
            if self._context.closed:  # for good
                raise
            if self._reopen_at is None:
                logger.warning("%s; trying again every %d ms", error, RECONNECT_MAX_MS)
            self._reopen_at = time.monotonic() + RECONNECT_MAX_MS / 1000
            return str(error)
        self._reopen_at = None
        return None

    def _close_sockets(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(zmq.ContextTerminated):  # which has ended the monitor, too
                self._socket.disable_monitor()
        for opened in (self._monitor, self._socket):
            if opened is not None:
                opened.close(0)
        self._socket = self._monitor = None

    def wait(self, wake: socket.socket, seconds: float | None) -> None:
        """Return when there is something to read, here or at ``wake``, or the time is over.

        It may be over earlier, when it is time to open a socket; :meth:`events` does that.
        """
        poller = zmq.Poller()
        for readable in (self._socket, self._monitor, wake):
            if readable is not None:
                poller.register(readable, zmq.POLLIN)
        if self._reopen_at is not None:
            pause = max(0.0, self._reopen_at - time.monotonic())
            seconds = pause if seconds is None else min(seconds, pause)
        poller.poll(None if seconds is None else math.ceil(seconds * 1000))

    def receive(self) -> Iterator[list[bytes]]:
        """Messages that are there, each as its frames; not endlessly many."""
        for _ in range(_ONE_TURN):
            frames = None if self._socket is None else receive(self._socket)
            if frames is None:
                return
            yield frames

    def events(self) -> Iterator[ConnectionEvent]:
        """What happened to the connection, in order."""
        if self._reopen_at is not None and self._reopen_at <= time.monotonic():
            self._reopen()
        while self._monitor is not None and self._monitor.poll(0):
            event = zmq.Event(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._was_connected = True
                yield ConnectionEvent(connected=True)
            elif event in _CAUSES:
                failure = self._reopen() if self._was_connected else None
                yield ConnectionEvent(connected=False, cause=failure or _CAUSES[event])

    def send(self, frames: list[bytes]) -> bool:
        """Hand a message over; False: there is no room, or no connection."""
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Drop everything; idempotent."""
        self._close_sockets()
        if self._owns_context:
            self._context.term()
