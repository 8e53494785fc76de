"""Messages about servers and workers: who is there, and who moves which chunks. Pure."""

from __future__ import annotations

from lmcache_kernels.transfer.cache_forms import (  # noqa: TC001 - read when messages are decoded
    ShardPart,
    SharedPiece,
)

from .base import Reply, Request

# --- connection -----------------------------------------------------------------------------------


class Hello(Request, frozen=True, kw_only=True):
    """First request of a connection."""

    protocol: int
    software: str = ""


class Welcome(Reply, frozen=True, kw_only=True):
    """Which server this is. ``clock`` is its monotonic time in seconds, for deadlines."""

    protocol: int
    incarnation: str
    clock: float
    chunk_tokens: int
    software: str = ""


class Ping(Request, frozen=True, kw_only=True):
    """Are you there, and is worker ``instance`` (None: no worker) still registered?"""

    instance: int | None = None


class Pong(Reply, frozen=True, kw_only=True):
    incarnation: str
    registered: bool


# --- workers --------------------------------------------------------------------------------------


class Register(Request, frozen=True, kw_only=True):
    """Worker ``instance`` will move chunks of ``shard``, each ``chunk_bytes`` of payload.

    Registering a known instance again replaces its registration.
    """

    instance: int
    shard: bytes
    chunk_bytes: int


class RegisterCache(Request, frozen=True, kw_only=True):
    """Worker ``instance`` lets the server itself copy from and to its cache.

    ``groups``: per KV-cache group its tensors and their forms. ``part`` is which part of the model's
    cache that is and ``shard`` the id that follows from it and from the layout of the chunks, which
    the server computes again. ``max_programs`` bounds the grid of every kernel.

    Registering a known instance again replaces its registration.
    """

    instance: int
    shard: bytes
    part: ShardPart
    groups: list[tuple[SharedPiece, ...]]
    max_programs: int | None = None


class Registered(Reply, frozen=True, kw_only=True):
    """The arena to attach: a POSIX shared-memory name below /dev/shm and its size in bytes.

    The server holds a lock on the file for as long as it lives.
    """

    arena_name: str
    arena_bytes: int


class Unregister(Request, frozen=True, kw_only=True):
    """Forget the worker; discard what it has prepared and not committed."""

    instance: int


class Done(Reply, frozen=True):
    """It is done."""
