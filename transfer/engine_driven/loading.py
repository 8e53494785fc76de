"""How a load goes: prepare, scatter, compare, commit.

A load has until its deadline to begin. Whether that has passed is looked at last, before the device
is given the moves; a load that is late has touched no block and never will. Once the device has the
moves there is no way back, so from then on the result comes when the device is done, however long
that takes, and not before: whoever is told that a load is over may give its blocks to others.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lmcache_kernels.errors import Closed, RemoteProtocolError, TransferTimeout
from lmcache_kernels.transfer.messages import CommitRetrieve, LoadSlots, PrepareRetrieve
from lmcache_kernels.transfer.moving.batches import batches
from lmcache_kernels.transfer.moving.moves import (
    blocks_of,
    check_block_ids,
    is_as_stored,
    leave_out,
)
from lmcache_kernels.transfer.pacing import paced

from . import worker
from .lane import Moves
from .layered_load import LayeredLoad
from .worker import pack_digests

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import Any, TypeAlias

    from lmcache_kernels.chunk_copy import Layers
    from lmcache_kernels.transfer.moving.moves import (
        ChunkMove,
        Completion,
        Fingerprints,
        Moved,
    )
    from lmcache_kernels.transfer.store_transfer import Transfer

    from .attachment import Attached
    from .lane import Work
    from .worker import Worker

    _Queued: TypeAlias = tuple[Moved, list[tuple[int, ...]]]
    """What the device was given, and the fingerprints that each chunk shall have."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be loaded; nobody else's to change.

    Attributes:
        digests: one a chunk; ``block_ids``: per group, of whole chunks.
        skip_tokens: whose blocks are left alone.
        after: the point behind which the blocks may be written.
        begin_by: monotonic seconds.
        layers: in which order they are to come, see :class:`~.engine_driven.layered_load.LayeredLoad`.
    """

    transfer: Transfer
    digests: Sequence[bytes]
    block_ids: Sequence[Any]
    skip_tokens: int
    after: Completion | None
    begin_by: float
    layers: Layers | None = None


class Loading:
    """Loads of one worker."""

    def __init__(self, parts: Worker) -> None:
        self._worker = parts

    def run(self, load: Load) -> Work:
        """The :data:`~.engine_driven.lane.Work` of a load.

        Raises:
            LayoutError: block ids that cannot be right, or a chunk named twice.
            TransferTimeout: too late to begin.
            KVTransferError: no server.
        """
        own = self._worker
        if not load.digests:
            return Moves()
        ids = check_block_ids(load.block_ids, own.groups, loading=True)
        ids = leave_out(ids, own.layout, load.skip_tokens)
        packed = pack_digests(load.digests)
        self._check_skip(load.skip_tokens)
        _check_time(load)
        with own.server.attached() as arena:
            message = PrepareRetrieve(instance=own.instance, digests=packed)
            slots = own.server.prepare(arena, message, LoadSlots)
            if not slots.offsets:
                return Moves()
            damaged: list[int] = []
            failed = True
            try:
                loaded, nbytes, note = yield from self._fetch(load, ids, arena, slots, damaged)
                failed = False
            finally:
                own.server.tell(
                    arena,
                    CommitRetrieve(
                        instance=own.instance, ticket=slots.ticket, damaged=damaged, failed=failed
                    ),
                )
        return Moves(loaded, nbytes, bool(damaged), note)

    def _fetch(
        self,
        load: Load,
        ids: Sequence[tuple[int, ...]],
        arena: Attached,
        slots: LoadSlots,
        damaged: list[int],
    ) -> Generator[None, None, tuple[int, int, str]]:
        """How many chunks came as they were stored, how many bytes of them, and on which way.

        Args:
            damaged: gets those that their slots do not hold; the load ends before the first.
        """
        own = self._worker
        _check_slots(slots, arena, len(load.digests))
        ask = partial(own.server.ask, arena)
        loaded, nbytes, note = 0, 0, ""
        sizes = own.layout.group_bytes
        for places in arena.rounds(slots.offsets, storing=False):
            for number, place in enumerate(places, start=loaded):
                arena.fetch(ask, slots.ticket, number, place)
            queued = self._queue(load, ids, arena, places, loaded, len(slots.offsets), damaged)
            if arena.mapped and queued:
                yield
            good = _as_expected(queued)
            loaded += len(good)
            nbytes += sum(
                size
                for found in good
                for size, one in zip(sizes, found, strict=True)
                if one is not None
            )
            if len(good) < sum(len(expected) for _, expected in queued):
                damaged.append(loaded)
                name = load.digests[loaded].hex()[:16]
                logger.warning("chunk %s is damaged: it is not what was stored", name)
            if queued:
                note = queued[-1][0].note
            if damaged:
                break
        return loaded, nbytes, note

    def _queue(
        self,
        load: Load,
        ids: Sequence[tuple[int, ...]],
        arena: Attached,
        places: Sequence[int],
        first: int,
        chunks: int,
        damaged: list[int],
    ) -> list[_Queued]:
        """Give the device what is at ``places``, the chunks from number ``first`` of so many on.

        Ends before the first of ``damaged``, which gets it. If it raises, the device is done with what it
        had been given.
        """
        own = self._worker
        queued: list[_Queued] = []
        some = [places] if load.layers is not None else batches(places, own.layout.nbytes)
        index = first
        try:
            for batch in some:
                moves: list[ChunkMove] = []
                expected: list[tuple[int, ...]] = []
                for place in paced(batch):
                    stored = arena.fingerprints_of(place, load.digests[index])
                    if stored is None:
                        damaged.append(index)
                        break
                    moves.append(arena.move(place, blocks_of(ids, own.layout, index)))
                    expected.append(stored)
                    index += 1
                if moves:
                    begins = index == len(moves)
                    moved = self._scatter(load, moves, first=begins, last=index == chunks)
                    queued.append((moved, expected))
                if damaged:
                    break
        except BaseException:
            _wait(queued)
            raise
        return queued

    def _scatter(self, load: Load, moves: Sequence[ChunkMove], *, first: bool, last: bool) -> Moved:
        if first:
            _check_time(load)
        if not load.transfer.begin():
            raise Closed("the load was stopped before it was complete")
        with self._worker.span(f"scatter {len(moves)} chunks"):
            moved = self._worker.mover.scatter(moves, load.after, load.layers)
        if isinstance(load.transfer, LayeredLoad):
            load.transfer.queued(moved, last=last)
        return moved

    def _check_skip(self, skip_tokens: int) -> None:
        for index, group in enumerate(self._worker.groups):
            if skip_tokens % group.block_tokens:
                logger.error(
                    "skip_first_n_tokens: expected a multiple of the %d tokens of a block of group "
                    "%d, got %d; whole blocks are left alone, the one after them is loaded in full",
                    group.block_tokens,
                    index,
                    skip_tokens,
                )


def _check_time(load: Load) -> None:
    late = time.monotonic() - load.begin_by
    if late >= 0:
        raise TransferTimeout(
            f"the load came to its turn {late:.3f} s after its deadline; it has written nothing"
        )


def _check_slots(slots: LoadSlots, arena: Attached, chunks: int) -> None:
    arena.check_slots(slots.offsets)
    if len(slots.offsets) > chunks:
        raise RemoteProtocolError(f"slots: expected at most {chunks}, got {len(slots.offsets)}")


def _as_expected(queued: Sequence[_Queued]) -> list[Fingerprints]:
    """Wait for the device, however long it takes; of the chunks that are as expected, from the first on."""
    _wait(queued)
    good: list[Fingerprints] = []
    for moved, expected in queued:
        for found, stored in zip(moved.fingerprints(), expected, strict=True):
            if not is_as_stored(found, stored):
                return good
            good.append(found)
    return good


def _wait(queued: Sequence[_Queued]) -> None:
    for moved, _ in queued:
        while not moved.done.wait(worker.DEVICE_TIMEOUT):
            logger.error("the device has not finished a scatter in %s s", worker.DEVICE_TIMEOUT)
