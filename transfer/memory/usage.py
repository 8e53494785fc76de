"""Who uses a thing right now, and what is to be done as soon as nobody does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Usage:
    """Users bracket their work with :meth:`hold` and :meth:`release`. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._when_unused: list[Callable[[], None]] = []

    def hold(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            self._call_if_unused()

    def when_unused(self, action: Callable[[], None]) -> None:
        """Call it now, or when the last user has released; nobody can hold before it returned."""
        with self._lock:
            self._when_unused.append(action)
            self._call_if_unused()

    def _call_if_unused(self) -> None:
        while self._users == 0 and self._when_unused:
            self._when_unused.pop(0)()
