"""One tier as the service's thread sees it: calls that come back later, and never fail.

A tier that cannot be used has no chunks and takes none; a breaker sees to it that nobody waits for
one that is away.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypeVar

from lmcache_kernels.errors import TierUnavailable

from .breaker import Breaker
from .threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.serving.inbox import Inbox
    from lmcache_kernels.transfer.tiering.tier import Place, Tier

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
class Moved:
    """What was copied one way: ``chunks`` of ``nbytes`` in ``seconds`` of all calls together; ``failed``
    were meant to be and were not."""

    chunks: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class TierCounters:
    """What happened since the start; chunks, where nothing else is said.

    Attributes:
        asked, hit: looked for and there.
        gained: by so many the prefixes that lookups found are longer, thanks to this tier.
        skipped: not copied down because they had left the arena before their turn.
        failures: calls that failed as a whole.
        loads, stores: up and down.
    """

    asked: int = 0
    hit: int = 0
    gained: int = 0
    skipped: int = 0
    failures: int = 0
    loads: Moved = field(default_factory=Moved)
    stores: Moved = field(default_factory=Moved)


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
        self._incomplete = 0  # calls that failed for some chunks
        self._readers = Threads(READERS, f"lmcache-kernels-{name}-read")
        self._writers = Threads(WRITERS, f"lmcache-kernels-{name}-write")
        # When each call began; infinite of those that may take as long as they like.
        self._under_way: dict[object, float] = {}

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
        return not self._hangs(now) and self._breaker.may_try(now)

    def tick(self, now: float) -> None:
        """Notice a call that does not come back; every second or so."""
        if self._hangs(now) and not self.away:
            self._judge(TierUnavailable(f"a call is not over after {PATIENCE:g} s"), now)

    def _hangs(self, now: float) -> bool:
        return now - min(self._under_way.values(), default=now) >= PATIENCE

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
        move = self._tier.get_into
        self._move(self._readers, move, self.counters.loads, keys, places, now, then)

    def put_from(
        self,
        keys: Sequence[ChunkKey],
        places: Sequence[Place],
        now: float,
        then: Callable[[list[bool], float], None],
    ) -> None:
        """Copy them down; which are here now."""
        move = self._tier.put_from
        self._move(self._writers, move, self.counters.stores, keys, places, now, then)

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
        counters = asdict(self.counters)
        ways = {
            f"{way}_{name}": count
            for way in ("loads", "stores")
            for name, count in counters.pop(way).items()
        }
        return counters | ways | self._tier.stats() | {"away": int(self.away)}

    def close(self) -> None:
        """End the threads and close the tier when they have ended what is under way."""
        self._readers.close()
        self._writers.call(self._tier.close)
        self._writers.close()

    # --- inside -----------------------------------------------------------------------------------

    def _move(
        self,
        threads: Threads,
        move: Callable[[Sequence[ChunkKey], Sequence[Place]], list[bool]],
        moved: Moved,
        keys: Sequence[ChunkKey],
        places: Sequence[Place],
        now: float,
        then: Callable[[list[bool], float], None],
    ) -> None:
        def over(done: list[bool] | None, seconds: float, now: float) -> None:
            done = done or [False] * len(keys)
            moved.chunks += sum(done)
            failed = len(keys) - sum(done)
            moved.failed += failed
            if failed and not self.away:
                self._tell_of_failed(moved)
            moved.nbytes += sum(len(place) for place, ok in zip(places, done, strict=True) if ok)
            moved.seconds += seconds
            then(done, now)

        self._call(threads, lambda: _checked(move(keys, places), keys), over, now)

    def _tell_of_failed(self, moved: Moved) -> None:
        """At the 1st, 2nd, 4th, ... call of which some failed: a tier may be full, and away is something else."""
        self._incomplete += 1
        if self._incomplete.bit_count() == 1:
            what = "stored" if moved is self.counters.stores else "loaded"
            logger.warning(
                "tier %s: %d chunks could not be %s since the start, %d could; is it full?",
                *(self.name, moved.failed, what, moved.chunks),
            )

    def _order(
        self, work: Callable[[], None], now: float, then: Callable[[bool, float], None]
    ) -> None:
        def done() -> bool:
            work()
            return True

        self._call(
            self._writers,
            done,
            lambda done, _, now: then(done is not None, now),
            now,
            bounded=False,
        )

    def _call(
        self,
        threads: Threads,
        work: Callable[[], T],
        over: Callable[[T | None, float, float], None],
        now: float,
        *,
        bounded: bool = True,
    ) -> None:
        """``over`` gets the result, or None if it failed; the seconds it took; and the time."""
        call = object()
        self._under_way[call] = now if bounded else math.inf

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
