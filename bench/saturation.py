"""A loop of the engine timed alone and while transfers fill the link, in turn."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .moving import TIMEOUT, finish
from .timing import Spread, spread_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lmcache_kernels.transfer.moving.moves import Completion

ALONE = "alone"
IN_FLIGHT = 2
"""Transfers of a flow that are queued at any time: one moves, one waits its turn."""


@dataclass(frozen=True)
class Flow:
    """A transfer that can be queued again and again.

    Attributes:
        direction: "gather" or "scatter".
        queue: queues it once more; what it returns is over when everything has moved.
        nbytes: payload of one.
    """

    direction: str
    queue: Callable[[], Completion]
    nbytes: int


@dataclass(frozen=True)
class Window:
    """A stretch of a loop. ``seconds``: of one step; the ends as ``time.perf_counter`` has them."""

    seconds: float
    began: float
    ended: float


class Driven:
    """A flow that a thread of its own keeps going."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.under_way = threading.Event()
        self._ends: list[float] = []

    def drive(self, stop: threading.Event) -> None:
        """Keep :data:`IN_FLIGHT` transfers queued until ``stop``, then wait for the last of them."""
        queued: deque[Completion] = deque()
        try:
            while not stop.is_set():
                queued.append(self.flow.queue())
                if len(queued) == IN_FLIGHT:
                    self._finish(queued.popleft())
                    self.under_way.set()
        finally:
            self.under_way.set()
            while queued:
                self._finish(queued.popleft())

    def _finish(self, done: Completion) -> None:
        finish(done)
        self._ends.append(time.perf_counter())

    def rate(self, window: Window) -> float:
        """Bytes a second in the window, in which transfers are taken to move evenly."""
        return rate_between(self._ends, self.flow.nbytes, window.began, window.ended)


def rate_between(ends: Sequence[float], nbytes: int, began: float, ended: float) -> float:
    """Bytes a second between two times, of transfers of ``nbytes`` that follow each other.

    Raises:
        ValueError: the first had not ended when the time began, or the last had when it ended.
    """
    if not ends or not ends[0] <= began < ended <= ends[-1]:
        raise ValueError("the transfers did not go on for the whole of the window")
    at = np.interp((began, ended), ends, np.arange(len(ends)))
    return float((at[1] - at[0]) * nbytes / (ended - began))


@contextmanager
def saturated(flows: Sequence[Flow]) -> Iterator[list[Driven]]:
    """For its length all flows go on; each has moved something when it begins."""
    stop = threading.Event()
    driven = [Driven(flow) for flow in flows]
    with ThreadPoolExecutor(max(1, len(flows))) as threads:
        over = [threads.submit(one.drive, stop) for one in driven]
        try:
            for one in driven:
                one.under_way.wait(TIMEOUT)
            yield driven
        finally:
            stop.set()
    for thread in over:
        thread.result()


class Loop(Protocol):
    def window(self) -> Window:
        """Run some steps and wait for them."""


@dataclass(frozen=True)
class Beside:
    """Attributes:
    seconds: of a step, alone and per contender.
    rates: per contender and direction, bytes a second that it moved meanwhile.
    """

    seconds: dict[str, Spread]
    rates: dict[str, dict[str, float]]


def time_beside(loop: Loop, traffic: Mapping[str, Sequence[Flow]], rounds: int) -> Beside:
    """Time the loop alone and beside each contender's flows, each once a round, in turn."""
    contenders: dict[str, Sequence[Flow]] = {ALONE: (), **traffic}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    rates: dict[str, dict[str, list[float]]] = {
        name: {flow.direction: [] for flow in flows} for name, flows in traffic.items()
    }
    names = list(contenders)
    for turn in range(-1, rounds):
        first = max(turn, 0) % len(names)
        for name in [*names[first:], *names[:first]]:
            with saturated(contenders[name]) as driven:
                window = loop.window()
            if turn < 0:
                continue  # everyone is warm after it
            seconds[name].append(window.seconds)
            for one in driven:
                rates[name][one.flow.direction].append(one.rate(window))
    return Beside(
        {name: spread_of(found) for name, found in seconds.items()},
        {
            name: {direction: median(found) for direction, found in flows.items()}
            for name, flows in rates.items()
        },
    )
