"""A mover of host memory that is asynchronous, as a GPU's is, and stands still when told to."""

from __future__ import annotations

import threading
import time

from lmcache_kernels.transfer.moving.host_mover import HostMover
from lmcache_kernels.transfer.moving.moves import Moved


class Point:
    """A completion that a test decides about."""

    def __init__(self):
        self._passed = threading.Event()

    def done(self):
        return self._passed.is_set()

    def wait(self, timeout):
        return self._passed.wait(timeout)

    def reach(self):
        self._passed.set()


class Work:
    """Queued moves, carried out by :meth:`HeldMover.let_go`."""

    def __init__(self, direction, run):
        self.direction = direction
        self.cache_free, self.done = Point(), Point()
        self._run = run
        self.sums = None

    def touch_cache(self):
        """Read (or write) the cache; what goes on in host memory is not over."""
        if self.sums is None:
            self.sums = self._run()
        self.cache_free.reach()

    def finish(self):
        self.touch_cache()
        self.done.reach()


class HeldMover:
    """Attributes:
    queued: what :meth:`let_go` will carry out.
    moves: of every call, (direction, moves).
    before: called with the direction when moves are about to be queued; may raise.
    following: released when a gather begins that follows the engine layer by layer.
    """

    synchronous = False

    def __init__(self, groups, layout):
        self._host = HostMover(groups, layout)
        self._held = False
        self._changed = threading.Condition()
        self.queued = []
        self.moves = []
        self.before = lambda direction: None
        self.following = threading.Semaphore(0)
        self.closed = False

    def prepare(self):
        pass

    def ready(self):
        return None

    def gather(self, moves, after, layers=None):
        if layers is not None:
            self.following.release()
            for place in sorted(place for group in layers.order for place in group):
                layers.wait(place)
        return self._queue("store", moves, self._host.gather)

    def scatter(self, moves, after, layers=None):
        return self._queue("load", moves, self._host.scatter)

    def _queue(self, direction, moves, run):
        self.before(direction)
        work = Work(direction, lambda: run(moves, None).fingerprints())
        with self._changed:
            self.moves.append((direction, list(moves)))
            held = self._held
            if held:
                self.queued.append(work)
            self._changed.notify_all()
        if not held:
            work.finish()
        return Moved(work.cache_free, work.done, lambda: work.sums, "on the host: a test")

    def close(self):
        self.closed = True

    # --- for tests --------------------------------------------------------------------------------

    def hold(self):
        """What is queued from now on is not carried out."""
        self._held = True

    def let_go(self):
        """Carry out what is queued, in order, and from now on everything at once."""
        with self._changed:
            self._held = False
            queued, self.queued = self.queued, []
        for work in queued:
            work.finish()

    def wait_queued(self, count, timeout=30.0):
        """Until so many calls were made."""
        end = time.monotonic() + timeout
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.moves) >= count, max(0.0, end - time.monotonic())
            ), f"{len(self.moves)} calls"
