"""Signals and the end of standard input, each acted upon in the server's thread, between requests."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING

from lmcache_kernels.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import FrameType

    from lmcache_kernels.adapters.messaging.server import CacheServerLoop

logger = logging.getLogger(__name__)

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Handles :data:`HANDLED` while the context lasts; for the main thread.

    Args:
        loop: in whose thread actions run. Signals that come before it does wait for it.

    Attributes:
        actions: what is done, by the number of the signal; complete when the loop begins to run.
    """

    def __init__(self, loop: CacheServerLoop) -> None:
        self.actions: dict[int, Callable[[], None]] = {}
        self._loop = loop
        self._before = {number: signal.getsignal(number) for number in HANDLED}

    def __enter__(self) -> Signals:
        for number in HANDLED:
            signal.signal(number, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Anywhere in the main thread's code, so nothing here may wait or take a lock that it holds."""
        act(self._loop, lambda: self.actions[number]())


def at_end_of_input(loop: CacheServerLoop, action: Callable[[], None]) -> None:
    """Have the action done when standard input ends."""

    def wait() -> None:
        with contextlib.suppress(OSError):  # not open at all: the same as ended
            while os.read(0, 4096):
                pass
        act(loop, action)

    threading.Thread(target=wait, name="lmcache-kernels-stdin", daemon=True).start()


def act(loop: CacheServerLoop, action: Callable[[], None]) -> None:
    """Have the action done in the loop's thread; the log says so if it fails."""
    loop.call(action).add_done_callback(_log_failure)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, Closed):  # it has ended: nothing is left to do
        logger.error("a signal could not be acted upon", exc_info=error)
