"""Sockets that never block: bounded queues, bounded messages, nothing kept once they close."""

from __future__ import annotations

from typing import TypeAlias

import zmq

from .wire import MAX_FRAME

QUEUE_LIMIT = 10_000
"""Messages held for a peer that does not read; more find no room."""

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


def bounded_socket(context: Context, kind: int) -> Socket:
    """A new socket; a peer that sends a frame beyond ``MAX_FRAME`` is disconnected."""
    made = context.socket(kind)
    made.linger = 0
    made.set(zmq.SNDHWM, QUEUE_LIMIT)
    made.set(zmq.RCVHWM, QUEUE_LIMIT)
    made.set(zmq.MAXMSGSIZE, MAX_FRAME)
    return made


def receive(source: Socket) -> list[bytes] | None:
    """The frames of a message; None: there is none now."""
    try:
        return source.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
