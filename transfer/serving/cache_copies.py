"""A worker's cache as this process has it open, and copies between it and this process's arena."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.errors import KVTransferError, LayoutError
from lmcache_kernels.transfer.cache_forms import read_group
from lmcache_kernels.transfer.kv_groups import nested
from lmcache_kernels.transfer.moving.batches import batches
from lmcache_kernels.transfer.moving.movers import mover_for
from lmcache_kernels.transfer.moving.moves import (
    StillMovingError,
    blocks_of,
    check_block_ids,
    copy_block_ids,
    is_as_stored,
    leave_out,
)
from lmcache_kernels.transfer.sharing.descriptors import CUDA_HANDLE_BYTES, CpuShare
from lmcache_kernels.transfer.sharing.wrapping import open_kv_caches

from .request_checks import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_kernels.transfer.messages import RegisterCache
    from lmcache_kernels.transfer.moving.moves import Completion, Moved

    from .served_arena import ServedArena
    from .served_cache import Permit

logger = logging.getLogger(__name__)

OVERDUE_SECONDS = 60.0
"""A copy that takes longer is logged, again and again; 60 s of link is 3 TB."""


class CacheCopies:
    """Opens what a worker has registered, and copies it. One thread may gather, another scatter.

    Copies return when they are over, however long they take, because the blocks and the slots cannot
    be given to anyone before.

    Args:
        request: the worker's.
        chunk_tokens: of the chunks to be kept.
        arena: where the chunks are.

    Raises:
        KVTransferError: memory that cannot be opened, or is not what the request says it is.
    """

    def __init__(self, request: RegisterCache, chunk_tokens: int, arena: ServedArena) -> None:
        tensors = [one for group in request.groups for piece in group for one in piece.tensors]
        for one in tensors:
            if isinstance(one.share, CpuShare) and one.share.segment == arena.name:
                raise LayoutError("share.segment: expected memory of a cache, got the arena's")
        with ExitStack() as closing:
            opened = open_kv_caches(tensors)
            closing.callback(opened.close)
            found = iter(opened.tensors)
            self.groups = tuple(
                read_group(
                    [
                        (nested([next(found) for _ in piece.tensors], piece.lists), piece.form)
                        for piece in group
                    ]
                )
                for group in request.groups
            )
            self.layout = ChunkLayout.of(self.groups, chunk_tokens)
            shard = request.part.shard(self.layout.fingerprint)
            if shard != request.shard:
                raise LayoutError(
                    f"shard: expected {shard.hex()} for these tensors, got {request.shard.hex()}"
                )
            self._device = self.groups[0].device
            self._mover = mover_for(self.groups, self.layout, request.max_programs)
            closing.callback(self._mover.close)
            self._arena = arena
            self._slots = arena.slots(shard, self.layout.nbytes, pin=self._device != "cpu")
            self._closing = closing.pop_all()

    def check(
        self, packed: Sequence[bytes], event: bytes, chunks: int, *, loading: bool
    ) -> list[tuple[int, ...]]:
        """The block ids in a request, per group, once they and the event can be right.

        Args:
            packed: per group, 32-bit little-endian integers.

        Raises:
            LayoutError: as :func:`.moving.moves.check_block_ids`; an event of another kind of device.
        """
        expected = 0 if self._device == "cpu" else CUDA_HANDLE_BYTES
        if len(event) != expected:
            raise LayoutError(
                f"event: expected a handle of {expected} bytes on {self._device}, got {len(event)}"
            )
        for index, one in enumerate(packed):
            if len(one) % 4:
                raise LayoutError(f"blocks[{index}]: expected 4 bytes an id, got {len(one)} bytes")
        ids = [np.frombuffer(one, dtype="<i4") for one in packed]
        return check_block_ids(
            copy_block_ids(ids, self.layout, chunks), self.groups, loading=loading
        )

    def gather(
        self,
        permit: Permit,
        event: bytes,
        digests: Sequence[bytes],
        offsets: Sequence[int],
        indices: Sequence[int],
        blocks: Sequence[tuple[int, ...]],
    ) -> None:
        """Copy chunks into slots, each complete with its header.

        Args:
            permit: whether it may begin.
            event: after which the cache holds what is to be copied.
            digests: of all chunks of the request.
            offsets: of the slots; slot ``i`` is for chunk ``indices[i]`` of the request.
            blocks: of all chunks of the request, per group.

        Raises:
            RefusedError: nothing was copied. Anything else: the slots hold nothing that counts.
        """
        after = self._begin(permit, event)
        slots = self._slots
        places = list(zip(indices, offsets, strict=True))
        with self._arena.copying():
            with _all_over() as queued:
                for batch in batches(places, self.layout.nbytes):
                    moves = []
                    for index, offset in batch:
                        slots.erase_header(offset)
                        moves.append(slots.move(offset, blocks_of(blocks, self.layout, index)))
                    queued.append(self._mover.gather(moves, after))
            found = [one for moved in queued for one in moved.fingerprints()]
            for (index, offset), fingerprints in zip(places, found, strict=True):
                slots.write_header(offset, digests[index], fingerprints)

    def scatter(
        self,
        permit: Permit,
        event: bytes,
        digests: Sequence[bytes],
        offsets: Sequence[int],
        blocks: Sequence[tuple[int, ...]],
        skip_tokens: int,
    ) -> tuple[int, list[int]]:
        """Copy chunks out of the slots at ``offsets``; arguments as for :meth:`gather`.

        Returns:
            How many chunks, from the first on, arrived as they were stored; and the indices of those
            that their slots do not hold.

        Raises:
            RefusedError: nothing was copied. Anything else: the blocks hold nothing usable.
        """
        after = self._begin(permit, event)
        blocks = leave_out(blocks, self.layout, skip_tokens)
        damaged: list[int] = []
        expected: list[tuple[int, ...]] = []
        with self._arena.copying(), _all_over() as queued:
            for batch in batches(offsets, self.layout.nbytes):
                moves = []
                for offset in batch:
                    index = len(expected)
                    stored = self._slots.fingerprints_of(offset, digests[index])
                    if stored is None:
                        damaged.append(index)
                        break
                    moves.append(self._slots.move(offset, blocks_of(blocks, self.layout, index)))
                    expected.append(stored)
                queued.append(self._mover.scatter(moves, after))
                if damaged:
                    break
        found = [one for moved in queued for one in moved.fingerprints()]
        for index, (want, got) in enumerate(zip(expected, found, strict=True)):
            if not is_as_stored(got, want):
                name = digests[index].hex()[:16]
                logger.warning("chunk %s is damaged: it is not what was stored", name)
                return index, [*damaged, index]
        return len(expected), damaged

    def close(self) -> None:
        """Give the memory back to the worker; no copy runs. Idempotent."""
        self._closing.close()

    def _begin(self, permit: Permit, handle: bytes) -> Completion | None:
        """Wait on this thread for the event, so that nothing a worker does holds a queued copy up."""
        after = self._import(handle) if handle else None
        permit.wait_for(after)
        return after

    def _import(self, handle: bytes) -> Completion:
        from lmcache_kernels.transfer.moving.device import EventCompletion
        from lmcache_kernels.transfer.sharing.ipc_events import import_event

        try:
            return EventCompletion(import_event(handle, self._device))
        except KVTransferError as error:
            raise RefusedError("bad_request", str(error)) from error


@contextmanager
def _all_over() -> Iterator[list[Moved]]:
    """What is put into the list is over when the block is, however it ends."""
    queued: list[Moved] = []
    try:
        yield queued
    except StillMovingError as error:
        _wait(error.done)
        raise
    finally:
        for moved in queued:
            _wait(moved.done)


def _wait(point: Completion) -> None:
    while not point.wait(OVERDUE_SECONDS):
        logger.error("the device has not finished a copy in %s s", OVERDUE_SECONDS)
