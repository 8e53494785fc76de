"""How a server ends: it begins nothing new, and finishes what it has begun. Pure.

======== ============================================ ==============================================
phase    meaning                                      left by
======== ============================================ ==============================================
serving  all requests are served                      begin -> draining; stop -> stopped
draining those of :data:`NEW_WORK` are refused        nothing is under way any more, the time is up,
                                                      or stop -> stopped
stopped  it may be closed                             never
======== ============================================ ==============================================
"""

from __future__ import annotations

import logging
import math
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.transfer.messages import (
    ErrorReply,
    Lookup,
    PrepareStore,
    Register,
    RegisterCache,
    StoreBlocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lmcache_kernels.transfer.messages import Reply, Request

    from .later import Later

logger = logging.getLogger(__name__)

NEW_WORK = frozenset({Lookup, PrepareStore, StoreBlocks, Register, RegisterCache})
"""What begins something. Whoever has looked up may still load what was found."""


class Phase(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class Ending(Protocol):
    """What can be drained: :class:`~.service.CacheService`."""

    def handle(self, request: Request, now: float, deadline: float) -> Reply | Later: ...

    def finished(self, now: float) -> list[tuple[Later, Reply]]: ...

    def next_due(self) -> float: ...

    def tick(self, now: float) -> None: ...

    def under_way(self) -> Mapping[str, int]:
        """How much of what is not over; nothing is when all are 0. Asked only while it drains."""
        ...


class Drain:
    """A service between its socket and itself, so that it can come to an end.

    Args:
        service: the one that is drained.
        timeout: seconds that draining may take; may be changed until it begins.
        stopped: called once, in the service's thread, when the service may be closed.
    """

    def __init__(
        self, service: Ending, timeout: float, stopped: Callable[[], None] = lambda: None
    ) -> None:
        self.phase = Phase.SERVING
        self.timeout = timeout
        self._service = service
        self._stopped = stopped
        self._ends_at = math.inf

    def begin(self, now: float) -> None:
        """Refuse what is new from now on; without effect if that was said before."""
        if self.phase is not Phase.SERVING:
            return
        self.phase = Phase.DRAINING
        self._ends_at = now + self.timeout
        left = self._left()
        if left and self.timeout:
            logger.info("ending in %g s at the latest; under way: %s", self.timeout, left)
        self._look(now)

    def stop(self) -> None:
        """End at once, whatever is under way."""
        if self.phase is not Phase.STOPPED:
            self.phase = Phase.STOPPED
            self._ends_at = math.inf
            self._stopped()

    # --- the service, as its socket's thread sees it ----------------------------------------------

    def handle(self, request: Request, now: float, deadline: float = math.inf) -> Reply | Later:
        if self.phase is not Phase.SERVING and type(request) in NEW_WORK:
            return ErrorReply(
                code="draining", message=f"{type(request).__name__}: the server is about to end"
            )
        return self._service.handle(request, now, deadline)

    def finished(self, now: float) -> list[tuple[Later, Reply]]:
        replies = self._service.finished(now)
        self._look(now)
        return replies

    def next_due(self) -> float:
        return min(self._service.next_due(), self._ends_at)

    def tick(self, now: float) -> None:
        self._service.tick(now)

    # --- inside -----------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if self.phase is not Phase.DRAINING:
            return
        left = self._left()
        if left and now < self._ends_at:
            return
        if left:
            logger.warning("ended after %g s; under way, and lost: %s", self.timeout, left)
        self.stop()

    def _left(self) -> str:
        counts = self._service.under_way()
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
