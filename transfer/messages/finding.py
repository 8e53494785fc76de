"""Messages of schedulers: which chunks are there, and which shall stay. Pure."""

from __future__ import annotations

import msgspec

from .base import Reply, Request


class Lookup(Request, frozen=True, kw_only=True, omit_defaults=True):
    """How long a prefix of these chunks is there, as far as ``shards`` need it?

    The chunks found stay readable for ``request`` until :class:`EndSession` or the lease runs out.
    A second lookup of the same request replaces the first, and so renews its lease.

    ``windows``: for each shard how many chunks, the last ones of the hit, it needs; 0, or no windows at
    all: every chunk. The others are not looked for, and not kept for the request.

    ``tenant``: whose quota is charged with what comes up from below the arena.
    """

    request: str
    shards: list[bytes]
    digests: bytes
    windows: list[int] = msgspec.field(default_factory=list)
    tenant: str = ""


class Found(Reply, frozen=True, kw_only=True):
    """So many chunks, from the first on."""

    chunks: int


class EndSession(Request, frozen=True, kw_only=True):
    """Release everything a lookup holds for ``request``; unknown ids are fine."""

    request: str


class Pin(Request, frozen=True, kw_only=True):
    """Keep these chunks for ``seconds``, whether somebody uses them or not, for every one of ``shards``.

    Answered by how many, from the first on, are there and kept; all pins together may hold a part of the
    arena only. Replaces the pin of the same name; ends by itself, by :class:`Unpin`, and for what a
    :class:`Clear` takes away.
    """

    pin: str
    shards: list[bytes]
    digests: bytes
    seconds: float


class Unpin(Request, frozen=True, kw_only=True):
    """End a pin; unknown names are fine."""

    pin: str


class Clear(Request, frozen=True, kw_only=True):
    """Let nothing that was stored for ``shards`` until now (none named: for any) be found again.

    Chunks in use go when the last user is done with them; what is being written is not published.
    """

    shards: list[bytes] = msgspec.field(default_factory=list)


class Cleared(Reply, frozen=True, kw_only=True):
    """How many chunks were found before and are not any more."""

    chunks: int
