"""A store that begins while the engine still computes what it reads, and follows it layer by layer."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from lmcache_kernels.errors import Closed, TransferTimeout
from lmcache_kernels.transfer.store_transfer import StoreTransfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_kernels.chunk_copy import Layers
    from lmcache_kernels.transfer.moving.moves import Completion, Mover

MARKS_TIMEOUT = 60.0
"""Seconds from the submit to the mark of the last layer: no forward pass of a serving engine takes that
long, and a server gives slots of a writer it does not hear of to others only after ten times as much."""


class LayeredStore(StoreTransfer):
    """A submitted store by layers. ``result``: as of any store; failed if not all layers were saved.

    It reads a layer when :meth:`saved` has said that the engine queued the work that writes it. Once
    that is said of the last one it goes on by itself. :meth:`stop` ends it for good if some are owed:
    whoever flushes may be the one who would have told.

    Args:
        last: the place of the last layer in the order.
    """

    def __init__(self, mover: Mover, order: Layers, last: int) -> None:
        super().__init__()
        self.order = order
        self._mover = mover
        self._last = last
        self._give_up_at = time.monotonic() + MARKS_TIMEOUT
        self._changed = threading.Condition(self._lock)  # never held across a wait: saved takes it
        self._marks: list[tuple[int, Completion | None]] = []
        self._awaited = -1
        self._run: Callable[[], None] | None = None

    def saved(self, place: int) -> None:
        """What the engine has queued so far writes the layers up to this place, all of each.

        Costs microseconds. Places may be left out, and what is said twice has no effect, nor has
        anything once the store was stopped or is over. For one thread, whose current stream is the
        engine's.
        """
        if self._stopped or self._covers(place) or self.result.done():
            return
        point = self._mover.ready()
        with self._changed:
            self._marks.append((place, point))
            if place >= self._awaited:
                self._changed.notify_all()
        if place >= self._last:
            self._carry_out()

    def wait(self, place: int) -> Completion | None:
        """Until :meth:`saved` has covered the place; the point behind which it is written.

        Raises:
            Closed: the store was stopped before.
            TransferTimeout: the engine has not come so far in time.
        """
        with self._changed:
            self._awaited = place
            self._changed.wait_for(
                lambda: self._stopped or self._covers(place),
                max(0.0, self._give_up_at - time.monotonic()),
            )
            if self._covers(place):
                return self._marks[bisect_left(self._marks, place, key=lambda mark: mark[0])][1]
            if self._stopped:
                raise Closed(f"the store was stopped before layer {place} was saved")
        raise TransferTimeout(
            f"layer {place} of {self._last}: expected to be saved within {MARKS_TIMEOUT:g} s"
        )

    def stop(self) -> bool:
        nothing = super().stop()
        with self._changed:
            self._changed.notify_all()
        self._carry_out()
        return nothing

    def carry_out(self, run: Callable[[], None]) -> None:
        """The thread that submits is the one that saves layers: keep ``run`` for the last of them."""
        with self._lock:
            self._run = run
        if self._stopped:
            self._carry_out()

    def _carry_out(self) -> None:
        with self._lock:
            run, self._run = self._run, None
        if run is not None:
            run()

    def _covers(self, place: int) -> bool:
        return bool(self._marks) and self._marks[-1][0] >= place
