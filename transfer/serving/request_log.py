"""What was asked of a server: how often, how it ended, how long it took, and what took longest. Pure."""

from __future__ import annotations

import heapq
import itertools
import re
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.messages import DIGEST_BYTES, ErrorReply

if TYPE_CHECKING:
    from lmcache_kernels.transfer.messages import Reply, Request

BOUNDS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)
"""Upper bounds of the buckets of durations, in seconds: lookups take some 10 us to 1 ms, copies that
the server makes up to seconds."""

SLOWEST = 10
"""Requests that are remembered of each minute."""

MINUTES = 5
"""For which they are."""

OK = "ok"
"""The outcome of what was done; of everything else it is the error's code."""


@dataclass(slots=True)
class Served:
    """Requests of one operation.

    Attributes:
        outcomes: how many ended in which way.
        buckets: how many took how long; the last one is of those above all :data:`BOUNDS`.
        seconds: of all together.
    """

    operation: str
    outcomes: dict[str, int] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0

    def copy(self) -> Served:
        return Served(self.operation, dict(self.outcomes), list(self.buckets), self.seconds)


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """A request that took long: ``chunks`` it named, ``ended_at`` in the server's seconds."""

    operation: str
    outcome: str
    seconds: float
    chunks: int
    instance: int | None
    ended_at: float


class RequestLog:
    """Costs about a microsecond a request."""

    def __init__(self) -> None:
        self._served: dict[type[Request], Served] = {}
        self._serial = itertools.count()  # between requests that took exactly as long
        # Of each of the last minutes a heap; the current one is last.
        self._minutes: deque[list[tuple[float, int, SlowRequest]]] = deque([[]], MINUTES + 1)
        self._minute = 0.0
        self._slow = -1.0  # what takes longer than this is among the slowest of the minute

    def record(self, request: Request, reply: Reply, began: float, ended: float) -> None:
        """``request`` came at ``began`` and was answered at ``ended``, in seconds that never go back."""
        served = self._served.get(type(request))
        if served is None:
            served = self._served[type(request)] = Served(_operation(type(request)))
        outcome = reply.code if isinstance(reply, ErrorReply) else OK
        served.outcomes[outcome] = served.outcomes.get(outcome, 0) + 1
        seconds = ended - began
        served.seconds += seconds
        served.buckets[bisect_left(BOUNDS, seconds)] += 1
        if seconds > self._slow or ended >= self._minute + 60.0:
            self._remember(request, served.operation, outcome, seconds, ended)

    def served(self) -> list[Served]:
        """A copy of all counts, of the operations that were asked for, by name."""
        return sorted((one.copy() for one in self._served.values()), key=lambda one: one.operation)

    def slowest(self, now: float) -> list[SlowRequest]:
        """Those of the last :data:`MINUTES` that took longest, the slowest first."""
        since = now - 60.0 * MINUTES
        kept = [one for minute in self._minutes for one in minute if one[2].ended_at >= since]
        return [slow for *_, slow in heapq.nlargest(SLOWEST, kept)]

    def _remember(
        self, request: Request, operation: str, outcome: str, seconds: float, ended: float
    ) -> None:
        if ended >= self._minute + 60.0:
            self._minute = ended
            self._minutes.append([])
        chunks = len(getattr(request, "digests", b"")) // DIGEST_BYTES
        instance = getattr(request, "instance", None)
        slow = SlowRequest(operation, outcome, seconds, chunks, instance, ended)
        heap = self._minutes[-1]
        heapq.heappush(heap, (seconds, next(self._serial), slow))
        if len(heap) > SLOWEST:
            heapq.heappop(heap)
        self._slow = heap[0][0] if len(heap) == SLOWEST else -1.0


def _operation(kind: type[Request]) -> str:
    """As metrics have it: ``PrepareStore`` is ``prepare_store``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
