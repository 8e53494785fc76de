"""What all ways between a GPU's cache and host memory have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from . import tally
from .device import EventCompletion
from .moves import Moved
from .tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.chunk_copy import ChunkCopy, Queue

    from .device import Device
    from .moves import ChunkMove, Completion


class Path(ABC):
    """Moves chunks in one direction, by kernels in one stream and copies in another.

    What it needs is made when it is first used. Not for two threads at once.

    Args:
        prepare: makes the copy whose kernels are launched.
        where: the cache's device.
    """

    def __init__(self, device: Device, prepare: Callable[[], ChunkCopy], where: str) -> None:
        self._device = device
        self._prepare = prepare
        self._where = where
        self._is_open = False

    def run(self, moves: Sequence[ChunkMove], after: Completion | None) -> Moved:
        """Queue the moves; what touches the cache waits for ``after``."""
        device = self._device
        with device.current():
            self.open()
            totals = self._tally.totals(len(moves))
            try:
                if isinstance(after, EventCompletion):
                    self._wait_for(after.event)
                for start in range(0, len(moves), tally.BATCH):
                    batch = moves[start : start + tally.BATCH]
                    handle = device.handle(self._kernels)
                    with self._copy.queued([move.blocks for move in batch], handle) as launch:
                        for index, move in enumerate(batch):
                            last = start + index == len(moves) - 1
                            self._queue_chunk(launch, index, move, start + index == 0, last)
                    self._tally.fold(len(batch), totals[start : start + len(batch)])
                cache_free, done = self._ends()
            except BaseException:
                # What was queued before still uses the blocks and the host memory.
                self._tally.clear()
                device.synchronize(self._kernels)
                device.synchronize(self._link)
                raise
            return Moved(
                EventCompletion(cache_free),
                EventCompletion(done),
                self._tally.when(done, totals, len(moves)),
            )

    def open(self) -> None:
        """Make everything ready, if it is not: compiles kernels."""
        if self._is_open:
            return
        device = self._device
        self._copy = self._prepare()
        self._kernels, self._link = device.stream(), device.stream()
        self._tally = Tally(device, self._kernels, self._copy.plan.rows, self._where)
        self._make_ready()
        # Memory made in the one stream is also used in the other.
        device.wait(self._link, self._point(self._kernels))
        self._is_open = True

    def release(self) -> None:
        """Wait for what was queued and let go of everything."""
        if not self._is_open:
            return
        for stream in (self._kernels, self._link):
            self._device.synchronize(stream)
            self._device.give_back(stream)
        self._let_go()
        del self._tally, self._copy
        self._is_open = False

    def _point(self, stream: Any) -> Any:
        """An event at the end of what the stream has."""
        event = self._device.event()
        self._device.record(event, stream)
        return event

    def _wait_for(self, event: Any) -> None:
        """Let what touches the cache wait."""
        self._device.wait(self._kernels, event)

    @abstractmethod
    def _make_ready(self) -> None:
        """Make what the path needs beside streams and the copy."""

    def _let_go(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give that back."""

    @abstractmethod
    def _queue_chunk(
        self, launch: Queue, index: int, move: ChunkMove, first: bool, last: bool
    ) -> None:
        """Queue one chunk.

        Args:
            launch: see :meth:`ChunkCopy.queued`; ``index`` is the chunk's in its batch.
            first, last: of a run.
        """

    @abstractmethod
    def _ends(self) -> tuple[Any, Any]:
        """Events: behind the last that touches the cache, and behind everything."""
