"""Messages of schedulers: which chunks are there, and which shall stay. Pure."""

from __future__ import annotations

import msgspec

from .base import Reply, Request


class Lookup(Request, frozen=True, kw_only=True):
    """How long a prefix of these chunks is there for every one of ``shards``?

    The chunks found stay readable for ``request`` until :class:`EndSession` or the lease runs out.
    A second lookup of the same request replaces the first.
    """

    request: str
    shards: list[bytes]
    digests: bytes


class Found(Reply, frozen=True, kw_only=True):
    chunks: int


class EndSession(Request, frozen=True, kw_only=True):
    """Release everything a lookup holds for ``request``; unknown ids are fine."""

    request: str


class Clear(Request, frozen=True, kw_only=True):
    """Let nothing that was stored for ``shards`` until now (none named: for any) be found again.

    Chunks in use go when the last user is done with them; what is being written is not published.
    """

    shards: list[bytes] = msgspec.field(default_factory=list)


class Cleared(Reply, frozen=True, kw_only=True):
    """How many chunks were found before and are not any more."""

    chunks: int
