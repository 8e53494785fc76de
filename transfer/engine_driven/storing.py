"""How a store goes: prepare, gather, commit."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lmcache_kernels.errors import Closed, RemoteProtocolError, TransferFailed
from lmcache_kernels.transfer.messages import (
    AbortStore,
    CommitStore,
    Done,
    PrepareStore,
    StoreSlots,
)
from lmcache_kernels.transfer.moving.batches import batches
from lmcache_kernels.transfer.moving.moves import (
    All,
    StillMovingError,
    blocks_of,
    check_block_ids,
)
from lmcache_kernels.transfer.pacing import paced

from . import worker
from .lane import Moves
from .layered_store import LayeredStore
from .worker import pack_digests

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import Any

    from lmcache_kernels.transfer.moving.moves import (
        Completion,
        Fingerprints,
        Moved,
    )
    from lmcache_kernels.transfer.store_transfer import StoreTransfer

    from .attachment import Attached
    from .lane import Work
    from .worker import Worker


@dataclass(frozen=True, slots=True)
class Store:
    """What is to be stored; nobody else's to change.

    Attributes:
        digests: one a chunk; ``block_ids``: per group, of whole chunks.
        after: the point behind which the device has written the blocks.
        tenant: for whom.
    """

    transfer: StoreTransfer
    digests: Sequence[bytes]
    block_ids: Sequence[Any]
    after: Completion | None
    tenant: str


class Storing:
    """Stores of one worker."""

    def __init__(self, parts: Worker) -> None:
        self._worker = parts
        # What the device was given and did not finish in time, and where it may still write.
        self._lost: list[tuple[Completion, Attached]] = []

    def run(self, store: Store) -> Work:
        """The :data:`~.engine_driven.lane.Work` of a store.

        Raises:
            LayoutError: block ids that cannot be right, or a chunk named twice; nothing was reserved.
            KVTransferError: no server, or a chunk that could not be stored. What was reserved is
                given back, unless the device may still write there: then only time does that.
        """
        own = self._worker
        self.settled()
        if not store.digests:
            return Moves()
        ids = check_block_ids(store.block_ids, own.groups, loading=False)
        # An engine's step may compute one chunk for several requests, and stores it once.
        packed = pack_digests(store.digests, repeats=isinstance(store.transfer, LayeredStore))
        if store.transfer.stopped:
            raise Closed("the store was stopped before it began")
        with own.server.attached() as arena:
            message = PrepareStore(instance=own.instance, digests=packed, tenant=store.tenant)
            slots = own.server.prepare(arena, message, StoreSlots)
            if not slots.indices:
                return Moves()
            try:
                note = yield from self._fill(store, ids, arena, slots)
            except _StillWritingError:
                raise
            except BaseException:
                own.server.tell(arena, AbortStore(instance=own.instance, ticket=slots.ticket))
                raise
        chunks = len(slots.indices)
        return Moves(chunks, chunks * sum(own.layout.group_bytes), note=note)

    def _fill(
        self, store: Store, ids: Sequence[tuple[int, ...]], arena: Attached, slots: StoreSlots
    ) -> Generator[None, None, str]:
        """Write and commit the slots; which way the chunks went."""
        own = self._worker
        _check_slots(slots, arena, len(store.digests))
        ask = partial(own.server.ask, arena)
        first, note = 0, ""
        for places in arena.rounds(slots.offsets, storing=True):
            if first:
                store.transfer.pause()
            here = list(zip(slots.indices[first:], places, strict=False))
            queued = self._gather(store, ids, here, arena)
            give_up_at = time.monotonic() + worker.DEVICE_TIMEOUT
            if arena.mapped:
                yield
            found = self._end(store.transfer, arena, queued, give_up_at)
            for (index, place), fingerprints in paced(zip(here, found, strict=True)):
                arena.write_header(place, store.digests[index], fingerprints)
            for number, place in enumerate(places, start=first):
                arena.send(ask, slots.ticket, number, place)
            first, note = first + len(places), queued[-1].note
        ask(CommitStore(instance=own.instance, ticket=slots.ticket), Done)
        return note

    def _gather(
        self,
        store: Store,
        ids: Sequence[tuple[int, ...]],
        slots: Sequence[tuple[int, int]],
        arena: Attached,
    ) -> list[Moved]:
        """Give the device what goes into ``slots``: the number of a chunk, and where it goes."""
        own = self._worker
        layers = store.transfer if isinstance(store.transfer, LayeredStore) else None
        queued: list[Moved] = []
        reads: list[Completion] = []
        try:
            for some in batches(slots, own.layout.nbytes) if layers is None else [slots]:
                moves = []
                for index, place in paced(some):
                    arena.erase_header(place)
                    moves.append(arena.move(place, blocks_of(ids, own.layout, index)))
                if not store.transfer.begin():
                    raise Closed("the store was stopped before it read the cache")
                with own.span(f"gather {len(moves)} chunks"):
                    moved = own.mover.gather(moves, store.after, layers)
                queued.append(moved)
                reads.append(moved.cache_free)
        except BaseException as error:
            writes = [moved.done for moved in queued]
            patience = worker.DEVICE_TIMEOUT
            if isinstance(error, StillMovingError):  # which has waited
                reads.append(error.done)
                writes.append(error.done)
                patience = 0.0
            if not All(writes).wait(patience):
                self._lose(All(writes), arena)
                raise _StillWritingError(str(error)) from error
            raise
        finally:
            # Now, for a flush must not wait until the server has heard of it.
            store.transfer.launched(All(reads))
        return queued

    def _end(
        self, transfer: StoreTransfer, arena: Attached, queued: Sequence[Moved], give_up_at: float
    ) -> list[Fingerprints]:
        """Wait for the device; the fingerprints."""
        done = All([moved.done for moved in queued])
        if not done.wait(max(0.0, give_up_at - time.monotonic())):
            self._lose(done, arena)
            raise _StillWritingError(
                f"the device did not finish a gather in {worker.DEVICE_TIMEOUT:g} s"
            )
        if not transfer.wanted:
            raise Closed("the blocks were reused while the store read them")
        return [one for moved in queued for one in moved.fingerprints()]

    def _lose(self, done: Completion, arena: Attached) -> None:
        """The device may write into the arena until ``done``."""
        arena.hold()
        self._lost.append((done, arena))

    def settled(self) -> bool:
        """Whether the device writes nowhere any more; once no store is going on."""
        for entry in list(self._lost):
            done, arena = entry
            if done.done():
                with suppress(ValueError):  # two threads may look at once
                    self._lost.remove(entry)
                    arena.release()
        return not self._lost


class _StillWritingError(TransferFailed):
    """The device may write into the slots at any time."""


def _check_slots(slots: StoreSlots, arena: Attached, chunks: int) -> None:
    arena.check_slots(slots.offsets)
    if len(slots.indices) != len(slots.offsets) or not set(slots.indices) <= set(range(chunks)):
        raise RemoteProtocolError(
            f"slots: expected one for each of some of {chunks} chunks, got chunks "
            f"{slots.indices} and {len(slots.offsets)} offsets"
        )
