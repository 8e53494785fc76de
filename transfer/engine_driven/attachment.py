"""A server's arena as one worker sees it: mapped, pinned, counted, and gone when nobody uses it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.arena_slots import PIN_PATIENCE, ArenaSlots
from lmcache_kernels.transfer.memory.pinning import PinnedRegion
from lmcache_kernels.transfer.memory.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from lmcache_kernels.transfer.memory.arena_slots import Memory
    from lmcache_kernels.transfer.messages import Registered, Reply, Request

    Ask: TypeAlias = Callable[[Request, type[Reply]], Reply]
    """Send a request to the server, wait for the reply, which must be of that type."""


class Attached(ArenaSlots):
    """How one worker reaches the slots of one server incarnation.

    Users bracket their work with :meth:`hold` and :meth:`release`; after :meth:`retire` the memory
    goes as soon as the last of them has released. So a server restart never takes memory away from
    under a copy.

    Args:
        memory: through which chunks are copied; taken over.
        incarnation: of that server.
        shard: id of the slice this worker moves; goes into and is checked in every slot header.
        payload_bytes: of one chunk.
        pin: register the memory with CUDA, in the background.

    Attributes:
        mapped: the memory is the server's arena.
    """

    mapped = True

    def __init__(
        self, memory: Memory, *, incarnation: str, shard: bytes, payload_bytes: int, pin: bool
    ) -> None:
        self.incarnation = incarnation
        self._usage = Usage()
        self._retired = threading.Lock()  # taken for good by whoever retires it
        pinned = None
        if pin:
            when_unused = self._usage.when_unused
            pinned = PinnedRegion(memory.address, memory.nbytes, when_unused=when_unused)
        super().__init__(
            memory, pinned, shard=shard, payload_bytes=payload_bytes, patience=PIN_PATIENCE
        )

    def hold(self) -> None:
        self._usage.hold()

    def release(self) -> None:
        self._usage.release()

    def retire(self) -> None:
        """No further users will come."""
        if self._retired.acquire(blocking=False):
            self._usage.when_unused(self._close)

    def _close(self) -> None:
        if self._pinned is None:
            self._arena.close()
        else:
            self._pinned.close(self._arena.close)

    def rounds(self, offsets: Sequence[int], *, storing: bool) -> Sequence[Sequence[int]]:
        """Where in the memory the chunks of a ticket are copied to or from, so many at a time."""
        return [offsets]

    def send(self, ask: Ask, ticket: int, index: int, place: int) -> None:
        """Bring a slot that is written to the server, if it is not there already."""

    def fetch(self, ask: Ask, ticket: int, index: int, place: int) -> None:
        """Bring a slot that is to be read here, if it is not there already."""


class Attachment(Attached):
    """The arena itself, mapped.

    Args:
        registered: the server's answer to the registration.

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
        super().__init__(
            Arena.attach(registered.arena_name, registered.arena_bytes),
            incarnation=incarnation,
            shard=shard,
            payload_bytes=payload_bytes,
            pin=pin,
        )
