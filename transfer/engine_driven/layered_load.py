"""A load whose first layers can be used while the others are still on their way."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.store_transfer import Transfer

if TYPE_CHECKING:
    from lmcache_kernels.transfer.moving.moves import Moved, Mover, Steps


class LayeredLoad(Transfer):
    """A submitted load by layers. ``result``: as of any load, once all layers are there.

    What a layer holds is known to be right only when the result is: every group of a chunk is checked as a whole. So an
    engine that used layers meanwhile must throw away what it made of them if the load has failed.
    """

    def __init__(self, mover: Mover) -> None:
        super().__init__()
        self._mover = mover
        self._steps: Steps = ()
        self._queued = threading.Event()  # or nothing will be queued any more
        self.result.add_done_callback(lambda _: self._queued.set())

    def queued(self, moved: Moved, *, last: bool) -> None:
        """The device has the moves, or some of them if not ``last``."""
        if last:
            self._steps = moved.layers
            self._queued.set()

    def wait_layer(self, place: int, timeout: float) -> bool:
        """Let what the caller queues on the device from now on come after the layer's arrival.

        The host waits until the device has the moves only, unless these come in several rounds: then
        until the load is over.

        Args:
            place: of the layer in the order of the load.
            timeout: seconds.

        Returns:
            False if it took too long: the layer is not there.
        """
        end = time.monotonic() + timeout
        if not self._queued.wait(timeout):
            return False
        steps = self._steps
        index = bisect_left(steps, place, key=lambda step: step[0])
        if index < len(steps):
            self._mover.join(steps[index][1])
            return True
        if not self.result.done():
            # Not among the layers of this load: nobody can say when it comes.
            return self._wait_over(max(0.0, end - time.monotonic()))
        return True

    def _wait_over(self, timeout: float) -> bool:
        over = threading.Event()
        self.result.add_done_callback(lambda _: over.set())
        return over.wait(timeout)
