"""The client's side of a connection as a state machine: who waits for what, until when. Pure.

Time comes in as ``now`` (monotonic seconds), events through methods, and what is to be done comes
out of two lists: frames to send (:meth:`Session.take_outgoing`) and requests that are over
(:meth:`Session.take_outcomes`). A request is known by the ``owner`` object it was submitted with.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lmcache_kernels.errors import (
    Closed,
    KVTransferError,
    LocalProtocolError,
    PeerGone,
    RemoteError,
    RemoteProtocolError,
    TransferTimeout,
)
from lmcache_kernels.transfer.messages import (
    PROTOCOL_VERSION,
    REPLY_OF,
    ErrorReply,
    Hello,
    Ping,
    Pong,
    Register,
    RegisterCache,
    Reply,
    Request,
    Unregister,
    Welcome,
)

from . import wire
from .greeting import clock_offset, refusal
from .pending import Pending, PendingTable
from .states import TRANSITIONS, Event, State

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

SUSPECT_PING_INTERVAL = 1.0
"""Seconds between pings of a server that does not answer."""

MAX_PENDING = 8192
"""Requests that may wait for their replies; fewer than a socket's queue holds, so that a server
that works through them never has to drop a reply."""

SILENT = (
    "what listens there does not answer; is it stopped, no cache server, or are the keys wrong?"
)
"""Cause while a connection is there and nothing came through it."""

Outcome: TypeAlias = Reply | KVTransferError


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way in.

    Attributes:
        owner: known to the caller only; comes back with the outcome.
        message, body: the request, and the same as a frame.
        incarnation: of the server it is meant for.
        deadline: monotonic seconds of this process.
    """

    owner: Any
    message: Request
    body: bytes
    incarnation: str
    deadline: float


class Session:
    """One client's view of one server address, over any number of connections to it.

    Args:
        url: for messages.
        ping_interval: seconds between pings, and the seconds within which one is to be answered.
        chunk_tokens: tokens per chunk that the server must work with; None takes any.
        instance_id: worker that pings vouch for; None: no worker.
        software: told to the server.

    Attributes:
        incarnation: id of the server, None while there is none.
        chunk_tokens: of the server; None until one was reached.
        registered: whether the server knows ``instance_id``, as far as it has said.
        refused: why the server reached last cannot be used; None if it can.
        cause: why no server is there, for messages.
        strays: replies that nobody waited for any more.
    """

    def __init__(
        self,
        url: str,
        *,
        ping_interval: float,
        chunk_tokens: int | None = None,
        instance_id: int | None = None,
        software: str = "",
    ) -> None:
        self.url = url
        self.state = State.CONNECTING
        self.incarnation: str | None = None
        self.chunk_tokens: int | None = None
        self.instance_id = instance_id
        self.registered = False
        self.refused: str | None = None
        self.cause = "nothing listens there"
        self.strays = 0
        self._required_chunk_tokens = chunk_tokens
        self._ping_interval = ping_interval
        self._software = software
        self._greeted_by = ""  # the incarnation, also while it is away
        self._clock_offset = 0.0
        self._probe_at: float | None = None
        self._pending = PendingTable()
        self._outgoing: list[tuple[int, list[bytes]]] = []
        self._outcomes: list[tuple[Any, Outcome]] = []

    @property
    def pending(self) -> int:
        """Requests submitted and not over, without our own greetings and pings."""
        return len(self._pending)

    # --- events -----------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """A connection is there: greet whoever is at its other end."""
        self._lose("the connection was replaced")
        self._move(Event.CONNECTED)
        self.cause = SILENT
        self._probe(now)

    def disconnected(self, cause: str | None = None) -> None:
        """The connection ended, or could not be made, because of ``cause`` if that is known."""
        if cause is not None:
            self.cause = cause
        elif self.state is not State.CONNECTING:
            self.cause = "the connection ended"
        self._lose("the connection ended")
        self._move(Event.DISCONNECTED)
        self._probe_at = None

    def submit(self, request: Submission, now: float) -> None:
        """Send a request, if there is a server to send it to."""
        if self.state is not State.READY or request.incarnation != self.incarnation:
            self._outcomes.append((request.owner, self.unavailable()))
        elif now >= request.deadline:
            name = type(request.message).__name__
            late = TransferTimeout(f"{self.url}: no time was left to send {name}")
            self._outcomes.append((request.owner, late))
        elif self._pending.size >= MAX_PENDING:
            self._outcomes.append((request.owner, self._no_room()))
        else:
            self._send(request.owner, request.message, request.body, request.deadline, now)

    def unsent(self, uid: int, now: float) -> None:
        """Frames from :meth:`take_outgoing` found no room."""
        entry = self._pending.pop(uid)
        if entry is None:
            return
        if entry.owner is not None:
            self._outcomes.append((entry.owner, self._no_room()))
        elif self._probe_at is not None:
            self._probe_at = min(self._probe_at, now + SUSPECT_PING_INTERVAL)

    def received(self, frames: Sequence[bytes], now: float) -> None:
        """Frames arrived. Nothing is raised, whatever they are."""
        try:
            uid, reply = wire.decode_reply(frames)
        except wire.MalformedMessage as error:
            logger.warning("%s: not a reply: %s", self.url, error)
            entry = self._pending.pop(error.uid)
            if entry is not None and entry.owner is not None:
                self._outcomes.append((entry.owner, error))
            return
        if self.state is State.SUSPECT:
            logger.info("%s: the cache server answers again", self.url)
        self._move(Event.HEARD)
        entry = self._pending.pop(uid)
        if entry is None:
            self.strays += 1
        elif isinstance(entry.message, Hello):
            self._greeted(entry, reply, now)
        else:
            self._answered(entry, reply, now)

    def tick(self, now: float) -> None:
        """Time has passed: end what is overdue, ping when it is time to."""
        for entry in self._pending.pop_overdue(now):
            if self.state is State.READY:
                logger.warning("%s: the cache server does not answer; doing without", self.url)
                self._probe_at = now
            self._move(Event.OVERDUE)
            if entry.owner is not None:
                name, waited = type(entry.message).__name__, now - entry.sent_at
                late = TransferTimeout(f"{self.url}: no reply to {name} in {waited:.3f} s")
                self._outcomes.append((entry.owner, late))
        if self._probe_at is not None and self._probe_at <= now:
            self._probe(now)

    def close(self) -> None:
        """End everything that is pending with Closed; nothing is sent any more."""
        self._move(Event.CLOSE)
        self._end_pending(Closed, "the client is closed")
        self.incarnation = None
        self._probe_at = None

    # --- what is to be done -----------------------------------------------------------------------

    def wake_at(self) -> float | None:
        """When to call :meth:`tick` at the latest; None: nothing is due."""
        due = (self._pending.next_deadline(), self._probe_at)
        return min((at for at in due if at is not None), default=None)

    def take_outgoing(self) -> list[tuple[int, list[bytes]]]:
        """Frames to send now, each with its uid, in order."""
        taken, self._outgoing = self._outgoing, []
        return taken

    def take_outcomes(self) -> list[tuple[Any, Outcome]]:
        """Owners whose request is over, with the reply or the error."""
        taken, self._outcomes = self._outcomes, []
        return taken

    def unavailable(self) -> KVTransferError:
        """The error of a request that cannot be sent as things stand."""
        if self.state is State.CLOSED:
            return Closed("the client is closed")
        if self.state is State.REFUSED:
            return PeerGone(self.refused)
        if self.state is State.SUSPECT:
            return PeerGone(f"{self.url}: the cache server does not answer")
        if self.state is State.READY:
            return PeerGone(f"{self.url}: not connected to the cache server the request was for")
        return PeerGone(f"{self.url}: no cache server: {self.cause}")

    # --- inside -----------------------------------------------------------------------------------

    def _no_room(self) -> PeerGone:
        return PeerGone(f"{self.url}: too many requests are unanswered; this one was not sent")

    def _move(self, event: Event) -> None:
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.value} while {self.state.value}: cannot happen")
        self.state = after

    def _send(self, owner: Any, message: Request, body: bytes, deadline: float, now: float) -> None:
        uid = self._pending.add(Pending(owner, message, now), deadline)
        if self.incarnation is None:  # a greeting, which is good for whoever is there
            frames = wire.request_frames(uid, "", 0.0, body)
        else:
            theirs = max(deadline + self._clock_offset, 0.0)
            frames = wire.request_frames(uid, self.incarnation, theirs, body)
        self._outgoing.append((uid, frames))

    def _probe(self, now: float) -> None:
        """Greet or ping, and again later."""
        pause = self._ping_interval
        if self.state is State.GREETING:
            message: Request = Hello(protocol=PROTOCOL_VERSION, software=self._software)
        else:
            message = Ping(instance=self.instance_id)
            if self.state is State.SUSPECT:
                pause = min(pause, SUSPECT_PING_INTERVAL)
        self._probe_at = now + pause
        self._send(None, message, wire.encode_body(message), now + self._ping_interval, now)

    def _greeted(self, entry: Pending, reply: Reply, now: float) -> None:
        refused = refusal(self.url, reply, self._required_chunk_tokens)
        if refused is not None or not isinstance(reply, Welcome):
            if refused != self.refused:
                logger.error("%s", refused)
            self.refused = refused
            self._probe_at = None
            self._move(Event.REJECTED)
            return
        if reply.incarnation != self._greeted_by:
            self._greeted_by = reply.incarnation
            self.registered = False
        self._clock_offset = clock_offset(reply.clock, entry.sent_at, now)
        self.refused = None
        self.chunk_tokens = reply.chunk_tokens
        self.incarnation = reply.incarnation
        self._probe_at = now + self._ping_interval
        self._move(Event.WELCOMED)
        logger.info("%s: connected to cache server %s", self.url, reply.incarnation)

    def _answered(self, entry: Pending, reply: Reply, now: float) -> None:
        outcome: Outcome = reply
        name = type(entry.message).__name__
        expected = REPLY_OF[type(entry.message)]
        if isinstance(reply, ErrorReply):
            outcome = self._error(reply, name)
        elif not isinstance(reply, expected):
            outcome = RemoteProtocolError(
                f"{self.url}: reply to {name}: expected {expected.__name__}, got "
                f"{type(reply).__name__}"
            )
        else:
            self._note_registration(entry.message, reply)
        if entry.owner is not None:
            self._outcomes.append((entry.owner, outcome))
        if isinstance(reply, ErrorReply) and reply.code == "stale_incarnation":
            # It restarted, and the new connection was used before the end of the old one was seen.
            self._lose("it has restarted")
            self._move(Event.RESTARTED)
            self._probe(now)

    def _error(self, reply: ErrorReply, name: str) -> KVTransferError:
        if reply.code == "stale_incarnation":
            return PeerGone(f"{self.url}: {name}: {reply.message}")
        if reply.code == "expired":
            return TransferTimeout(f"{self.url}: {name}: {reply.message}")
        if reply.code == "unknown_instance":
            self.registered = False
        return RemoteError(reply.code, reply.message)

    def _note_registration(self, message: Request, reply: Reply) -> None:
        if not isinstance(message, Ping | Register | RegisterCache | Unregister):
            return
        if message.instance is None or message.instance != self.instance_id:
            return
        leaves = isinstance(message, Unregister)
        knows = reply.registered if isinstance(reply, Pong) else not leaves
        if self.registered and not knows and not leaves:
            logger.warning("%s: worker %d is not registered any more", self.url, message.instance)
        self.registered = knows

    def _lose(self, why: str) -> None:
        """Whatever was sent is lost with its connection."""
        self._end_pending(PeerGone, f"{self.url}: {why} before the reply")
        if self.incarnation is not None:
            logger.warning("%s: lost cache server %s: %s", self.url, self.incarnation, why)
        self.incarnation = None

    def _end_pending(self, kind: type[KVTransferError], text: str) -> None:
        self._outgoing.clear()
        for entry in self._pending.pop_all():
            if entry.owner is not None:
                self._outcomes.append((entry.owner, kind(text)))
