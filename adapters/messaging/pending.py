"""Requests that were sent and not answered, each with the time at which it is given up. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_kernels.transfer.messages import Request

_SPARE_DEADLINES = 1024  # of answered requests, before they are swept out


@dataclass(frozen=True, slots=True)
class Pending:
    """A request under way. ``owner`` None: a greeting or ping that nobody outside asked for."""

    owner: Any
    message: Request
    sent_at: float


class PendingTable:
    """Pending requests by uid. Uids are never used twice."""

    def __init__(self) -> None:
        self._entries: dict[int, Pending] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last_uid = 0

    def __len__(self) -> int:
        """How many have an owner."""
        return sum(entry.owner is not None for entry in self._entries.values())

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._entries)

    def add(self, entry: Pending, deadline: float) -> int:
        """The uid of ``entry``, to be given up at ``deadline``."""
        self._last_uid += 1
        self._entries[self._last_uid] = entry
        heapq.heappush(self._deadlines, (deadline, self._last_uid))
        if len(self._deadlines) > 2 * len(self._entries) + _SPARE_DEADLINES:
            self._deadlines = [due for due in self._deadlines if due[1] in self._entries]
            heapq.heapify(self._deadlines)
        return self._last_uid

    def pop(self, uid: int | None) -> Pending | None:
        """Forget ``uid``; None if it is not pending (any more)."""
        return None if uid is None else self._entries.pop(uid, None)

    def pop_overdue(self, now: float) -> list[Pending]:
        """Forget those whose deadline has come, earliest first."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = self.pop(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                overdue.append(entry)
        return overdue

    def pop_all(self) -> list[Pending]:
        """Forget all, in the order in which they were sent."""
        entries = list(self._entries.values())
        self._entries.clear()
        self._deadlines.clear()
        return entries

    def next_deadline(self) -> float | None:
        """No deadline comes earlier; None: none comes."""
        return self._deadlines[0][0] if self._deadlines else None
