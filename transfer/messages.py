"""What a worker or scheduler can ask of a cache, and what it is answered.

One struct for each request and each reply; nothing else ever crosses a socket or reaches a
:class:`~lmcache_kernels.transfer.service.CacheService`. Every request gets exactly one reply: the
type :data:`REPLY_OF` names for it, or :class:`ErrorReply`. Pure: no sockets, no clocks.

Chunks are named by a *shard id* (32 bytes: which slice of the model's KV cache, in which canonical
form) and a *digest* (32 bytes: which tokens after which prefix). ``digests`` fields hold ``n``
digests packed one after the other, in prefix order.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PROTOCOL_VERSION = 1
"""Raised by one whenever an existing field changes its meaning. New optional fields do not count."""

DIGEST_BYTES = 32
"""Full blake3 digest; never shortened, so equal digest means equal prefix."""

MAX_CHUNKS = 1 << 16
"""Most chunks one message may name (16.7 M tokens at 256 a chunk)."""

MAX_NAME = 512
"""Longest request id accepted, in characters."""

ERROR_CODES = {
    "bad_request": "the request cannot be served as it is: a length, range or value is wrong",
    "unsupported": "unknown operation or protocol version; the message names both versions",
    "unknown_instance": "this worker is not registered here (any more): register again",
    "stale_incarnation": "the request was meant for a server that has restarted since",
    "expired": "the deadline had passed when the request was read; nothing was done",
    "unknown_ticket": "this prepared transfer does not exist (any more)",
    "no_space": "the chunk is larger than the whole arena",
    "internal": "a bug in the server; its log has the trace",
}
"""Codes of :class:`ErrorReply` and what they mean."""


class Request(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower):
    """Base of everything that can be asked."""


class Reply(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower):
    """Base of everything that can be answered."""


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


class Registered(Reply, frozen=True, kw_only=True):
    """The arena to attach: a POSIX shared-memory name below /dev/shm and its size in bytes."""

    arena_name: str
    arena_bytes: int


class Unregister(Request, frozen=True, kw_only=True):
    """Forget the worker; discard what it has prepared and not committed."""

    instance: int


class Done(Reply, frozen=True):
    """It is done."""


# --- scheduler ------------------------------------------------------------------------------------


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

    shards: list[bytes] = []


class Cleared(Reply, frozen=True, kw_only=True):
    """How many chunks were found before and are not any more."""

    chunks: int


# --- transfers ------------------------------------------------------------------------------------


class PrepareStore(Request, frozen=True, kw_only=True):
    """Reserve slots for chunks about to be written."""

    instance: int
    digests: bytes


class StoreSlots(Reply, frozen=True, kw_only=True):
    """Write chunk ``indices[i]`` of the request into the slot at byte ``offsets[i]`` of the arena.

    Chunks that are there already, are being written by someone, or found no room are left out: the
    indices are those of the longest run of the others that fits. Nothing listed: nothing to do, and
    no ticket to commit.
    """

    ticket: int
    indices: list[int]
    offsets: list[int]


class CommitStore(Request, frozen=True, kw_only=True):
    """Every slot of the ticket is written: publish it."""

    instance: int
    ticket: int


class AbortStore(Request, frozen=True, kw_only=True):
    """The slots of the ticket were not (all) written: discard them."""

    instance: int
    ticket: int


class PrepareRetrieve(Request, frozen=True, kw_only=True):
    """Hold chunks of the worker's shard while they are being read."""

    instance: int
    digests: bytes


class LoadSlots(Reply, frozen=True, kw_only=True):
    """Offsets of the longest readable prefix; maybe shorter than asked, maybe empty (no ticket)."""

    ticket: int
    offsets: list[int]


class CommitRetrieve(Request, frozen=True, kw_only=True):
    """Reading is over. ``damaged``: indices whose slot did not hold what it should; they are
    dropped so that nobody is offered them again."""

    instance: int
    ticket: int
    damaged: list[int] = []


class ErrorReply(Reply, frozen=True, kw_only=True):
    """The request was not served. ``code`` is one of :data:`ERROR_CODES`."""

    code: str
    message: str


AnyRequest: TypeAlias = (
    Hello | Ping | Register | Unregister | Lookup | EndSession | Clear
    | PrepareStore | CommitStore | AbortStore | PrepareRetrieve | CommitRetrieve
)  # fmt: skip
AnyReply: TypeAlias = (
    Welcome | Pong | Registered | Done | Found | Cleared | StoreSlots | LoadSlots | ErrorReply
)

REPLY_OF: dict[type[Request], type[Reply]] = {
    Hello: Welcome,
    Ping: Pong,
    Register: Registered,
    Unregister: Done,
    Lookup: Found,
    EndSession: Done,
    Clear: Cleared,
    PrepareStore: StoreSlots,
    CommitStore: Done,
    AbortStore: Done,
    PrepareRetrieve: LoadSlots,
    CommitRetrieve: Done,
}


def split_digests(packed: bytes) -> list[bytes]:
    """The digests in a packed field."""
    return [packed[i : i + DIGEST_BYTES] for i in range(0, len(packed), DIGEST_BYTES)]
