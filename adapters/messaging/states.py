"""The states of a connection to a cache server and what moves it from one to another. Pure."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a connection stands; requests are sent in READY only."""

    CONNECTING = "connecting"
    GREETING = "greeting"
    READY = "ready"
    SUSPECT = "suspect"
    REFUSED = "refused"
    CLOSED = "closed"


class Event(enum.Enum):
    """What moves a connection from one state to another."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    WELCOMED = "welcomed"
    REJECTED = "rejected"
    HEARD = "heard"
    OVERDUE = "overdue"
    RESTARTED = "restarted"
    CLOSE = "close"


_EVERYWHERE = {
    Event.CONNECTED: State.GREETING,
    Event.DISCONNECTED: State.CONNECTING,
    Event.CLOSE: State.CLOSED,
}
_STAYS = {Event.HEARD, Event.OVERDUE, Event.RESTARTED}

TRANSITIONS: dict[State, dict[Event, State]] = {
    State.CONNECTING: _EVERYWHERE | dict.fromkeys(_STAYS, State.CONNECTING),
    State.GREETING: _EVERYWHERE
    | dict.fromkeys(_STAYS, State.GREETING)
    | {Event.WELCOMED: State.READY, Event.REJECTED: State.REFUSED},
    State.READY: _EVERYWHERE
    | {
        Event.HEARD: State.READY,
        Event.OVERDUE: State.SUSPECT,
        Event.RESTARTED: State.GREETING,
    },
    State.SUSPECT: _EVERYWHERE
    | {
        Event.HEARD: State.READY,
        Event.OVERDUE: State.SUSPECT,
        Event.RESTARTED: State.GREETING,
    },
    State.REFUSED: _EVERYWHERE | dict.fromkeys(_STAYS, State.REFUSED),
    State.CLOSED: dict.fromkeys(Event, State.CLOSED),
}
"""State after an event; a pair that is not here is a bug of ours."""
