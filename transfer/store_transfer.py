"""A submitted transfer and the question that decides about its blocks: does the device use them?"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .moving.moves import Completion


class Transfer:
    """A submitted store or load, which can be stopped until the device is given its moves.

    Attributes:
        result: finished exactly once, by whoever carries the transfer out; it cannot be cancelled.
    """

    def __init__(self) -> None:
        self.result: Future[int] = Future()
        self.result.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._begun = False
        self._stopped = False

    def begin(self) -> bool:
        """The device is about to be given moves; False: the transfer was stopped before."""
        with self._lock:
            self._begun = not self._stopped
            return self._begun

    def stop(self) -> bool:
        """Let the device get no further moves; True: it has none of this transfer."""
        with self._lock:
            self._stopped = True
            return not self._begun

    @property
    def stopped(self) -> bool:
        return self._stopped

    def carry_out(self, run: Callable[[], None]) -> None:
        """``run`` does all of this transfer in the thread that calls it: at once, in this one."""
        run()


class StoreTransfer(Transfer):
    """A submitted store. ``result``: chunks this store published, present ones not counted.

    Until the gather has read the blocks, :meth:`EngineDrivenContext.flush` can still stop it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wanted = True
        self._read: Completion | None = None
        self._launched = threading.Event()  # or there is nothing to launch any more
        self.result.add_done_callback(lambda _: self._launched.set())

    def launched(self, read: Completion) -> None:
        """The gathers were launched; ``read`` tells when they have read."""
        self._read = read
        self._launched.set()

    def pause(self) -> None:
        """The gathers so far have read, and others are to follow; until then it can be stopped."""
        with self._lock:
            self._begun = False
            self._launched.clear()
            self._read = None

    def wait_read(self, timeout: float) -> bool:
        """Wait until no gather of this store, which has begun, reads the cache any more."""
        end = time.monotonic() + timeout
        if not self._launched.wait(timeout):
            return False
        read = self._read  # pause may take it away at any time
        return read is None or read.wait(max(0.0, end - time.monotonic()))

    def discard(self) -> None:
        """Whatever the gather read is not to be published."""
        self._wanted = False

    @property
    def wanted(self) -> bool:
        return self._wanted
