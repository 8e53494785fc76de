"""The slots of a server whose arena this process cannot map: chunks travel in messages, one at a time.

That is the case in a container with a /dev/shm of its own. Both directions have one slot in memory of
this process, through which the mover copies as it does through the arena.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, cast

from lmcache_kernels.errors import RemoteProtocolError
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import MAX_PART, Done, GetPart, Part, PutPart

from .attachment import Attached

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .attachment import Ask


class InlineSlots(Attached):
    """See the module.

    Args:
        instance: id of the worker. The others are those of :class:`~.engine_driven.attachment.Attached`.
    """

    mapped = False

    def __init__(
        self, *, instance: int, incarnation: str, shard: bytes, payload_bytes: int, pin: bool
    ) -> None:
        self._instance = instance
        self._slot_bytes = HEADER_BYTES + payload_bytes
        # A multiple of every alignment that slots have.
        self._distance = -(-self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        super().__init__(
            LocalMemory(2 * self._distance),
            incarnation=incarnation,
            shard=shard,
            payload_bytes=payload_bytes,
            pin=pin,
        )

    def check_slots(self, offsets: Sequence[int]) -> None:
        """Where they lie is the server's business."""

    def rounds(self, offsets: Sequence[int], *, storing: bool) -> Sequence[Sequence[int]]:
        return [[0 if storing else self._distance]] * len(offsets)

    def send(self, ask: Ask, ticket: int, index: int, place: int) -> None:
        for start, nbytes in self._parts():
            data = bytes(self._arena.view(place + start, nbytes))
            message = PutPart(
                instance=self._instance, ticket=ticket, index=index, start=start, data=data
            )
            ask(message, Done)

    def fetch(self, ask: Ask, ticket: int, index: int, place: int) -> None:
        for start, nbytes in self._parts():
            message = GetPart(
                instance=self._instance, ticket=ticket, index=index, start=start, nbytes=nbytes
            )
            data = cast("Part", ask(message, Part)).data
            if len(data) != nbytes:
                raise RemoteProtocolError(f"part: expected {nbytes} bytes, got {len(data)}")
            self._arena.view(place + start, nbytes)[:] = data

    def _parts(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._slot_bytes, MAX_PART):
            yield start, min(MAX_PART, self._slot_bytes - start)


class LocalMemory:
    """Memory of this process that looks like an arena."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._memory)[offset : offset + nbytes]

    def close(self) -> None:
        """The memory goes with its last view."""
