"""The slots of one shard in an arena that this process has mapped: their headers and payloads."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import LayoutError, RemoteProtocolError
from lmcache_kernels.transfer.moving.moves import ChunkMove

from .slot_header import HEADER_BYTES, pack_header, read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.transfer.moving.moves import Fingerprints

    from .pinning import PinnedRegion

logger = logging.getLogger(__name__)

PIN_PATIENCE = 1.0
"""Seconds that a copy waits for CUDA to register the memory it goes through. A piece takes some 50 ms
and what is waited for comes next; without, the copy is several times as slow."""


class Memory(Protocol):
    """Of this process, or mapped into it."""

    nbytes: int
    address: int

    def view(self, offset: int, nbytes: int) -> memoryview: ...

    def close(self) -> None: ...


class ArenaSlots:
    """Reads and writes slots.

    Args:
        arena: mapped here, or something else that has slots.
        pinned: the same memory as registered with CUDA; None on a machine without.
        shard: id of the slice; goes into and is checked in every slot header.
        payload_bytes: of one chunk.
        patience: seconds that a copy waits for its memory to be registered.
    """

    def __init__(
        self,
        arena: Memory,
        pinned: PinnedRegion | None,
        *,
        shard: bytes,
        payload_bytes: int,
        patience: float = PIN_PATIENCE,
    ) -> None:
        self._arena = arena
        self._pinned = pinned
        self._shard = shard
        self._payload_bytes = payload_bytes
        self._patience = patience
        self._all_reachable = False

    def check_slots(self, offsets: Sequence[int]) -> None:
        """Raise RemoteProtocolError unless the slots lie inside the arena and apart from each other."""
        span = HEADER_BYTES + self._payload_bytes
        previous_end = 0
        for offset in sorted(offsets):
            if offset < previous_end or offset + span > self._arena.nbytes:
                raise RemoteProtocolError(
                    f"slot at {offset}: expected {span} bytes of its own inside an arena of "
                    f"{self._arena.nbytes}"
                )
            previous_end = offset + span

    def move(self, offset: int, blocks: tuple[tuple[int, ...], ...]) -> ChunkMove:
        """The slot's payload, registered with CUDA if that does not take long, and its blocks."""
        address = self._arena.address + offset + HEADER_BYTES
        if self._pinned is None:
            return ChunkMove(address, blocks)
        reachable = self._all_reachable or self._is_reachable(self._pinned, address)
        cuts = self._pinned.cuts(address, self._payload_bytes)
        region = self._pinned.region(address)
        return ChunkMove(address, blocks, cuts, reachable, region)

    def _is_reachable(self, pinned: PinnedRegion, address: int) -> bool:
        """Whether kernels find the payload at its address, once it is registered."""
        if not pinned.wait_for(address, self._payload_bytes, self._patience):
            self._patience = 0.0  # nor will the others be any sooner
            return False
        if pinned.pinned:  # all of it: the next one need not ask
            start = self._arena.address
            self._all_reachable = pinned.device_address(start, self._arena.nbytes) == start
        return pinned.device_address(address, self._payload_bytes) == address

    def erase_header(self, offset: int) -> None:
        """Before a slot is written: whoever finds it half-written must not take it for a chunk."""
        self._arena.view(offset, HEADER_BYTES)[:] = bytes(HEADER_BYTES)

    def write_header(self, offset: int, digest: bytes, fingerprints: Fingerprints) -> None:
        """Say that the slot holds this chunk now.

        Args:
            fingerprints: of all of its groups.

        Raises:
            LocalProtocolError: one is not known, or there are too many.
        """
        header = pack_header(self._shard, digest, self._payload_bytes, fingerprints)
        self._arena.view(offset, HEADER_BYTES)[:] = header

    def fingerprints_of(self, offset: int, digest: bytes) -> tuple[int, ...] | None:
        """Of the groups of the chunk that the slot is said to hold; None, and a reason in the log, if it does not."""
        try:
            view = self._arena.view(offset, HEADER_BYTES)
            return read_header(view, self._shard, digest, self._payload_bytes)
        except (RemoteProtocolError, LayoutError) as error:
            logger.warning("chunk %s at offset %d is damaged: %s", digest.hex()[:16], offset, error)
            return None
