"""One tier as the service's thread sees it: calls that come back later, and never fail.

A tier that cannot be used has no chunks and takes none; a breaker sees to it that nobody waits for
one that is away.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from lmcache_kernels.errors import TierUnavailable

from .breaker import Breaker
from .threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.serving.inbox import Inbox
    from lmcache_kernels.transfer.serving.tier import Place, Tier

logger = logging.getLogger(__name__)

T = TypeVar("T")

READERS = 2
"""Threads that look and load: one batch is on its way while the next is asked for."""

WRITERS = 1
"""Threads that store and remove, in this order; loads never wait behind them."""

PATIENCE = 30.0
"""Seconds after which a call that has not come back makes the tier one that is away. A tier ends its
calls by itself long before."""


@dataclass(slots=True)
class TierCounters:
    """What happened since the start; chunks, where nothing else is said.

    Attributes:
        asked, hit: looked for and there.
        gained: by so many the prefixes that lookups found are longer, thanks to this tier.
        loaded, load_failed: copied up, or meant to be and not.
        stored, store_failed: copied down, or meant to be and not.
        skipped: not copied down because they had left the arena before their turn, or the tier was away.
        loaded_bytes, stored_bytes: with their headers.
        load_seconds, store_seconds: of all calls together.
        failures: calls that failed as a whole.
    """

    asked: int = 0
    hit: int = 0
    gained: int = 0
    loaded: int = 0
    load_failed: int = 0
    stored: int = 0
    store_failed: int = 0
    skipped: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    failures: int = 0


class TierLink:
    """Everything here is for the service's thread, and so is what is called back.

    Args:
        tier: closed with this.
        name: unlike that of any other tier of the service.
        inbox: the service's.
    """

    def __init__(self, tier: Tier, name: str, inbox: Inbox) -> None:
        self.name = name
        self.counters = TierCounters()
        self._tier = tier
        self._inbox = inbox
        self._breaker = Breaker()
        self._readers = Threads(READERS, f"lmcache-kernels-{name}-read")
        self._writers = Threads(WRITERS, f"lmcache-kernels-{name}-write")
        self._under_way: dict[object, float] = {}  # when each call began

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._under_way

    @property
    def away(self) -> bool:
        """It has failed, and did not work since."""
        return not self._breaker.closed

    def may_try(self, now: float) -> bool:
        """Is it worth a call? Who is told so makes one."""
        oldest = next(iter(self._under_way.values()), now)
        return now - oldest < PATIENCE and self._breaker.may_try(now)

    def exists(
        self, keys: Sequence[ChunkKey], now: float, then: Callable[[list[bool], float], None]
    ) -> None:
        """Which of them are here."""

        def over(found: list[bool] | None, seconds: float, now: float) -> None:
            found = found or [False] * len(keys)
            self.counters.asked += len(keys)
            self.counters.hit += sum(found)
            then(found, now)

        self._call(self._readers, lambda: _checked(self._tier.exists(keys), keys), over, now)

    def get_into(
        self,
        keys: Sequence[ChunkKey],
        places: Sequence[Place],
        now: float,
        then: Callable[[list[bool], float], None],
    ) -> None:
        """Copy them up; which have arrived."""

        def over(arrived: list[bool] | None, seconds: float, now: float) -> None:
            arrived = arrived or [False] * len(keys)
            count = sum(arrived)
            self.counters.loaded += count
            self.counters.load_failed += len(keys) - count
            self.counters.loaded_bytes += _sum_bytes(places, arrived)
            self.counters.load_seconds += seconds
            then(arrived, now)

        def work() -> list[bool]:
            return _checked(self._tier.get_into(keys, places), keys)

        self._call(self._readers, work, over, now)

    def put_from(
        self,
        keys: Sequence[ChunkKey],
        places: Sequence[Place],
        now: float,
        then: Callable[[list[bool], float], None],
    ) -> None:
        """Copy them down; which are here now."""

        def over(kept: list[bool] | None, seconds: float, now: float) -> None:
            kept = kept or [False] * len(keys)
            count = sum(kept)
            self.counters.stored += count
            self.counters.store_failed += len(keys) - count
            self.counters.stored_bytes += _sum_bytes(places, kept)
            self.counters.store_seconds += seconds
            then(kept, now)

        def work() -> list[bool]:
            return _checked(self._tier.put_from(keys, places), keys)

        self._call(self._writers, work, over, now)

    def remove(
        self, keys: Sequence[ChunkKey], now: float, then: Callable[[bool, float], None]
    ) -> None:
        """Forget them; whether that worked."""
        self._order(lambda: self._tier.remove(keys), now, then)

    def clear(
        self, shards: Sequence[bytes], now: float, then: Callable[[bool, float], None]
    ) -> None:
        """Forget all of these shards, or all there is; whether that worked."""
        self._order(lambda: self._tier.clear(shards), now, then)

    def stats(self) -> dict[str, int | float]:
        """The counters, whether it is away, and what the tier says of itself."""
        return asdict(self.counters) | self._tier.stats() | {"away": int(self.away)}

    def close(self) -> None:
        """End the threads and close the tier when they have ended what is under way."""
        self._readers.close()
        self._writers.call(self._tier.close)
        self._writers.close()

    # --- inside -----------------------------------------------------------------------------------

    def _order(
        self, work: Callable[[], None], now: float, then: Callable[[bool, float], None]
    ) -> None:
        def done() -> bool:
            work()
            return True

        self._call(self._writers, done, lambda done, _, now: then(done is not None, now), now)

    def _call(
        self,
        threads: Threads,
        work: Callable[[], T],
        over: Callable[[T | None, float, float], None],
        now: float,
    ) -> None:
        """``over`` gets the result, or None if it failed; the seconds it took; and the time."""
        call = object()
        self._under_way[call] = now

        def run() -> None:
            began = time.monotonic()
            result: T | None = None
            try:
                result = work()
            except TierUnavailable as error:
                logger.debug("tier %s: %s", self.name, error)
                reason: Exception | None = error
            except Exception as error:
                logger.exception("tier %s failed in a way of its own", self.name)
                reason = error
            else:
                reason = None
            seconds = time.monotonic() - began
            self._inbox.post(lambda now: ended(result, reason, seconds, now))

        def ended(result: T | None, reason: Exception | None, seconds: float, now: float) -> None:
            del self._under_way[call]
            self._judge(reason, now)
            over(result, seconds, now)

        threads.call(run)

    def _judge(self, reason: Exception | None, now: float) -> None:
        was_closed = self._breaker.closed
        if reason is None:
            self._breaker.succeeded()
            if not was_closed:
                logger.warning("tier %s is back", self.name)
            return
        self.counters.failures += 1
        self._breaker.failed(now)
        if was_closed:
            logger.warning("tier %s is away, its chunks count as missing: %s", self.name, reason)


def _checked(answers: list[bool], keys: Sequence[ChunkKey]) -> list[bool]:
    if len(answers) != len(keys):
        raise TierUnavailable(f"expected {len(keys)} answers, got {len(answers)}")
    return answers


def _sum_bytes(places: Sequence[Place], which: Sequence[bool]) -> int:
    return sum(len(place) for place, chosen in zip(places, which, strict=True) if chosen)
