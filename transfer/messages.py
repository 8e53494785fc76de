"""What a worker or scheduler can ask of a cache, and what it is answered.

One struct for each request and each reply; nothing else ever crosses a socket or reaches a
:class:`~lmcache_kernels.transfer.serving.service.CacheService`. Every request gets exactly one reply: the
type :data:`REPLY_OF` names for it, or :class:`ErrorReply`. Pure: no sockets, no clocks.

Chunks are named by a *shard id* (32 bytes: which slice of the model's KV cache, in which canonical
form) and a *digest* (32 bytes: which tokens after which prefix). ``digests`` fields hold ``n``
digests packed one after the other, in prefix order.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .cache_forms import ShardPart, SharedPiece  # noqa: TC001 - read when messages are decoded

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

ERROR_CODES = {
    "bad_request": "the request cannot be served as it is: a length, range or value is wrong",
    "unsupported": "unknown operation or protocol version; the message names both versions",
    "unknown_instance": "this worker is not registered here (any more): register again",
    "stale_incarnation": "the request was meant for a server that has restarted since",
    "expired": "the deadline had passed when the request was read; nothing was done",
    "unknown_ticket": "this prepared transfer does not exist (any more)",
    "no_space": "the chunk is larger than the whole arena",
    "draining": "the server is about to end: it finishes what was begun, and begins nothing new",
    "busy": "too many workers or caches are registered, or too many transfers are under way",
    "stopped": "the transfer was stopped before it moved anything",
    "failed": "the copy could not be made; nothing of it is offered to anyone",
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


# --- transfers that the server makes --------------------------------------------------------------


class StoreBlocks(Request, frozen=True, kw_only=True):
    """Copy chunks out of the worker's registered cache, those that are not there yet.

    Args:
        transfer: id of this transfer, which the worker never uses again.
        blocks: per group, the blocks of the chunks in order as 32-bit little-endian integers; a tail
            that is no whole chunk is ignored.
        event: handle of the event after which the blocks hold what is to be stored; empty on a CPU.
    """

    instance: int
    transfer: int
    digests: bytes
    blocks: list[bytes]
    event: bytes = b""


class Copied(Reply, frozen=True, kw_only=True):
    """So many chunks are copied, but not found before :class:`CommitStore` of the ticket. No chunk:
    nothing to do, and no ticket."""

    ticket: int
    chunks: int


class LoadBlocks(Request, frozen=True, kw_only=True):
    """Copy chunks into the worker's registered cache; the fields are those of :class:`StoreBlocks`.

    Blocks of -1, and those of the first ``skip_tokens`` rounded down to blocks, are left alone.
    ``event``: after it the blocks may be written.
    """

    instance: int
    transfer: int
    digests: bytes
    blocks: list[bytes]
    skip_tokens: int = 0
    event: bytes = b""


class Loaded(Reply, frozen=True, kw_only=True):
    """So many chunks, from the first on, are in the cache now."""

    chunks: int


class Settle(Request, frozen=True, kw_only=True):
    """Stop those of the worker's transfers that have not begun, now or if they come later.

    Answered when those that had begun are over, too: then none of them touches the cache.
    """

    instance: int
    transfers: list[int]


# --- slots by message, for workers that cannot map the arena -------------------------------------


class PutPart(Request, frozen=True, kw_only=True):
    """Write ``data`` into a slot that the worker has reserved, ``start`` bytes behind its begin.

    ``index`` counts the slots of the ticket, as :class:`StoreSlots` does.
    """

    instance: int
    ticket: int
    index: int
    start: int
    data: bytes


class GetPart(Request, frozen=True, kw_only=True):
    """Read part of a slot that the worker holds; the fields are those of :class:`PutPart`."""

    instance: int
    ticket: int
    index: int
    start: int
    nbytes: int


class Part(Reply, frozen=True, kw_only=True):
    """As many bytes as were asked for."""

    data: bytes


class ErrorReply(Reply, frozen=True, kw_only=True):
    """The request was not served. ``code`` is one of :data:`ERROR_CODES`."""

    code: str
    message: str


AnyRequest: TypeAlias = (
    Hello | Ping | Register | Unregister | Lookup | EndSession | Clear
    | PrepareStore | CommitStore | AbortStore | PrepareRetrieve | CommitRetrieve
    | RegisterCache | StoreBlocks | LoadBlocks | Settle | PutPart | GetPart
)  # fmt: skip
AnyReply: TypeAlias = (
    Welcome | Pong | Registered | Done | Found | Cleared | StoreSlots | LoadSlots
    | Copied | Loaded | Part | ErrorReply
)  # fmt: skip

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
    RegisterCache: Registered,
    StoreBlocks: Copied,
    LoadBlocks: Loaded,
    Settle: Done,
    PutPart: Done,
    GetPart: Part,
}


def split_digests(packed: bytes) -> list[bytes]:
    """The digests in a packed field."""
    return [packed[i : i + DIGEST_BYTES] for i in range(0, len(packed), DIGEST_BYTES)]
