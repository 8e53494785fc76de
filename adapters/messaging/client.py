"""A cache server of this machine as a :class:`~lmcache_kernels.transfer.port.CachePort`.

One daemon thread owns the socket and a :class:`~.session.Session`; every other thread only puts
requests into a queue. So nothing that a server does, or fails to do, blocks a caller.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lmcache_kernels import __version__
from lmcache_kernels.errors import (
    Closed,
    ConfigError,
    KVTransferError,
    LocalProtocolError,
    PeerGone,
)
from lmcache_kernels.transfer.messages import Reply

from . import wire
from .dealer import Dealer
from .endpoints import check_url
from .session import Session, Submission
from .states import State

if TYPE_CHECKING:
    from lmcache_kernels.transfer.messages import Request

    from .curve import ClientKeys
    from .session import Outcome
    from .sockets import Context

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 1.5
"""Seconds that :meth:`CacheClient.close` waits for its thread, which never waits itself."""


class CacheClient:
    """Requests to one cache server, over as many connections as it takes.

    It connects in the background and again whenever the connection ends. Callbacks of futures run
    in its thread: they must not wait.

    Args:
        url: ``tcp://HOST:PORT`` or ``ipc://PATH``.
        context: ZeroMQ context to share; by default the client has its own.
        ping_interval: seconds between pings; a ping not answered for as long is a lost server.
        instance_id: worker that pings vouch for; None: no worker.
        chunk_tokens: tokens per chunk that the server must work with; None takes any.
        name: of the thread and of this client in the server's eyes.
        keys: of a server that wants CURVE.

    Raises:
        ConfigError: a URL or interval that cannot work.
        TransportError: no socket could be opened.
    """

    def __init__(
        self,
        url: str,
        *,
        context: Context | None = None,
        ping_interval: float = 10.0,
        instance_id: int | None = None,
        chunk_tokens: int | None = None,
        name: str = "",
        keys: ClientKeys | None = None,
    ) -> None:
        check_url(url)
        if not 0 < ping_interval < math.inf:
            raise ConfigError(f"ping_interval: expected seconds above 0, got {ping_interval}")
        self.url = url
        self._session = Session(
            url,
            ping_interval=ping_interval,
            chunk_tokens=chunk_tokens,
            instance_id=instance_id,
            software=f"lmcache-kernels {__version__} {name}".rstrip(),
        )
        self._dealer = Dealer(url, context, keys)
        self._pid = os.getpid()
        self._queue: deque[Submission] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._closing = False
        self._lock = threading.Lock()  # of _closing, _queue and _wake_sender
        self._state = State.CONNECTING
        self._state_changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f"lmcache-kernels-client-{name}".rstrip("-"), daemon=True
        )
        self._thread.start()

    # --- what callers see -------------------------------------------------------------------------

    @property
    def incarnation(self) -> str | None:
        """Id of the server; None while there is none. A changed one means that it restarted."""
        return self._session.incarnation

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens per chunk of the server; None until one was reached."""
        return self._session.chunk_tokens

    @property
    def instance_id(self) -> int | None:
        """Worker that pings vouch for; may be set at any time."""
        return self._session.instance_id

    @instance_id.setter
    def instance_id(self, instance_id: int | None) -> None:
        self._session.instance_id = instance_id

    @property
    def registered(self) -> bool:
        """Whether worker ``instance_id`` is registered, as far as the server has said."""
        return self._session.registered

    @property
    def refused(self) -> str | None:
        """Why the server that was reached cannot be used; None if it can, or none was reached."""
        return self._session.refused

    @property
    def pending(self) -> int:
        """Requests that are under way."""
        return self._session.pending

    @property
    def strays(self) -> int:
        """Replies that came when nobody waited for them any more."""
        return self._session.strays

    def request(self, message: Request, timeout: float) -> Future[Reply]:
        """Send ``message``; see :meth:`lmcache_kernels.transfer.port.CachePort.request`.

        LocalProtocolError in the future means a misuse: a message that cannot be sent, a timeout
        that is no finite number, or a client that belongs to the process this one was forked from.
        """
        future: Future[Reply] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: somebody will finish it
        try:
            self._enqueue(future, message, timeout)
        except KVTransferError as error:
            future.set_exception(error)
        return future

    def wait_ready(self, timeout: float) -> None:
        """Return when there is a server to send requests to.

        Raises:
            ConfigError: the server there cannot be used.
            PeerGone: none was reached in ``timeout`` seconds.
            Closed: the client is closed.
        """
        self._check_process()
        settled = (State.READY, State.REFUSED, State.CLOSED)
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._state in settled, timeout)
            state = self._state
        if state is State.READY:
            return
        if state is State.CLOSED:
            raise Closed("the client is closed")
        if state is State.REFUSED:
            raise ConfigError(self._session.refused)
        raise PeerGone(
            f"no cache server at {self.url} within {timeout:g} s: {self._session.cause}. Start one "
            "with `lmcache-kernels serve --chunk-size N --port P`, or give the address where it is"
        )

    def close(self) -> None:
        """Fail what is pending with Closed and let go of the socket; idempotent, never waits long."""
        if os.getpid() != self._pid:
            return  # socket and thread belong to the parent
        with self._lock:
            self._closing = True
            self._wake()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("%s: a callback keeps the client's thread from ending", self.url)

    def __enter__(self) -> CacheClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- callers' threads -------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"{self.url}: this client belongs to process {self._pid}; a forked child must make "
                "its own"
            )

    def _enqueue(self, future: Future[Reply], message: Request, timeout: float) -> None:
        self._check_process()
        if not isinstance(timeout, int | float) or not math.isfinite(timeout):
            raise LocalProtocolError(f"timeout: expected finite seconds, got {timeout!r}")
        deadline = time.monotonic() + timeout
        incarnation = self.incarnation
        if incarnation is None:
            raise self._session.unavailable()
        body = wire.encode_body(message)
        with self._lock:
            if self._closing:
                raise Closed("the client is closed")
            self._queue.append(Submission(future, message, body, incarnation, deadline))
            self._wake()

    def _wake(self) -> None:
        # Full: it is awake already. Closed: the thread has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"\0")

    # --- the client's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
        except Exception:
            logger.exception("%s: the client's thread failed; the client is closed", self.url)
        finally:
            with self._lock:
                self._closing = True
            self._end()

    def _step(self) -> None:
        session = self._session
        wake_at = session.wake_at()
        wait = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        self._dealer.wait(self._wake_receiver, wait)
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
        # Replies first: what came before a connection ended still counts.
        for frames in self._dealer.receive():
            session.received(frames, time.monotonic())
        for event in self._dealer.events():
            if event.connected:
                session.connected(time.monotonic())
            else:
                session.disconnected(event.cause)
        while self._queue:
            session.submit(self._queue.popleft(), time.monotonic())
        session.tick(time.monotonic())
        for uid, frames in session.take_outgoing():
            if not self._dealer.send(frames):
                session.unsent(uid, time.monotonic())
        self._publish()

    def _publish(self) -> None:
        """Tell everybody who waits."""
        if self._state is not self._session.state:
            with self._state_changed:
                self._state = self._session.state
                self._state_changed.notify_all()
        for owner, outcome in self._session.take_outcomes():
            self._finish(owner, outcome)

    def _finish(self, future: Future[Reply], outcome: Outcome) -> None:
        try:
            if isinstance(outcome, Reply):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        except BaseException:  # a callback must not end this thread, whatever it raises
            logger.exception("%s: a callback of a request failed", self.url)

    def _end(self) -> None:
        self._dealer.close()
        self._session.close()
        while self._queue:
            self._session.submit(self._queue.popleft(), time.monotonic())
        self._publish()
        self._wake_receiver.close()
        with self._lock:
            self._wake_sender.close()
