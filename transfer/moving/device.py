"""The little that movers ask of a GPU: streams, events and copies, none of which waits."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lmcache_kernels.cuda_runtime import (
    current_device,
    current_stream,
    forget_error,
    new_stream,
    patient,
    quick,
)
from lmcache_kernels.errors import TransferFailed

from .cuda_host import copy_batch, has_batched_copies

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

POLL_SECONDS = 50e-6
"""How often a host thread that waits for the device looks."""

MAX_BATCH = 8000
"""Copies of one call: at 8192 and above the driver has been seen to refuse or to crash."""


READY_MADE = 16
"""Events that wait for the next submits: as many as an engine may make in a step."""

_spare: defaultdict[tuple[torch.device, str], list[torch.cuda.Stream]] = defaultdict(list)
"""Streams that were given back, to be used for the same again: CUDA keeps what a stream was first used for
in mind. In one that once copied to the host, copies to the device carry 0.93 of the link instead of 0.98
(chunks of 10 MiB, H200, driver 580.159, 30 November 2026)."""

_spare_lock = threading.Lock()


class Device(Protocol):
    """Queues work in streams. Streams and events are whatever this device makes them.

    Attributes:
        batches: whether :meth:`copy_batch` works.
    """

    batches: bool

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device the calling thread's; the other calls need that."""
        ...

    def stream(self, use: str) -> Any:
        """A stream of the lowest priority that nobody else uses, until it is given back.

        Args:
            use: what goes through it; it was never used for anything else.
        """
        ...

    def give_back(self, stream: Any, use: str) -> None:
        """Nothing is queued in the stream, and its user does not need it any more."""
        ...

    def handle(self, stream: Any) -> int:
        """What a kernel launch takes for it."""
        ...

    def event(self) -> Any:
        """Not recorded yet: whoever waits for it goes on at once."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """Move the event to the end of what the stream has now."""
        ...

    def now(self) -> Any:
        """An event behind what the calling thread's current stream has. The engine's thread asks."""
        ...

    def make_events(self, stream: Any) -> None:
        """Have some ready for :meth:`now`, which is quicker then; the stream gets a few records."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream gets from now on waits for what the event stands for now."""
        ...

    def copy(self, stream: Any, to: int, origin: int, nbytes: int, *, pinned: bool) -> None:
        """Queue a copy between two addresses, of the device or of host memory.

        If that is not pinned, the call waits until the copy was done.
        """
        ...

    def copy_rows(
        self, stream: Any, to: tuple[int, int], origin: tuple[int, int], nbytes: int, count: int
    ) -> None:
        """Queue one copy of ``count`` stretches of ``nbytes``, of pinned memory.

        Args:
            to, origin: where the first begins, and how far from it the next, at least ``nbytes``.
        """
        ...

    def copy_batch(
        self,
        stream: Any,
        to: NDArray[np.uint64],
        origin: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        """Queue copies between many pairs of addresses, in no order among themselves."""
        ...

    def run(self, stream: Any, launch: Callable[..., object], *arguments: Any) -> None:
        """Call something that launches kernels on the stream, by its handle or with :meth:`on`."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What Triton and torch launch goes to the stream."""
        ...

    def pinned(self, count: int) -> torch.Tensor:
        """int64[count] in host memory that kernels can write."""
        ...

    def finish(self, event: Any, timeout: float) -> bool:
        """Wait until the event has passed; False when ``timeout`` seconds have."""
        ...

    def synchronize(self, stream: Any) -> None: ...


class CudaDevice:
    """A GPU of this process.

    Args:
        name: as torch spells it, with its number.
    """

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)
        self.batches = has_batched_copies()
        self._ready_made: list[torch.cuda.Event] = []

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device.index)  # torch takes microseconds to read a name

    def stream(self, use: str) -> torch.cuda.Stream:
        # They are kept, because call rings are.
        with _spare_lock:
            spare = _spare[self._device, use]
            return spare.pop() if spare else new_stream(self._device)

    def give_back(self, stream: torch.cuda.Stream, use: str) -> None:
        with _spare_lock:
            _spare[self._device, use].append(stream)

    def handle(self, stream: torch.cuda.Stream) -> int:
        return int(stream.cuda_stream)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        if not event.cuda_event:
            event.record(stream)  # torch makes it now
            return
        self._queued(quick().record(event.cuda_event, stream.cuda_stream), "event")

    def now(self) -> torch.cuda.Event:
        try:
            event = self._ready_made.pop()
        except IndexError:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            return event
        index = self._device.index
        if current_device() == index:
            self._queued(quick().record(event.cuda_event, current_stream(index)), "event")
        else:  # whose default stream has the same handle
            event.record(torch.cuda.current_stream(self._device))
        return event

    def make_events(self, stream: torch.cuda.Stream) -> None:
        while len(self._ready_made) < READY_MADE:
            event = torch.cuda.Event()
            event.record(stream)  # torch makes it now
            self._ready_made.append(event)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if event.cuda_event:
            code = quick().wait(stream.cuda_stream, event.cuda_event, 0)
            self._queued(code, "wait")

    def copy(
        self, stream: torch.cuda.Stream, to: int, origin: int, nbytes: int, *, pinned: bool
    ) -> None:
        calls = quick() if pinned else patient()
        code = calls.queue_copy(to, origin, nbytes, stream.cuda_stream)
        self._queued(code, f"copy of {nbytes} bytes")

    def copy_rows(
        self,
        stream: torch.cuda.Stream,
        to: tuple[int, int],
        origin: tuple[int, int],
        nbytes: int,
        count: int,
    ) -> None:
        code = quick().queue_rows(*to, *origin, nbytes, count, stream.cuda_stream)
        self._queued(code, f"copy of {count} times {nbytes} bytes")

    def copy_batch(
        self,
        stream: torch.cuda.Stream,
        to: NDArray[np.uint64],
        origin: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        handle = self.handle(stream)
        for first in range(0, len(to), MAX_BATCH):
            some = slice(first, first + MAX_BATCH)
            code = copy_batch(to[some], origin[some], sizes[some], handle)
            self._queued(code, f"batch of {len(to)} copies")

    def _queued(self, code: int, what: str) -> None:
        if code:
            forget_error()
            raise TransferFailed(f"CUDA refused a {what}: error {code}")

    def run(
        self, stream: torch.cuda.Stream, launch: Callable[..., object], *arguments: Any
    ) -> None:
        launch(*arguments)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, pin_memory=True)

    def finish(self, event: torch.cuda.Event, timeout: float) -> bool:
        return EventCompletion(event).wait(timeout)

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        stream.synchronize()


class EventCompletion:
    """The :class:`~lmcache_kernels.transfer.moving.moves.Completion` that a recorded event is."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True
