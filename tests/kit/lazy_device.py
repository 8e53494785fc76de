"""A device that only remembers what is queued, and later does it in any order that events allow."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Stream:
    work: deque = field(default_factory=deque)


class Event:
    """``recorded`` counts the records that were queued, ``passed`` those that were reached."""

    def __init__(self):
        self.recorded = self.passed = 0

    def query(self):
        return self.passed == self.recorded


class LazyDevice:
    """In host memory, for interpreted kernels."""

    def __init__(self, seed=0):
        self.streams = []
        self.batches = True
        self.copies = self.batch_calls = 0
        self.stopped = False
        self.waiting = self.most_waiting = 0  # launches that are queued
        self.fail_at = None  # the number of a copy that is refused
        self._random = random.Random(seed)

    def current(self):
        return nullcontext()

    on = staticmethod(lambda stream: nullcontext())

    def stream(self, use):
        self.streams.append(Stream())
        return self.streams[-1]

    def give_back(self, stream, use):
        assert not stream.work
        self.streams.remove(stream)

    def handle(self, stream):
        return 0

    event = staticmethod(Event)

    def record(self, event, stream):
        event.recorded += 1
        number = event.recorded
        stream.work.append((None, lambda: setattr(event, "passed", number)))

    def now(self):
        return Event()

    def make_events(self, stream):
        pass

    def wait(self, stream, event):
        number = event.recorded
        stream.work.append((lambda: event.passed >= number, lambda: None))

    def copy(self, stream, to, origin, nbytes, *, pinned):
        self._count_copy()
        self._queue_copy(stream, to, origin, nbytes)

    def _count_copy(self):
        self.copies += 1
        if self.copies == self.fail_at:
            raise RuntimeError("no such luck")

    def _queue_copy(self, stream, to, origin, nbytes):
        stream.work.append((None, lambda: ctypes.memmove(to, origin, nbytes)))

    def copy_rows(self, stream, to, origin, nbytes, count):
        assert count > 1
        assert min(to[1], origin[1]) >= nbytes
        self._count_copy()
        for row in range(count):
            there, here = (first + row * apart for first, apart in (to, origin))
            self._queue_copy(stream, there, here, nbytes)

    def copy_batch(self, stream, to, origin, sizes):
        self.batch_calls += 1
        order = list(zip(to.tolist(), origin.tolist(), sizes.tolist(), strict=True))
        self._random.shuffle(order)
        for one in order:
            self.copy(stream, *one, pinned=True)

    def run(self, stream, launch, *arguments):
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)

        def work():
            self.waiting -= 1
            launch(*arguments)

        stream.work.append((None, work))

    def pinned(self, count):
        return torch.full((count,), 0x5A5A, dtype=torch.int64)

    def settle(self, held=()):
        """Do everything that is queued, but what is in the streams ``held`` or waits for that."""
        streams = [stream for stream in self.streams if stream not in held]
        while any(stream.work for stream in streams):
            ready = [s for s in streams if s.work and (not s.work[0][0] or s.work[0][0]())]
            if held and not ready:
                return
            assert ready, "streams wait for each other"
            self._random.choice(ready).work.popleft()[1]()

    def settle_some(self, most=8):
        """Do some of what is queued, or nothing."""
        for _ in range(self._random.randint(0, most)):
            ready = [s for s in self.streams if s.work and (not s.work[0][0] or s.work[0][0]())]
            if not ready:
                return
            self._random.choice(ready).work.popleft()[1]()

    def settle_until(self, event):
        """Do what comes before an event, and whatever else happens to be done by then."""
        while not event.query():
            ready = [s for s in self.streams if s.work and (not s.work[0][0] or s.work[0][0]())]
            assert ready, "streams wait for each other"
            self._random.choice(ready).work.popleft()[1]()

    def finish(self, event, timeout):
        if self.stopped:
            return False
        self.settle_until(event)
        return True

    def synchronize(self, stream):
        self.settle()
