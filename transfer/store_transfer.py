"""A submitted store and the question that decides about its blocks: does a gather still read them?"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .moves import Completion


class StoreTransfer:
    """A submitted store. ``result``: chunks this store published, present ones not counted.

    Until the gather has read the blocks, :meth:`EngineDrivenContext.flush` can still stop it.
    """

    def __init__(self) -> None:
        self.result: Future[int] = Future()
        self._lock = threading.Lock()
        self._begun = False
        self._wanted = True
        self._read: Completion | None = None
        self._launched = threading.Event()

    def begin(self) -> bool:
        """The gather is about to be launched; False when the store was stopped before."""
        with self._lock:
            self._begun = self._wanted
            return self._begun

    def launched(self, read: Completion) -> None:
        """Every gather was launched; ``read`` tells when they have read."""
        self._read = read
        self._launched.set()

    def over(self) -> None:
        """No gather is running and none will be launched."""
        self._launched.set()

    def stop(self) -> bool:
        """Stop the store unless its gather began; True when no gather runs or will run."""
        with self._lock:
            if not self._begun:
                self._wanted = False
            return not self._begun

    def discard(self) -> None:
        """Whatever the gather read is not to be published."""
        self._wanted = False

    @property
    def wanted(self) -> bool:
        return self._wanted

    def wait_read(self, timeout: float) -> bool:
        """Wait until no gather of this store reads the cache any more."""
        if not self._launched.wait(timeout):
            return False
        return self._read is None or self._read.wait(timeout)
