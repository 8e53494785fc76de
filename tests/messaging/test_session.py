"""The client's state machine alone: no socket, no thread, and a clock that only tests move."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_kernels.adapters.messaging import wire
from lmcache_kernels.adapters.messaging.greeting import clock_offset
from lmcache_kernels.adapters.messaging.pending import Pending, PendingTable
from lmcache_kernels.adapters.messaging.session import Session, Submission
from lmcache_kernels.adapters.messaging.states import TRANSITIONS, Event, State
from lmcache_kernels.errors import (
    Closed,
    LocalProtocolError,
    PeerGone,
    RemoteError,
    RemoteProtocolError,
    TransferTimeout,
)
from lmcache_kernels.transfer.messages import (
    PROTOCOL_VERSION,
    Clear,
    Cleared,
    Done,
    ErrorReply,
    Hello,
    Ping,
    Pong,
    Register,
    Registered,
    Unregister,
    Welcome,
)

PING_INTERVAL = 10.0
REGISTER = Register(instance=7, shard=bytes(32), chunk_bytes=1)
REGISTERED = Registered(arena_name="a", arena_bytes=1)


class Wire:
    """A session and the server's end of it."""

    def __init__(self, **arguments):
        arguments.setdefault("ping_interval", PING_INTERVAL)
        self.session = Session("tcp://there", **arguments)
        self.now = 100.0
        self.sent = []

    def take(self):
        """New requests, each as (header, message)."""
        new = [wire.decode_request(frames) for _, frames in self.session.take_outgoing()]
        self.sent += new
        return new

    def reply(self, uid, reply):
        frames = wire.reply_frames(uid, wire.encode_body(reply))
        self.session.received(frames, self.now)

    def ready(self, incarnation="one", clock=None, **fields):
        self.session.connected(self.now)
        ((header, hello),) = self.take()
        assert isinstance(hello, Hello)
        fields = {"protocol": PROTOCOL_VERSION, "chunk_tokens": 256} | fields
        clock = self.now if clock is None else clock
        self.reply(header.uid, Welcome(incarnation=incarnation, clock=clock, **fields))
        return self

    def submit(self, owner, message=Clear(), timeout=1.0, incarnation=None):  # noqa: B008
        meant = incarnation or self.session.incarnation or "none"
        body = wire.encode_body(message)
        self.session.submit(Submission(owner, message, body, meant, self.now + timeout), self.now)

    def sent_uid(self, owner, **arguments):
        self.submit(owner, **arguments)
        ((header, _),) = self.take()
        return header.uid

    def pass_time(self, seconds):
        self.now += seconds
        self.session.tick(self.now)

    def outcome(self):
        ((owner, outcome),) = self.session.take_outcomes()
        return owner, outcome


# --- greeting -------------------------------------------------------------------------------------


def test_a_connection_is_greeted_and_welcomed():
    link = Wire(software="me")
    assert link.session.wake_at() is None
    link.ready("one")
    ((header, hello),) = link.sent
    assert (header.incarnation, header.deadline) == ("", 0.0)
    assert hello == Hello(protocol=PROTOCOL_VERSION, software="me")
    assert link.session.state is State.READY
    assert (link.session.incarnation, link.session.chunk_tokens) == ("one", 256)


def test_a_greeting_without_answer_is_repeated():
    link = Wire()
    link.session.connected(link.now)
    link.take()
    link.pass_time(PING_INTERVAL)
    ((_, again),) = link.take()
    assert isinstance(again, Hello)
    assert link.session.state is State.GREETING


def test_a_greeting_that_found_no_room_is_repeated_soon():
    link = Wire()
    link.session.connected(link.now)
    ((uid, _),) = link.session.take_outgoing()
    link.session.unsent(uid, link.now)
    link.pass_time(1.0)
    ((_, again),) = link.take()
    assert isinstance(again, Hello)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"protocol": 9}, ["version 9", f"client {PROTOCOL_VERSION}", "same release"]),
        ({"chunk_tokens": 512}, ["512", "256", "--chunk-size 256", "chunks of 512 tokens here"]),
    ],
    ids=["version", "chunk size"],
)
def test_fault_e13_a_server_that_does_not_fit_is_refused_once_with_both_values(
    reply, words, caplog
):
    link = Wire(chunk_tokens=256)
    for _ in range(3):
        link.ready(**reply)
        link.session.disconnected()
    link.ready(**reply)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == [link.session.refused]
    assert all(word in link.session.refused for word in words)
    assert link.session.state is State.REFUSED
    assert link.session.incarnation is None
    link.pass_time(PING_INTERVAL)
    assert link.take() == []
    assert link.session.wake_at() is None
    link.submit("r")
    _, error = link.outcome()
    assert isinstance(error, PeerGone)
    assert str(error) == link.session.refused


def test_a_server_that_refuses_us_is_refused():
    link = Wire()
    link.session.connected(link.now)
    ((header, _),) = link.take()
    link.reply(header.uid, ErrorReply(code="unsupported", message="expected 2, got 1"))
    assert link.session.state is State.REFUSED
    assert "expected 2, got 1" in link.session.refused


def test_a_fitting_successor_of_a_refused_server_is_accepted():
    link = Wire(chunk_tokens=256).ready(chunk_tokens=128)
    link.session.disconnected()
    link.ready("two")
    assert link.session.state is State.READY
    assert link.session.refused is None


@pytest.mark.parametrize(
    ("clock", "sent", "received", "offset"),
    [
        (100.0, 100.0, 100.0, 0.0),
        (100.1, 100.0, 105.0, 0.0),  # one clock, and a reply that was read late
        (150.0, 100.0, 101.0, 49.0),
        (50.0, 100.0, 101.0, -50.0),
    ],
)
def test_the_clock_offset_is_exact_where_the_clock_is_one(clock, sent, received, offset):
    assert clock_offset(clock, sent, received) == pytest.approx(offset)


def test_deadlines_travel_in_the_clock_of_the_server():
    link = Wire().ready(clock=1000.0)
    link.submit("r", timeout=2.0)
    ((header, _),) = link.take()
    assert header.deadline == pytest.approx(1002.0)
    assert header.incarnation == "one"


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["connecting", "greeting", "other incarnation", "closed"])
def test_without_a_server_a_request_fails_at_once(state):
    link = Wire()
    if state == "greeting":
        link.session.connected(link.now)
        link.take()
    elif state == "other incarnation":
        link.ready("two")
    elif state == "closed":
        link.session.close()
    link.submit("r", incarnation="one")
    owner, error = link.outcome()
    assert owner == "r"
    assert isinstance(error, Closed if state == "closed" else PeerGone)
    assert link.take() == []


def test_replies_reach_their_owners_in_any_order():
    link = Wire().ready()
    first, second = link.sent_uid("a"), link.sent_uid("b")
    link.reply(second, Cleared(chunks=2))
    assert link.outcome() == ("b", Cleared(chunks=2))
    link.reply(first, Cleared(chunks=1))
    assert link.outcome() == ("a", Cleared(chunks=1))
    assert link.session.pending == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("internal", RemoteError),
        ("unknown_instance", RemoteError),
        ("expired", TransferTimeout),
        ("stale_incarnation", PeerGone),
    ],
)
def test_error_replies_become_typed_errors(code, kind):
    link = Wire().ready()
    link.reply(link.sent_uid("r"), ErrorReply(code=code, message="why"))
    _, error = link.outcome()
    assert type(error) is kind
    assert "why" in str(error)
    assert getattr(error, "code", code) == code


def test_a_reply_of_another_type_is_the_servers_fault():
    link = Wire().ready()
    link.reply(link.sent_uid("r"), Done())
    _, error = link.outcome()
    assert isinstance(error, RemoteProtocolError)
    assert "expected Cleared, got Done" in str(error)


def test_mp_012_a_malformed_reply_ends_its_request():
    link = Wire().ready()
    link.session.received([wire.reply_frames(link.sent_uid("r"), b"")[0], b"\xc1"], link.now)
    _, error = link.outcome()
    assert isinstance(error, RemoteProtocolError)
    for junk in ([], [b""], [b"\xc1", b"\xc1"], [b"x"] * 5):
        link.session.received(junk, link.now)
    assert link.session.take_outcomes() == []
    assert link.session.state is State.READY


def test_a_reply_nobody_waits_for_is_counted_and_ignored():
    link = Wire().ready()
    uid = link.sent_uid("r")
    link.reply(uid, Cleared(chunks=1))
    link.reply(uid, Cleared(chunks=1))
    link.reply(2**64 - 1, Cleared(chunks=1))
    assert link.session.strays == 2
    assert len(link.session.take_outcomes()) == 1


def test_a_request_with_no_time_left_is_not_sent_and_accuses_nobody():
    link = Wire().ready()
    for timeout in (0.0, -1.0):
        link.submit("r", timeout=timeout)
        _, error = link.outcome()
        assert isinstance(error, TransferTimeout)
    assert link.take() == []
    assert link.session.state is State.READY


def test_a_request_that_found_no_room_fails_at_once():
    link = Wire().ready()
    link.submit("r")
    ((uid, _),) = link.session.take_outgoing()
    link.session.unsent(uid, link.now)
    _, error = link.outcome()
    assert isinstance(error, PeerGone)
    assert link.session.pending == 0
    link.session.unsent(uid, link.now)
    assert link.session.take_outcomes() == []


# --- silence --------------------------------------------------------------------------------------


def test_silence_costs_one_timeout_and_then_requests_fail_at_once():
    link = Wire().ready()
    late = link.sent_uid("slow")
    link.pass_time(0.999)
    assert link.session.take_outcomes() == []
    link.pass_time(0.001)
    owner, error = link.outcome()
    assert owner == "slow"
    assert isinstance(error, TransferTimeout)
    assert link.session.state is State.SUSPECT
    assert link.session.incarnation == "one"
    ((_, ping),) = link.take()
    assert isinstance(ping, Ping)
    link.submit("next")
    _, error = link.outcome()
    assert isinstance(error, PeerGone)
    for _ in range(3):
        link.pass_time(1.0)
        assert [type(message) for _, message in link.take()] == [Ping]
    link.reply(late, Cleared(chunks=1))
    assert link.session.state is State.READY
    assert link.session.strays == 1
    link.sent_uid("works again")


def test_an_idle_connection_is_pinged_and_an_unanswered_ping_is_silence():
    link = Wire(instance_id=7).ready()
    link.pass_time(PING_INTERVAL - 0.1)
    assert link.take() == []
    link.pass_time(0.1)
    ((header, ping),) = link.take()
    assert ping == Ping(instance=7)
    link.reply(header.uid, Pong(incarnation="one", registered=False))
    link.pass_time(PING_INTERVAL)
    assert len(link.take()) == 1
    assert link.session.state is State.READY
    link.pass_time(PING_INTERVAL)
    assert link.session.state is State.SUSPECT
    assert link.session.take_outcomes() == []


def test_a_server_silent_for_a_day_leaves_no_heap_of_pings():
    link = Wire().ready()
    link.sent_uid("r")
    for _ in range(24 * 3600):
        link.pass_time(1.0)
        link.session.take_outgoing()
    assert len(link.session._pending._entries) <= PING_INTERVAL + 1
    assert len(link.session._pending._deadlines) <= PING_INTERVAL + 1


# --- restarts -------------------------------------------------------------------------------------


def test_the_end_of_a_connection_ends_its_requests():
    link = Wire().ready()
    for owner in "abc":
        link.submit(owner)
    link.session.disconnected("nothing listens there")
    assert [owner for owner, _ in link.session.take_outcomes()] == ["a", "b", "c"]
    assert link.take() == []
    assert link.session.incarnation is None
    assert link.session.wake_at() is None
    link.submit("d")
    _, error = link.outcome()
    assert "nothing listens there" in str(error)
    link.ready("two")
    assert link.session.incarnation == "two"


def test_a_restart_that_was_not_seen_is_noticed_by_the_refusal():
    link = Wire().ready()
    first, second = link.sent_uid("a"), link.sent_uid("b")
    link.reply(first, ErrorReply(code="stale_incarnation", message="restarted"))
    outcomes = dict(link.session.take_outcomes())
    assert outcomes.keys() == {"a", "b"}
    assert all(isinstance(error, PeerGone) for error in outcomes.values())
    ((_, hello),) = link.take()
    assert isinstance(hello, Hello)
    assert link.session.incarnation is None
    link.reply(second, ErrorReply(code="stale_incarnation", message="restarted"))
    assert link.session.state is State.GREETING
    assert link.take() == []


@pytest.mark.parametrize("event", ["pong", "error", "restart", "unregister"])
def test_a_lost_registration_is_told(event):
    link = Wire(instance_id=7).ready()
    assert not link.session.registered
    link.reply(link.sent_uid("r", message=REGISTER), REGISTERED)
    assert link.session.registered
    other = link.sent_uid("o", message=Unregister(instance=8))
    link.reply(other, Done())
    link.session.disconnected()
    link.ready("one")
    assert link.session.registered  # the same server still knows
    if event == "pong":
        link.pass_time(PING_INTERVAL)
        ((header, _),) = link.take()
        link.reply(header.uid, Pong(incarnation="one", registered=False))
    elif event == "error":
        uid = link.sent_uid("c")
        link.reply(uid, ErrorReply(code="unknown_instance", message="who?"))
    elif event == "restart":
        link.session.disconnected()
        link.ready("two")
    else:
        link.reply(link.sent_uid("u", message=Unregister(instance=7)), Done())
    assert not link.session.registered


def test_closing_ends_everything():
    link = Wire().ready()
    link.submit("a")
    link.session.close()
    link.session.close()
    owner, error = link.outcome()
    assert owner == "a"
    assert isinstance(error, Closed)
    link.session.connected(link.now)
    link.session.disconnected()
    assert link.session.state is State.CLOSED


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_each_event_in_each_state_is_in_the_table_or_raises(state, event):
    session = Wire().session
    session.state = state
    if event in TRANSITIONS[state]:
        session._move(event)
        assert session.state is TRANSITIONS[state][event]
    else:
        assert event in (Event.WELCOMED, Event.REJECTED)
        with pytest.raises(LocalProtocolError, match=event.value):
            session._move(event)


def test_answered_requests_leave_no_deadlines_behind():
    table = PendingTable()
    for i in range(100_000):
        uid = table.add(Pending("o", Clear(), 0.0), 1e9 + i)
        assert table.pop(uid) is not None
    assert len(table._deadlines) <= 1025
    assert table.pop_overdue(2e9) == []


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens, each request is over exactly once, and by its deadline."""

    def __init__(self):
        super().__init__()
        self.link = Wire(instance_id=7, chunk_tokens=256)
        self.open = {}
        self.uids = []
        self.count = 0

    @rule(incarnation=st.sampled_from(["one", "two"]), chunk_tokens=st.sampled_from([256, 512]))
    def connect(self, incarnation, chunk_tokens):
        self.link.session.connected(self.link.now)
        for header, message in self.link.take():
            if isinstance(message, Hello):
                welcome = Welcome(
                    protocol=PROTOCOL_VERSION,
                    incarnation=incarnation,
                    clock=self.link.now,
                    chunk_tokens=chunk_tokens,
                )
                self.link.reply(header.uid, welcome)

    @rule()
    def disconnect(self):
        self.link.session.disconnected()

    @rule(
        timeout=st.floats(0, 20),
        message=st.sampled_from([Clear(), REGISTER, Ping(instance=7)]),
    )
    def submit(self, timeout, message):
        self.count += 1
        self.open[self.count] = self.link.now + timeout
        self.link.submit(self.count, message=message, timeout=timeout)

    @rule(which=st.integers(0), room=st.booleans())
    def send(self, which, room):
        for uid, frames in self.link.session.take_outgoing():
            if room:
                self.uids.append(wire.decode_request(frames)[0].uid)
            else:
                self.link.session.unsent(uid, self.link.now)

    @rule(
        which=st.integers(0),
        reply=st.sampled_from(
            [
                Cleared(chunks=1),
                REGISTERED,
                Pong(incarnation="one", registered=True),
                ErrorReply(code="internal", message=""),
                ErrorReply(code="stale_incarnation", message=""),
            ]
        ),
    )
    def answer(self, which, reply):
        uid = self.uids[which % len(self.uids)] if self.uids else which % 2**64
        self.link.reply(uid, reply)

    @rule(frames=st.lists(st.binary(max_size=5), max_size=3))
    def receive_junk(self, frames):
        self.link.session.received(frames, self.link.now)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.link.pass_time(seconds)

    @invariant()
    def each_ends_once_and_in_time(self):
        for owner, _ in self.link.session.take_outcomes():
            del self.open[owner]
        assert self.link.session.pending == len(self.open)
        wake_at = self.link.session.wake_at()
        for deadline in self.open.values():
            assert wake_at <= deadline
        assert (self.link.session.incarnation is None) == (
            self.link.session.state not in (State.READY, State.SUSPECT)
        )

    def teardown(self):
        self.link.session.close()
        ended = [owner for owner, _ in self.link.session.take_outcomes()]
        assert sorted(ended) == sorted(self.open)


AnyHistory.TestCase.settings = settings(stateful_step_count=40)
TestAnyHistory = AnyHistory.TestCase
