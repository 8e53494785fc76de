"""A few threads that work off calls in order and end with the process, even in the middle of one."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Threads:
    """Daemon threads, unlike those of an executor: a call that never returns must not keep the process.

    Args:
        count: of threads, started at the first call.
        name: of each.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []

    def call(self, function: Callable[[], None]) -> None:
        """Have one of them call ``function``, which must not raise."""
        if not self._started:
            for _ in range(self._count):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._started.append(thread)
                thread.start()
        self._calls.put(function)

    def close(self) -> None:
        """End them when what was called is over; does not wait."""
        for _ in self._started:
            self._calls.put(None)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            function()
