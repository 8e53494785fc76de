"""What all messages share: limits, codes, and the two kinds there are. Pure."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1
"""Raised by one whenever an existing field changes its meaning. New optional fields do not count."""

DIGEST_BYTES = 32
"""Full blake3 digest; never shortened, so equal digest means equal prefix."""

MAX_CHUNKS = 1 << 16
"""Most chunks one message may name (16.7 M tokens at 256 a chunk)."""

MAX_PART = 4 << 20
"""Most bytes of a slot in one message. The server copies them, a millisecond or so, between others'
requests."""

MAX_TRANSFERS = 1 << 12
"""Most transfers one :class:`Settle` may name."""

MAX_NAME = 512
"""Longest request id accepted, in characters."""

MAX_TENANT = 128
"""Longest name of a tenant accepted, in characters."""

MAX_PIN_SECONDS = 7 * 86400.0
"""Longest time that chunks can be pinned for at once."""

ERROR_CODES = {
    "bad_request": "the request cannot be served as it is: a length, range or value is wrong",
    "unsupported": "unknown operation or protocol version; the message names both versions",
    "unknown_instance": "this worker is not registered here (any more): register again",
    "stale_incarnation": "the request was meant for a server that has restarted since",
    "expired": "the deadline had passed when the request was read; nothing was done",
    "unknown_ticket": "this prepared transfer does not exist (any more)",
    "no_space": "the chunk is larger than the whole arena",
    "draining": "the server is about to end: it finishes what was begun, and begins nothing new",
    "busy": "too many workers, caches or pins are there, or too many transfers are under way",
    "stopped": "the transfer was stopped before it moved anything",
    "failed": "the copy could not be made; nothing of it is offered to anyone",
    "internal": "a bug in the server; its log has the trace",
}
"""Codes of :class:`ErrorReply` and what they mean."""


class Request(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower):
    """Base of everything that can be asked."""


class Reply(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower):
    """Base of everything that can be answered."""


class ErrorReply(Reply, frozen=True, kw_only=True):
    """The request was not served. ``code`` is one of :data:`ERROR_CODES`."""

    code: str
    message: str


def split_digests(packed: bytes) -> list[bytes]:
    """The digests in a packed field."""
    return [packed[i : i + DIGEST_BYTES] for i in range(0, len(packed), DIGEST_BYTES)]


def is_tenant(name: str) -> bool:
    """Can a tenant have this name? It is short and printable, and has none of ``@ / \\``; "" is the
    name of those who have none."""
    return len(name) <= MAX_TENANT and name.isprintable() and not any(c in "@/\\" for c in name)
