"""What all ways between a GPU's cache and host memory have in common."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import TransferFailed
from lmcache_kernels.transfer.pacing import paced

from .device import EventCompletion
from .moves import All, Moved, Over, StillMovingError
from .tally import HEAD, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from lmcache_kernels.chunk_copy import ChunkCopy, ChunkPart, Queue

    from .device import Device
    from .moves import ChunkMove, Completion, Steps

    Launches: TypeAlias = Callable[[], Queue]
    """Gives what launches parts of the moves, see :meth:`ChunkCopy.queued`."""

MARK_EVERY, MARKS = 200, 2
"""At most so many operations times so many (and one more) are queued in a stream: CUDA takes about a
thousand before calls wait."""

OPERATIONS_OF_A_RUN = 8
"""That a run queues in a stream whatever it moves: waits, ids, fingerprints, its ends."""

logger = logging.getLogger(__name__)

_lost: list[dict[str, Any]] = []  # what a device that stopped may still use

PATIENCE = 60.0
"""Seconds without progress after which the device counts as dead."""


class Path(ABC):
    """Moves chunks in one direction, by kernels in one stream and copies in another.

    What it needs is made when it is first used. Not for two threads at once.

    Args:
        prepare: makes the copy whose kernels are launched.
        where: the cache's device.
        storing: the direction.
    """

    def __init__(
        self, device: Device, prepare: Callable[[], ChunkCopy], where: str, *, storing: bool
    ) -> None:
        self._device = device
        self._storing = storing
        self._opening = threading.Lock()
        self._prepare = prepare
        self._where = where
        self._is_open = False
        self._queued = 0
        self._marks: deque[Any] = deque()
        self._head: tuple[Any, int] | None = None  # behind what a run has moved aside; its group
        self._wanted: list[tuple[bool, ...]] = []  # of a run, per chunk and group

    def run(self, moves: Sequence[ChunkMove], after: Completion | None, note: str) -> Moved:
        """Queue the moves; what touches the cache waits for ``after``. ``note``: see ``Moved``."""
        return self._run(moves, after, note, self._queue_chunks)

    def _run(
        self,
        moves: Sequence[ChunkMove],
        after: Completion | None,
        note: str,
        queue: Callable[[Launches, Sequence[ChunkMove]], Steps],
    ) -> Moved:
        device = self._device
        with device.current():
            self.open()
            self._tally.begin(len(moves))
            self._head = None
            every = (True,) * self._copy.plan.groups
            self._wanted = [every if self._storing else move.wanted() for move in moves]
            try:
                self._pace(OPERATIONS_OF_A_RUN)
                self._come_after(after)
                with self._launches(moves) as launches:
                    steps = queue(launches, moves)
                cache_free, done = self._ends()
                device.make_events(self._kernels)
            except BaseException as error:
                self._abandon(error)
                raise
            return Moved(
                EventCompletion(cache_free),
                EventCompletion(done),
                self._tally.when(done, self._wanted, self._head and self._head[1]),
                note,
                steps,
            )

    @contextmanager
    def _launches(self, moves: Sequence[ChunkMove]) -> Iterator[Launches]:
        """Make the ids of the moves ready: before anything else is queued, for it may trust them."""
        with self._ids_of(moves) as launch:
            yield lambda: launch

    def _ids_of(self, moves: Sequence[ChunkMove]) -> AbstractContextManager[Queue]:
        ids = paced(move.blocks for move in moves)
        return self._copy.queued(ids, self._device.handle(self._kernels))

    def open(self) -> None:
        """Make everything ready, if it is not: compiles kernels.

        Raises:
            torch.OutOfMemoryError: no device memory for slices; nothing is kept.
        """
        with self._opening:
            if self._is_open:
                return
            device = self._device
            self._queued = 0
            self._marks.clear()  # of streams that a device that stopped may still hold
            self._copy = self._prepare()
            self._streams: list[tuple[Any, str]] = []
            try:
                self._kernels, self._link = self._stream("kernels"), self._stream("link")
                plan = self._copy.plan
                self._tally = Tally(device, self._kernels, plan.rows, plan.groups, self._where)
                self._make_ready()
                # Memory made in the one stream is also used in the others.
                for stream, _ in self._streams[1:]:
                    device.wait(stream, self._point(self._kernels))
            except BaseException:
                self._give_back_streams()
                raise
            self._is_open = True

    def release(self) -> None:
        """Wait for what was queued and let go of everything."""
        if not self._is_open:
            return
        self._give_back_streams()
        self._let_go()
        del self._tally, self._copy
        self._is_open = False

    def _give_back_streams(self) -> None:
        for stream, use in self._streams:
            self._device.synchronize(stream)
            self._device.give_back(stream, use)

    def _stream(self, part: str) -> Any:
        """A stream of this path's, for one part of its work."""
        use = f"{'store' if self._storing else 'load'}: {part}"
        stream = self._device.stream(use)
        self._streams.append((stream, use))
        return stream

    def _abandon(self, error: BaseException) -> None:
        """After a run that failed half-way: wait for what was queued, for it still uses the blocks and the
        host memory, and forget the fingerprints that it left half-made.

        Raises:
            StillMovingError: of a store, the device does not finish. A load is waited for without an end:
                whoever was told that it is over would give its blocks to others.
        """
        try:
            for stream, _ in self._streams[1:]:
                self._device.wait(self._kernels, self._point(stream))
            self._tally.clear()
            cleared = True
        except Exception:
            logger.exception("fingerprints could not be cleared; everything is made anew")
            cleared = False
        marks = [self._point(stream) for stream, _ in self._streams]
        while not all(self._device.finish(mark, PATIENCE) for mark in marks):
            logger.error("the device has not finished a failed transfer in %g s", PATIENCE)
            if self._storing:
                # Streams and memory stay as they are: the device may still use them.
                _lost.append(vars(self).copy())
                self._is_open = False
                done = All([EventCompletion(mark) for mark in marks])
                raise StillMovingError(f"{error}; the device still works on it", done) from error
        if cleared:
            self._tally.unused()
        else:
            self.release()

    def _pace(self, operations: int = 1) -> None:
        """Note so many operations for a stream; waits while as many are queued as it should have.

        CUDA itself makes a call wait when a stream is full, and these calls keep Python's lock.

        Raises:
            TransferFailed: the device has stopped.
        """
        self._queued += operations
        if self._queued < MARK_EVERY:
            return
        self._queued = 0
        self._marks.append((self._point(self._kernels), self._point(self._link)))
        if len(self._marks) > MARKS:
            for mark in self._marks.popleft():
                if not self._device.finish(mark, PATIENCE):
                    raise TransferFailed(f"the device has not moved anything in {PATIENCE:g} s")

    def _point(self, stream: Any) -> Any:
        """An event at the end of what the stream has."""
        event = self._device.event()
        self._device.record(event, stream)
        return event

    def _come_after(self, point: Completion | None) -> None:
        """What is queued from now on touches the cache after this point only."""
        if isinstance(point, EventCompletion):
            self._wait_for(point.event)
        elif not (point is None or isinstance(point, Over)):
            raise TransferFailed(f"after: expected an event of the device, got {point!r}")

    def _launch(
        self,
        launches: Launches,
        chunk: int,
        part: ChunkPart,
        address: int,
        aside: tuple[Any, int] | None = None,
    ) -> None:
        """Queue the kernel of a part.

        Args:
            aside: another stream, which has an entry of the tally of its own, and the most programs
                there.
        """
        stream, entry, bound = self._kernels, self._tally.entry(chunk, part.group), None
        last = part.last
        if aside is not None:
            stream, entry, last = aside[0], HEAD, True
            bound = self._device.handle(stream), aside[1]
        total_at = self._tally.total_at(entry) if last else 0
        sums = self._tally.sums[entry]
        self._device.run(stream, launches(), chunk, part, address, sums, total_at, bound)

    def _wait_for(self, event: Any) -> None:
        """Let what touches the cache wait."""
        self._device.wait(self._kernels, event)

    @abstractmethod
    def _make_ready(self) -> None:
        """Make what the path needs beside streams and the copy."""

    def _let_go(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give that back."""

    @abstractmethod
    def _queue_chunks(self, launches: Launches, moves: Sequence[ChunkMove]) -> Steps:
        """Queue all chunks of a run.

        Args:
            launches: whose chunks are named by their place in ``moves``.
        """

    @abstractmethod
    def _ends(self) -> tuple[Any, Any]:
        """Events: behind the last that touches the cache, and behind everything."""
