"""Whether something that has failed is worth another try. Pure."""

from __future__ import annotations

FIRST_PAUSE = 1.0
"""Seconds without a try after the first failure; twice as long after each try that fails, too."""

LONGEST_PAUSE = 60.0
"""Seconds: for so long at most is a tier missed after it is back."""


class Breaker:
    """Closed: everything may try. Open: one try each time a pause is over; its outcome closes it, or
    makes the next pause longer."""

    def __init__(self) -> None:
        self._pause = 0.0  # 0: closed
        self._next_try = 0.0
        self._tried = False

    @property
    def closed(self) -> bool:
        return not self._pause

    def may_try(self, now: float) -> bool:
        """May something be tried now? Who is told so does, and says how it ended."""
        if self.closed:
            return True
        if now < self._next_try:
            return False
        self._next_try = now + self._pause  # in case this one never ends
        self._tried = True
        return True

    def succeeded(self) -> None:
        self._pause, self._tried = 0.0, False

    def failed(self, now: float) -> None:
        """Something failed; what was under way when the breaker opened counts no more."""
        if not self.closed and not self._tried:
            return
        self._pause = min(2 * self._pause, LONGEST_PAUSE) or FIRST_PAUSE
        self._next_try = now + self._pause
        self._tried = False
