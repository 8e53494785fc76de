"""A cache that a worker has registered: opened, used and closed by threads of its own.

So whatever a worker, its memory or its GPU does, only its own transfers wait.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from .request_checks import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmcache_kernels.transfer.moving.moves import Completion

    from .cache_copies import CacheCopies

    Over: TypeAlias = Callable[[Future[Any], float], None]
    """Called with a task's future, which is done, and the time."""

logger = logging.getLogger(__name__)

MAX_UNDER_WAY = 1024
"""Transfers of one worker that run or wait, and requests that wait for their end."""

MAX_BARRED = 1 << 12
"""Transfers that were stopped before they came. They follow within a second, or never."""

MAX_SECONDS = 120.0
"""A transfer waits no longer to begin, whatever its deadline: reservations do not last for ever."""

LOOK_AGAIN = 0.02
"""Seconds between looks at whether a transfer that waits for its event may still begin."""

Direction: TypeAlias = Literal["store", "load"]


class Permit:
    """Whether a transfer may begin to copy.

    Args:
        deadline: monotonic seconds from which on it may not.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def wait_for(self, point: Completion | None) -> None:
        """Return when ``point`` is reached and the transfer may begin.

        Raises:
            RefusedError: it was stopped, or its deadline has passed.
        """
        while True:
            reached = point is None or point.wait(LOOK_AGAIN)
            if self._stopped.is_set():
                raise stopped()
            if time.monotonic() >= self.deadline:
                raise RefusedError("expired", "the deadline passed before the copy could begin")
            if reached:
                return


class _Running(NamedTuple):
    permit: Permit
    task: Future[Any]


class ServedCache:
    """What a service knows of a registered cache.

    One thread opens, loads and closes, another stores. All methods are for the service's thread, and
    what they are given is called there, by way of ``post``.

    Args:
        instance: of the worker.
        owner: under which the chunk store knows what is done for this cache.
        post: has something called, with the time, in the service's thread; itself for any thread.

    Attributes:
        copies: the open cache; None until it is open.
        copying: tickets of stores that are being copied.
    """

    def __init__(
        self, instance: int, owner: int, post: Callable[[Callable[[float], None]], None]
    ) -> None:
        self.instance = instance
        self.owner = owner
        self.copies: CacheCopies | None = None
        self.copying: set[int] = set()
        self.retired = False
        self._post = post
        self._threads: dict[Direction, ThreadPoolExecutor] = {
            "store": ThreadPoolExecutor(1, "lmcache-kernels-store"),
            "load": ThreadPoolExecutor(1, "lmcache-kernels-load"),
        }
        self._running: dict[int, _Running] = {}
        self._barred: dict[int, None] = {}
        self._settling: list[tuple[set[int], Callable[[float], None]]] = []
        self._busy = 0  # tasks that run or wait
        self._closing = False
        self._when_closed: list[Callable[[float], None]] = []

    def open(self, make: Callable[[], CacheCopies], over: Over) -> None:
        """Open the cache, and then call ``over``."""

        def opened(task: Future[Any], now: float) -> None:
            if task.exception() is None:
                self.copies = task.result()
            over(task, now)

        self._start("load", make, opened)

    def run(
        self,
        direction: Direction,
        transfer: int,
        deadline: float,
        work: Callable[[Permit], Any],
        over: Over,
    ) -> None:
        """Call ``work`` when the transfers before it are over, and ``over`` after that.

        Call :meth:`check_may_run` first.
        """
        permit = Permit(min(deadline, time.monotonic() + MAX_SECONDS))

        def ended(task: Future[Any], now: float) -> None:
            del self._running[transfer]
            over(task, now)
            self._end_settling(transfer, now)

        task = self._start(direction, lambda: work(permit), ended)
        self._running[transfer] = _Running(permit, task)

    def check_may_run(self, transfer: int) -> None:
        """Raise RefusedError if a transfer of that id cannot be run."""
        if transfer in self._barred:
            del self._barred[transfer]
            raise stopped()
        if transfer in self._running:
            raise RefusedError("bad_request", f"transfer {transfer}: this id is in use")
        self.check_not_busy()

    def check_not_busy(self) -> None:
        """Raise RefusedError if too much is under way."""
        if self._busy + len(self._settling) >= MAX_UNDER_WAY:
            raise RefusedError(
                "busy", f"{MAX_UNDER_WAY} transfers of this worker are under way: wait for some"
            )

    def settle(self, transfers: Sequence[int], over: Callable[[float], None]) -> None:
        """Stop these transfers, and call ``over`` when none of them runs; see :class:`.Settle`.

        Call :meth:`check_not_busy` first.
        """
        left = set()
        for transfer in transfers:
            running = self._running.get(transfer)
            if running is None:
                self._barred[transfer] = None
            else:
                left.add(transfer)
                running.permit.stop()
                running.task.cancel()
        while len(self._barred) > MAX_BARRED:
            del self._barred[next(iter(self._barred))]
        if left:
            self._settling.append((left, over))
        else:
            self._post(over)

    def retire(self) -> None:
        """Stop what has not begun, wait for what has, then close the cache. Idempotent."""
        if self.retired:
            return
        self.retired = True
        for running in list(self._running.values()):
            running.permit.stop()
            running.task.cancel()
        self._close_if_idle()

    def when_closed(self, action: Callable[[float], None]) -> None:
        """After :meth:`retire`, while it is not closed: have ``action`` called when it is."""
        self._when_closed.append(action)

    def _start(self, direction: Direction, work: Callable[[], Any], over: Over) -> Future[Any]:
        self._busy += 1

        def ended(task: Future[Any], now: float) -> None:
            self._busy -= 1
            try:
                over(task, now)
            finally:
                self._close_if_idle()

        task = self._threads[direction].submit(work)
        task.add_done_callback(lambda task: self._post(lambda now: ended(task, now)))
        return task

    def _close_if_idle(self) -> None:
        if self.retired and not self._busy and not self._closing:
            self._closing = True
            task = self._threads["load"].submit(self._close)
            task.add_done_callback(lambda _: self._post(self._closed))

    def _close(self) -> None:
        if self.copies is not None:
            try:
                self.copies.close()
            except Exception:
                logger.exception("a worker's cache could not be closed")

    def _closed(self, now: float) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False)
        actions, self._when_closed = self._when_closed, []  # which may know this cache
        for action in actions:
            action(now)

    def _end_settling(self, transfer: int, now: float) -> None:
        for left, over in self._settling:
            left.discard(transfer)
            if not left:
                over(now)
        self._settling = [one for one in self._settling if one[0]]


def stopped() -> RefusedError:
    """How a transfer ends that was stopped."""
    return RefusedError("stopped", "the transfer was stopped before it moved anything")
