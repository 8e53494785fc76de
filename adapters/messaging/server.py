"""A cache service behind a ROUTER socket: one thread, one reply for every request.

The thread never waits for anything but the next message. What takes longer the service answers later,
and wakes the thread when it can.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import zmq

from lmcache_kernels.errors import Closed, LocalProtocolError
from lmcache_kernels.transfer.messages import ErrorReply, Hello, Reply
from lmcache_kernels.transfer.serving.later import Later
from lmcache_kernels.transfer.serving.request_log import RequestLog

from . import wire
from .endpoints import bind
from .sockets import bounded_socket, receive

if TYPE_CHECKING:
    from collections.abc import Callable

    from zmq.auth.thread import ThreadAuthenticator

    from lmcache_kernels.transfer.messages import Request

    from .curve import ServerKeys
    from .sockets import Context

logger = logging.getLogger(__name__)

TICK_INTERVAL = 1.0
"""Seconds between calls of the service's ``tick``."""

LAST_REPLIES = 500
"""Milliseconds that a reply has to leave once the server closes."""

UNREAD_LIMIT = 64
"""Requests of one client that are held until their turn comes; the others wait in the connection and at the
client. Each may be of some megabytes, and clients may be many."""

T = TypeVar("T")

_ONE_TURN = 1000  # requests served before the clock is looked at again


class Service(Protocol):
    """What serves requests: :class:`~lmcache_kernels.transfer.serving.service.CacheService`."""

    def handle(self, request: Request, now: float, deadline: float) -> Reply | Later:
        """The reply to ``request``, which nobody waits for from ``deadline`` on; or what
        :meth:`finished` gives it to."""
        ...

    def finished(self, now: float) -> list[tuple[Later, Reply]]:
        """Replies that are due; called after every turn, so after every :meth:`~CacheServerLoop.wake`."""
        ...

    def next_due(self) -> float:
        """When :meth:`finished` has something to do even if nobody wakes the loop."""
        ...

    def tick(self, now: float) -> None:
        """Called about once a second."""
        ...


@dataclass(slots=True)
class ServerCounters:
    """What happened since the start.

    Attributes:
        replies: sent, errors included.
        failures: exceptions of the service, each answered with ``internal``.
        malformed: messages that were no request.
        undelivered: replies that their client could not or would not take.
        busy_seconds: in which the thread did not wait for anything to do.
    """

    replies: int = 0
    failures: int = 0
    malformed: int = 0
    undelivered: int = 0
    busy_seconds: float = 0.0


class _Asked(NamedTuple):
    """A request, when it was read, and what to do with its reply."""

    request: Request
    began: float
    answer: Callable[[Reply], None]


class CacheServerLoop:
    """Bound and listening once it is made; serves in :meth:`run`.

    Args:
        url: ``tcp://HOST:PORT``, without keys with a loopback address, port 0 for any free one; or
            ``ipc://PATH``.
        incarnation: random id of this server's life; requests meant for another are refused.
        clock: monotonic seconds, as told to clients.
        keys: only clients whose keys are among these get through, and any address may be bound.

    Attributes:
        endpoint: where it listens.
        counters: what happened so far.
        requests: the same of each operation, with times from reading a request to handing its reply on.

    Raises:
        ConfigError: an address that others could reach or that cannot be bound.
    """

    def __init__(
        self,
        url: str,
        *,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        keys: ServerKeys | None = None,
    ) -> None:
        self.counters = ServerCounters()
        self.requests = RequestLog()
        self._incarnation = incarnation
        self._clock = clock
        self._context: Context = zmq.Context()
        self._router = bounded_socket(self._context, zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.RCVHWM, UNREAD_LIMIT)
        self._stopping = False
        self._closed = False
        self._waiting: dict[Later, _Asked] = {}
        self._service: Service  # from when it runs
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._gatekeeper: ThreadAuthenticator | None = None
        try:
            if keys is not None:
                self._gatekeeper = keys.guard(self._router, self._context)
            self.endpoint = bind(self._router, url, keyed=keys is not None)
        except BaseException:
            self.close()
            raise

    def run(self, service: Service) -> None:
        """Serve until :meth:`stop`."""
        self._service = service
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        tick_at = self._clock() + TICK_INTERVAL
        while not self._stopping:
            wait = min(tick_at, service.next_due()) - self._clock()
            poller.poll(math.ceil(max(0.0, wait) * 1000))
            woke_at = self._clock()
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(4096)
            self._make_calls()
            for _ in range(_ONE_TURN):
                message = receive(self._router)
                if message is None or self._stopping:
                    break
                client, *frames = message
                self._serve(client, frames)
            now = self._clock()
            if now >= tick_at:
                tick_at = now + TICK_INTERVAL
                self._tick(now)
            self._give_replies()
            self.counters.busy_seconds += self._clock() - woke_at

    def stop(self) -> None:
        """Make :meth:`run` return; from any thread or signal handler, also before it is called."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """Make :meth:`run` look for replies that are due; from any thread."""
        # Full: it is awake already. Closed: there is nothing to stop.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"\0")

    def admit(self, keys: ServerKeys) -> None:
        """Let in whoever ``keys`` knows, and nobody else, from now on; from any thread.

        Who is connected stays so. Without effect on a loop that was made without keys, and whose own
        key is stays what it was.
        """
        if self._gatekeeper is not None:
            keys.admit(self._gatekeeper)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have :meth:`run` call ``function`` between requests: nothing else uses the service meanwhile.

        From any thread. The future gets what it returns or raises, or Closed once :meth:`close` was called.
        """
        future: Future[T] = Future()
        self._calls.append((function, future))  # type: ignore[arg-type]
        self.wake()
        if self._closed:
            self._drop_calls()
        return future

    def ask(self, request: Request, timeout: float) -> Future[Reply]:
        """What a client would be answered: :meth:`call`, for a request of this process.

        Args:
            timeout: seconds from when it is read, after which nobody waits for the reply.
        """
        future: Future[Reply] = Future()

        def begin() -> None:
            if future.set_running_or_notify_cancel():
                now = self._clock()
                self._answer(_Asked(request, now, future.set_result), now + timeout)

        self.call(begin).add_done_callback(partial(_fail_too, future))
        return future

    @property
    def waiting(self) -> int:
        """Requests whose replies come later; for calls."""
        return len(self._waiting)

    def now(self) -> float:
        """Monotonic seconds, as the service is told them."""
        return self._clock()

    def close(self) -> None:
        """Stop listening; after :meth:`run`, idempotent.

        Replies are given a moment to leave; those that nobody takes are dropped.
        """
        self._closed = True
        self._drop_calls()
        self._router.close(LAST_REPLIES)
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.term()
        self._wake_receiver.close()
        self._wake_sender.close()

    def __enter__(self) -> CacheServerLoop:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------

    def _serve(self, client: bytes, frames: list[bytes]) -> None:
        now = self._clock()
        try:
            header, request = wire.decode_request(frames)
        except wire.MalformedMessage as error:
            self.counters.malformed += 1
            logger.debug("client %s sent no request: %s", client.hex(), error)
            if error.uid is not None:
                self._reply(client, error.uid, ErrorReply(code=error.code, message=str(error)))
            return
        asked = _Asked(request, now, partial(self._reply, client, header.uid))
        if not isinstance(request, Hello) and header.incarnation != self._incarnation:
            reply = ErrorReply(
                code="stale_incarnation",
                message=f"meant for server {header.incarnation!r}, this is {self._incarnation!r}",
            )
            self._give(asked, reply)
        elif header.deadline and now >= header.deadline:
            reply = ErrorReply(
                code="expired",
                message=f"read {now - header.deadline:.3f} s after its deadline; nothing was done",
            )
            self._give(asked, reply)
        else:
            self._answer(asked, header.deadline or math.inf)

    def _answer(self, asked: _Asked, deadline: float) -> None:
        """Have the service handle it; it is answered now or later."""
        reply: Reply | Later
        try:
            reply = self._service.handle(asked.request, asked.began, deadline)
        except Exception as error:
            reply = self._failed(f"{type(asked.request).__name__} could not be served", error)
        if isinstance(reply, Later):
            self._waiting[reply] = asked
        else:
            self._give(asked, reply)

    def _give(self, asked: _Asked, reply: Reply) -> None:
        asked.answer(reply)
        self.requests.record(asked.request, reply, asked.began, self._clock())

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _drop_calls(self) -> None:
        while True:
            try:
                _, future = self._calls.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(Closed("the server has stopped"))

    def _give_replies(self) -> None:
        try:
            due = self._service.finished(self._clock())
        except Exception as error:
            self._failed("replies could not be fetched", error)
            return
        for later, reply in due:
            self._give(self._waiting.pop(later), reply)

    def _reply(self, client: bytes, uid: int, reply: Reply) -> None:
        try:
            body = wire.encode_body(reply)
        except LocalProtocolError as error:
            body = wire.encode_body(self._failed("a reply could not be sent", error))
        try:
            self._router.send_multipart([client, *wire.reply_frames(uid, body)], zmq.NOBLOCK)
            self.counters.replies += 1
        except zmq.ZMQError as error:  # the client has gone, or does not read its replies
            self.counters.undelivered += 1
            logger.debug("client %s: reply %d not delivered: %s", client.hex(), uid, error)

    def _failed(self, what: str, error: Exception) -> ErrorReply:
        self.counters.failures += 1
        if self.counters.failures.bit_count() == 1:  # the 1st, 2nd, 4th, ...: never a flood
            logger.error(
                "%s (failure %d since the start)", what, self.counters.failures, exc_info=error
            )
        return ErrorReply(
            code="internal", message=f"{what}: {type(error).__name__}; the server's log has more"
        )

    def _tick(self, now: float) -> None:
        try:
            self._service.tick(now)
        except Exception as error:
            self._failed("periodic work failed", error)


def _fail_too(future: Future[Reply], begun: Future[None]) -> None:
    """The call that was to ask could not be made."""
    error = begun.exception()
    if error is not None and future.set_running_or_notify_cancel():
        future.set_exception(error)
