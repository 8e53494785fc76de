"""The arena that this process owns, for the copies that it makes itself."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.memory.arena_slots import ArenaSlots
from lmcache_kernels.transfer.memory.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.memory.pinning import PinnedRegion


class ServedArena:
    """Registered with CUDA once, by the first who asks, for all. Safe for threads.

    Args:
        arena: closed by whoever made it, after :meth:`close`.
    """

    def __init__(self, arena: Arena) -> None:
        self.name = arena.name
        self.nbytes = arena.nbytes
        self._arena = arena
        self._usage = Usage()
        self._lock = threading.Lock()
        self._pinned: PinnedRegion | None = None

    def slots(self, shard: bytes, payload_bytes: int, *, pin: bool) -> ArenaSlots:
        """The slots of a shard; ``pin``: their memory is to be registered with CUDA."""
        pinned = self._pin() if pin else None
        return ArenaSlots(self._arena, pinned, shard=shard, payload_bytes=payload_bytes)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, the memory stays where it is, whatever happens to the arena.

        Raises:
            Closed: the arena was closed before.
        """
        self._usage.hold()
        try:
            with self._arena.view(0, self._arena.nbytes):
                yield
        finally:
            self._usage.release()

    def close(self) -> None:
        """Undo the registration, now or when the last copy is over."""
        with self._lock:
            pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._usage.when_unused(pinned.close)

    def _pin(self) -> PinnedRegion:
        from lmcache_kernels.transfer.memory.pinning import PinnedRegion

        with self._lock:
            if self._pinned is None:
                self._pinned = PinnedRegion(
                    self._arena.address, self._arena.nbytes, when_unused=self._usage.when_unused
                )
            return self._pinned
