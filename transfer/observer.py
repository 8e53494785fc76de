"""What became of every transfer, for whoever counts."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

Direction: TypeAlias = Literal["store", "load"]
Outcome: TypeAlias = Literal["stored", "loaded", "damaged", "stopped", "failed"]
"""How a transfer ends: ``damaged``, a load that ends before a chunk that is not what was stored;
``stopped``, by a flush or a close; ``failed``, with any other exception."""


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One transfer that is over.

    Attributes:
        asked, chunks: how many chunks it was to move, and has published or loaded.
        nbytes: their payload, without the groups that a load left out (in the lmcache-driven context with
            them, for it is the server that knows).
        wait_seconds: from its submission until its turn came.
        seconds: from then until the end, requests to the server included.
        note: the way the bytes went and why, or the error.
    """

    direction: Direction
    outcome: Outcome
    asked: int
    chunks: int
    nbytes: int
    wait_seconds: float
    seconds: float
    note: str = ""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Observer(Protocol):
    """Told of every transfer, before its result is there; on the thread that carries it out."""

    def transfer_over(self, event: TransferEvent) -> None: ...


class NullObserver:
    """Looks away."""

    def transfer_over(self, event: TransferEvent) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Sum:
    """Of transfers of one direction and outcome; see :class:`TransferEvent`."""

    transfers: int = 0
    asked: int = 0
    chunks: int = 0
    nbytes: int = 0
    wait_seconds: float = 0.0
    seconds: float = 0.0


class Totals:
    """Adds up; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[Direction, Outcome], Sum] = {}

    def transfer_over(self, event: TransferEvent) -> None:
        key = event.direction, event.outcome
        with self._lock:
            was = self._sums.get(key, Sum())
            self._sums[key] = Sum(
                was.transfers + 1,
                was.asked + event.asked,
                was.chunks + event.chunks,
                was.nbytes + event.nbytes,
                was.wait_seconds + event.wait_seconds,
                was.seconds + event.seconds,
            )

    def of(self, direction: Direction, outcome: Outcome) -> Sum:
        """All zeros if there was none."""
        with self._lock:
            return self._sums.get((direction, outcome), Sum())

    def all(self) -> Mapping[tuple[Direction, Outcome], Sum]:
        """As they are now."""
        with self._lock:
            return dict(self._sums)


class Guarded:
    """Another observer, of which nothing that it raises goes further than the log."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._failures = 0

    def transfer_over(self, event: TransferEvent) -> None:
        try:
            self._observer.transfer_over(event)
        except BaseException:
            self._failures += 1
            if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, ...: never a flood
                logger.exception("the observer failed (%d times so far)", self._failures)
