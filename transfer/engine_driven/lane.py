"""One direction's transfers, carried out one after the other.

A transfer is a generator that yields once, when the device has its moves: what comes before runs in
one thread, what comes after in another. So the device gets the next transfer while the last one is on
the link and its end is told to the server, and results come in the order of submission.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from lmcache_kernels.errors import Closed
from lmcache_kernels.transfer.observer import TransferEvent

if TYPE_CHECKING:
    from collections.abc import Generator

    from lmcache_kernels.transfer.observer import Direction, Observer, Outcome
    from lmcache_kernels.transfer.store_transfer import Transfer

logger = logging.getLogger(__name__)

_SUCCESS: dict[Direction, Outcome] = {"store": "stored", "load": "loaded"}


@dataclass(frozen=True, slots=True)
class Moves:
    """What a transfer has done: chunks moved, their bytes, whether a damaged one ended it, on which way."""

    chunks: int = 0
    nbytes: int = 0
    damaged: bool = False
    note: str = ""


Work: TypeAlias = "Generator[None, None, Moves]"


@dataclass(slots=True, eq=False)
class _Job:
    transfer: Transfer
    work: Work
    asked: int
    submitted: float = field(default_factory=time.monotonic)
    begun: float | None = None


class Lane:
    """See the module. Any thread may submit.

    Args:
        direction: of its transfers; also names the threads.
        threads: False: a transfer is carried out by the thread that submits it, at once unless the
            transfer says otherwise.
        observer: told of every transfer that ends.
    """

    def __init__(self, direction: Direction, *, threads: bool, observer: Observer) -> None:
        self._direction = direction
        self._observer = observer
        self._closed = False
        self._open: set[_Job] = set()
        self._changed = threading.Condition()  # never held across a wait: submits take it
        self._to_begin: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._to_end: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"lmcache-kernels-{direction}-{name}", daemon=True)
            for name, target in (("begin", self._begin_all), ("end", self._end_all))
            if threads
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer, work: Work, asked: int) -> None:
        """Carry out ``work``, of so many chunks, and finish the transfer's result."""
        job = _Job(transfer, work, asked)
        with self._changed:
            refused = self._closed
            if not refused:
                self._open.add(job)
                if self._threads:
                    self._to_begin.put(job)
        if refused:
            self._over(job, Closed("the transfer context is closed"))
        elif not self._threads:
            transfer.carry_out(lambda: self._carry_out(job))

    def transfers(self) -> list[Transfer]:
        """Those that are not over."""
        with self._changed:
            return [job.transfer for job in self._open]

    def close(self) -> None:
        """Accept nothing more and stop what has not begun; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            jobs = list(self._open)
        for job in jobs:
            job.transfer.stop()
        # Here, because the thread that begins transfers may be waiting for a server.
        while (waiting := self._next_waiting()) is not None:
            self._over(waiting, Closed("the transfer context was closed before this began"))
        self._to_begin.put(None)

    def wait_idle(self, timeout: float) -> bool:
        """After :meth:`close`: whether everything is over, also the threads."""
        end = time.monotonic() + timeout
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open, timeout):
                return False
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return True

    def _carry_out(self, job: _Job) -> None:
        if self._advance(job):
            self._advance(job)

    # --- the threads ------------------------------------------------------------------------------

    def _begin_all(self) -> None:
        while (job := self._to_begin.get()) is not None:
            if self._advance(job):
                self._to_end.put(job)
            del job  # or what it holds stays until the next one comes
        self._to_end.put(None)

    def _end_all(self) -> None:
        while (job := self._to_end.get()) is not None:
            self._advance(job)
            del job

    def _advance(self, job: _Job) -> bool:
        """Go on with the transfer; whether there is more to do."""
        if job.begun is None:
            job.begun = time.monotonic()
        try:
            next(job.work)
            return True
        except StopIteration as over:
            self._over(job, over.value)
        except BaseException as error:
            logger.debug("%s failed: %s", self._direction, error, exc_info=True)
            self._over(job, error)
            if not (self._threads or isinstance(error, Exception)):
                raise  # the caller's: it asked for its own end
        return False

    def _next_waiting(self) -> _Job | None:
        try:
            return self._to_begin.get_nowait()
        except queue.Empty:
            return None

    def _over(self, job: _Job, end: Moves | BaseException) -> None:
        self._observer.transfer_over(self._event(job, end))
        if isinstance(end, Moves):
            job.transfer.result.set_result(end.chunks)
        else:
            job.transfer.result.set_exception(end)
        with self._changed:
            self._open.discard(job)
            self._changed.notify_all()

    def _event(self, job: _Job, end: Moves | BaseException) -> TransferEvent:
        now = time.monotonic()
        begun = now if job.begun is None else job.begun
        outcome: Outcome
        if isinstance(end, Moves):
            outcome = "damaged" if end.damaged else _SUCCESS[self._direction]
            chunks, nbytes, note = end.chunks, end.nbytes, end.note
        else:
            outcome = "stopped" if isinstance(end, Closed) else "failed"
            chunks, nbytes, note = 0, 0, f"{type(end).__name__}: {end}"
        return TransferEvent(
            self._direction,
            outcome,
            job.asked,
            chunks,
            nbytes,
            begun - job.submitted,
            now - begun,
            note,
        )
