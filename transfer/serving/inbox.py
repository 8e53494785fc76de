"""What other threads have left to do in the service's thread, and replies that wait for it."""

from __future__ import annotations

import logging
import queue
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from lmcache_kernels.transfer.messages import Done, ErrorReply

from .later import Later

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.transfer.messages import Reply

    Action: TypeAlias = Callable[[float], None]
    """To be called in the service's thread, with the time."""

    Over: TypeAlias = Callable[[Any, float], None]
    """To be called there with a task that is over, and the time."""

logger = logging.getLogger(__name__)


class Inbox:
    """:meth:`post` is for any thread, everything else for the service's.

    Args:
        wake: called from any thread when :meth:`finished` has something to do.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._posted: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._replies: list[tuple[Later, Reply]] = []

    def post(self, action: Action) -> None:
        """Have it called in the service's thread."""
        self._posted.put(action)
        self._wake()

    def reply(self, later: Later, reply: Reply) -> None:
        """The reply for it is due."""
        self._replies.append((later, reply))

    def finished(self, now: float) -> list[tuple[Later, Reply]]:
        """Do what was posted; the replies that are due. Never raises."""
        with suppress(queue.Empty):
            while True:
                self.do(self._posted.get_nowait(), now)
        replies, self._replies = self._replies, []
        return replies

    def work_until(self, over: Callable[[], bool], timeout: float) -> bool:
        """Do what is posted until ``over()``; False when the seconds have passed before."""
        end = time.monotonic() + timeout
        with suppress(queue.Empty):
            while not over():
                left = max(0.0, end - time.monotonic())
                self.do(self._posted.get(timeout=left), time.monotonic())
        return over()

    def answered(self, produce: Callable[[Any, float], Reply]) -> tuple[Later, Over]:
        """A reply that comes later, and what to call when ``produce`` can make it."""
        later = Later()

        def over(task: Any, now: float) -> None:
            try:
                reply = produce(task, now)
            except Exception as error:
                logger.exception("the end of a transfer could not be served")
                reply = ErrorReply(code="internal", message=type(error).__name__)
            self.reply(later, reply)

        return later, over

    def when_all(self, events: Sequence[Callable[[Action], None]]) -> Later | None:
        """Done, when each of the events has called the action it was given; None: there is none."""
        if not events:
            return None
        later, over = self.answered(lambda _, now: Done())
        left = len(events)

        def one_over(now: float) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                over(None, now)

        for event in events:
            event(one_over)
        return later

    def do(self, action: Action, now: float) -> None:
        """Call it; what it raises goes to the log."""
        try:
            action(now)
        except Exception:  # one that fails must not take the others with it
            logger.exception("what another thread had left to do failed")
