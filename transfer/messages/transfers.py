"""Messages about chunks on their way to and from the arena. Pure."""

from __future__ import annotations

import msgspec

from .base import Reply, Request

# --- transfers ------------------------------------------------------------------------------------


class PrepareStore(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Reserve slots for chunks about to be written, out of the quota of ``tenant`` if it has one.

    Tenants are told apart by name only, at most ``MAX_TENANT`` characters; "": none.
    """

    instance: int
    digests: bytes
    tenant: str = ""


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
    dropped so that nobody is offered them again. ``failed``: the worker has no use of what it read, for
    a reason of its own."""

    instance: int
    ticket: int
    damaged: list[int] = msgspec.field(default_factory=list)
    failed: bool = False


# --- transfers that the server makes --------------------------------------------------------------


class StoreBlocks(Request, frozen=True, kw_only=True, omit_defaults=True):
    """Copy chunks out of the worker's registered cache, those that are not there yet.

    Args:
        transfer: id of this transfer, which the worker never uses again.
        blocks: per group, the blocks of the chunks in order as 32-bit little-endian integers; a tail
            that is no whole chunk is ignored.
        event: handle of the event after which the blocks hold what is to be stored; empty on a CPU.
        tenant: see :class:`PrepareStore`.
    """

    instance: int
    transfer: int
    digests: bytes
    blocks: list[bytes]
    event: bytes = b""
    tenant: str = ""


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
