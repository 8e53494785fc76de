"""The client's socket: a DEALER that forgets what it could not deliver, and tells of connections."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_kernels.errors import ConfigError

from .session import SILENT
from .sockets import bounded_socket, receive

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from .sockets import Context

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000

_ONE_TURN = 1000  # replies read before anything else gets its turn

_CAUSES = {
    zmq.Event.CLOSED: "nothing listens there",
    zmq.Event.CONNECTED: SILENT,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: SILENT,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: SILENT,
    zmq.Event.HANDSHAKE_FAILED_AUTH: SILENT,
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
    4.3 then aborts the process if it was reading a message of several frames.)

    Raises:
        ConfigError: a URL that cannot be connected to.
    """

    def __init__(self, url: str, context: Context | None) -> None:
        self._url = url
        self._owns_context = context is None
        self._context = context if context is not None else zmq.Context()
        try:
            self._open()
        except (zmq.ZMQError, TypeError) as error:
            self.close()
            raise ConfigError(
                f"url: expected tcp://HOST:PORT or ipc://PATH, got {url!r}: {error}"
            ) from error

    def _open(self) -> None:
        self._was_connected = False
        self._socket = bounded_socket(self._context, zmq.DEALER)
        self._socket.set(zmq.IPV6, "[" in self._url)  # else a name would mean its IPv6 address
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | functools.reduce(operator.or_, _CAUSES)
        )
        self._socket.connect(self._url)

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def wait(self, wake: socket.socket, seconds: float | None) -> None:
        """Return when there is something to read, here or at ``wake``, or the time is over."""
        poller = zmq.Poller()
        for readable in (self._socket, self._monitor, wake):
            poller.register(readable, zmq.POLLIN)
        poller.poll(None if seconds is None else math.ceil(seconds * 1000))

    def receive(self) -> Iterator[list[bytes]]:
        """Messages that are there, each as its frames; not endlessly many."""
        for _ in range(_ONE_TURN):
            frames = receive(self._socket)
            if frames is None:
                return
            yield frames

    def events(self) -> Iterator[ConnectionEvent]:
        """What happened to the connection, in order."""
        while self._monitor.poll(0):
            event = zmq.Event(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._was_connected = True
                yield ConnectionEvent(connected=True)
            elif event in _CAUSES:
                if self._was_connected:
                    self._close_sockets()
                    self._open()
                yield ConnectionEvent(connected=False, cause=_CAUSES[event])

    def send(self, frames: list[bytes]) -> bool:
        """Hand a message over; False: there is no room."""
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
