"""A server at one moment: everything that is told of it comes out of one of these.

It is taken between two requests, so its numbers belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from lmcache_kernels.transfer.messages import Reply, Request
    from lmcache_kernels.transfer.serving.accounts import QuotaUse
    from lmcache_kernels.transfer.serving.known_workers import WorkerState
    from lmcache_kernels.transfer.serving.request_log import RequestLog, Served, SlowRequest
    from lmcache_kernels.transfer.serving.service import CacheService

T = TypeVar("T")


class LoopCounters(Protocol):
    """See :class:`~lmcache_kernels.adapters.messaging.server.ServerCounters`."""

    malformed: int
    undelivered: int
    busy_seconds: float


class Loop(Protocol):
    """What is needed of :class:`~lmcache_kernels.adapters.messaging.server.CacheServerLoop`."""

    @property
    def counters(self) -> LoopCounters: ...

    @property
    def requests(self) -> RequestLog: ...

    @property
    def waiting(self) -> int: ...

    def now(self) -> float: ...

    def call(self, function: Callable[[], T]) -> Future[T]: ...

    def ask(self, request: Request, timeout: float) -> Future[Reply]: ...


@dataclass(frozen=True, slots=True)
class TierState:
    """One place where chunks are: ``l1``, the arena, or a tier below it.

    Attributes:
        hit_chunks: that lookups found here.
        details: of tiers below the arena, see
            :class:`~lmcache_kernels.transfer.tiering.link.TierCounters`; empty for the arena.
    """

    name: str
    hit_chunks: int
    used_bytes: int | None
    capacity_bytes: int | None
    chunks: int | None
    details: dict[str, int | float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server at one moment.

    Attributes:
        now: monotonic seconds; ``uptime``: seconds since the server started; ``delay``: seconds until
            the server's thread had time for this.
        stats: see :meth:`~lmcache_kernels.transfer.serving.service.CacheService.stats`.
        waiting: requests whose replies come later.
        served, slowest: see :class:`~lmcache_kernels.transfer.serving.request_log.RequestLog`.
    """

    now: float
    uptime: float
    delay: float
    incarnation: str
    chunk_tokens: int
    stats: dict[str, int]
    tiers: list[TierState]
    quotas: dict[str, QuotaUse]
    workers: list[WorkerState]
    waiting: int
    served: list[Served]
    slowest: list[SlowRequest]
    malformed: int
    undelivered: int
    busy_seconds: float


def take(loop: Loop, service: CacheService, started: float, asked: float) -> Snapshot:
    """For the server's thread.

    Args:
        started: when the server did; ``asked``: when this was asked for, on the loop's clock.
    """
    now = loop.now()
    stats = service.stats()
    return Snapshot(
        now=now,
        uptime=now - started,
        delay=now - asked,
        incarnation=service.incarnation,
        chunk_tokens=service.chunk_tokens,
        stats=stats,
        tiers=_tiers(stats, service.tier_stats()),
        quotas=service.quotas(),
        workers=service.workers(now),
        waiting=loop.waiting,
        served=loop.requests.served(),
        slowest=loop.requests.slowest(now),
        malformed=loop.counters.malformed,
        undelivered=loop.counters.undelivered,
        busy_seconds=loop.counters.busy_seconds,
    )


def _tiers(stats: dict[str, int], below: dict[str, dict[str, int | float]]) -> list[TierState]:
    tiers = [
        TierState(
            "l1", stats["hit"], stats["used_bytes"], stats["capacity_bytes"], stats["resident"], {}
        )
    ]
    for name, details in below.items():
        sizes = [details.get(key) for key in ("used_bytes", "capacity_bytes", "chunks")]
        used, capacity, chunks = (None if size is None else int(size) for size in sizes)
        tiers.append(TierState(name, int(details["gained"]), used, capacity, chunks, details))
    return tiers
