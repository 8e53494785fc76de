"""How time is taken: contenders in turn, caches cold, quantiles of many rounds."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARM_UPS = 3
COLD_BYTES_PER_L2_BYTE = 8
IDLE_CYCLES = 2_000_000
"""About 1 ms: many times what the host needs for one copy."""


@dataclass(frozen=True)
class Contender:
    """Something that is timed.

    Attributes:
        run: does it once; may return before the device has.
        moved: payload of one run.
        device: where its work ends, so whose stream is timed; "" if that goes without saying.
    """

    name: str
    run: Callable[[], object]
    moved: int
    device: str = ""


@dataclass(frozen=True)
class Spread:
    """Seconds. ``p99``: of a hundred values or more."""

    p20: float
    p50: float
    p80: float
    p99: float | None = None


def spread_of(seconds: Sequence[float]) -> Spread:
    """Of at least two values."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    p99 = None
    if len(seconds) >= 100:
        p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return Spread(deciles[1], statistics.median(seconds), deciles[7], p99)


class Clock(Protocol):
    """Attributes:
    started: the event with which the clock starts that runs now, for streams that it does not time.
    """

    started: torch.cuda.Event | None

    def seconds(self, contender: Contender) -> float:
        """Run it once with cold caches; how long it took."""


class HostClock:
    """For work that is done when it returns."""

    started = None

    def seconds(self, contender: Contender) -> float:
        start = time.perf_counter()
        contender.run()
        return time.perf_counter() - start


class DeviceClock:
    """Events on a stream of the device, whose L2 cache holds none of the data.

    The cache is cleared by reading: written lines would still have to go out while the clock runs.
    Then the device idles for a while before the first event, so that the host is ahead of it as it
    is in an engine, and launches cost time only where a contender has more of them than that hides.
    What they cost the host is another benchmark.

    The idling is in a stream of its own, and whatever waits for its end starts with the clock.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._scratch = {device: _scratch(device) for device in devices}
        self._idling = {device: torch.cuda.Stream(device) for device in devices}
        self.started: torch.cuda.Event | None = None

    def seconds(self, contender: Contender) -> float:
        device = contender.device or next(iter(self._scratch))
        for other in self._scratch:
            if other != device:
                self._clear(other)
                torch.cuda.current_stream(other).synchronize()
        self._clear(device)
        stream, idling = torch.cuda.current_stream(device), self._idling[device]
        idling.wait_stream(stream)
        with torch.cuda.device(device), torch.cuda.stream(idling):
            torch.cuda._sleep(IDLE_CYCLES)
            self.started = idling.record_event()
        stream.wait_event(self.started)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record(stream)
        contender.run()
        end.record(stream)
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3

    def _clear(self, device: str) -> None:
        with torch.cuda.device(device):
            self._scratch[device].sum()


def _scratch(device: str) -> torch.Tensor:
    size = COLD_BYTES_PER_L2_BYTE * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.ones(size // 4, dtype=torch.float32, device=device)


def measure(contenders: Sequence[Contender], rounds: int, clock: Clock) -> dict[str, Spread]:
    """Time all contenders once in every round, each round starting with another one."""
    for contender in contenders:
        for _ in range(WARM_UPS):
            contender.run()
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            times[contender.name].append(clock.seconds(contender))
    return {name: spread_of(seconds) for name, seconds in times.items()}
