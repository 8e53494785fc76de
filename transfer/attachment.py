"""A server's arena as one worker sees it: mapped, pinned, counted, and gone when nobody uses it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from lmcache_kernels.errors import LayoutError, RemoteProtocolError

from .arena import Arena
from .moves import ChunkMove
from .pinning import PinnedRegion
from .slot_header import HEADER_BYTES, pack_header, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .messages import Registered

logger = logging.getLogger(__name__)

PIN_PATIENCE = 1.0
"""Seconds that a copy waits for CUDA to register the memory it goes through. A piece takes some 50 ms
and what is waited for comes next; without, the copy is several times as slow."""


class Attachment:
    """An attached arena of one server incarnation.

    Users bracket their work with :meth:`hold` and :meth:`release`; after :meth:`retire` the mapping
    goes as soon as the last of them has released. So a server restart never takes memory away from
    under a copy.

    Args:
        registered: the server's answer to the registration.
        incarnation: of that server.
        shard: id of the slice this worker moves; goes into and is checked in every slot header.
        payload_bytes: of one chunk.
        pin: register the memory with CUDA, in the background.

    Raises:
        PeerGone, RemoteProtocolError or CapacityError: an arena that is not there, is not what the
            server said, or cannot be mapped.
    """

    def __init__(
        self,
        registered: Registered,
        *,
        incarnation: str,
        shard: bytes,
        payload_bytes: int,
        pin: bool,
    ) -> None:
        self.incarnation = incarnation
        self._shard = shard
        self._payload_bytes = payload_bytes
        self._arena = Arena.attach(registered.arena_name, registered.arena_bytes)
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._when_unused: list[Callable[[], None]] = []
        self._patience = PIN_PATIENCE
        self._pinned = None
        if pin:
            self._pinned = PinnedRegion(
                self._arena.address, self._arena.nbytes, when_unused=self._call_when_unused
            )

    def hold(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            self._call_if_unused()

    def retire(self) -> None:
        """No further users will come."""
        with self._lock:
            if not self._retired:
                self._retired = True
                self._when_unused.append(self._close)
                self._call_if_unused()

    def _call_when_unused(self, action: Callable[[], None]) -> None:
        """Now, or when the last user has released; nobody can hold this before it returned."""
        with self._lock:
            self._when_unused.append(action)
            self._call_if_unused()

    def _call_if_unused(self) -> None:
        while self._users == 0 and self._when_unused:
            self._when_unused.pop(0)()

    def _close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
        self._arena.close()

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
        if not self._pinned.wait_for(address, self._payload_bytes, self._patience):
            self._patience = 0.0  # nor will the others be any sooner
        return ChunkMove(address, blocks, self._pinned.cuts(address, self._payload_bytes))

    def erase_header(self, offset: int) -> None:
        """Before a slot is written: whoever finds it half-written must not take it for a chunk."""
        self._arena.view(offset, HEADER_BYTES)[:] = bytes(HEADER_BYTES)

    def write_header(self, offset: int, digest: bytes, fingerprint: int) -> None:
        header = pack_header(self._shard, digest, self._payload_bytes, fingerprint)
        self._arena.view(offset, HEADER_BYTES)[:] = header

    def fingerprint_of(self, offset: int, digest: bytes) -> int | None:
        """Of the chunk that the slot is said to hold; None, and a reason in the log, if it does not."""
        try:
            return read_header(
                self._arena.view(offset, HEADER_BYTES), self._shard, digest, self._payload_bytes
            )
        except (RemoteProtocolError, LayoutError) as error:
            logger.warning("chunk %s at offset %d is damaged: %s", digest.hex()[:16], offset, error)
            return None
