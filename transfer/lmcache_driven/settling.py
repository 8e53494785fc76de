"""Loads of which nobody knows whether a server goes on with them: find out, or wait for a while."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from lmcache_kernels.errors import KVTransferError
from lmcache_kernels.transfer.asking import ask
from lmcache_kernels.transfer.messages import MAX_TRANSFERS, Done, Settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.transfer.port import CachePort

    from .asked import Asked
    from .registration import ServedRegistration

logger = logging.getLogger(__name__)

TEARDOWN_SECONDS = 0.5
"""A process that was killed is gone before what it had queued on a GPU: so much later that is, too."""

_LOOK_AGAIN = 0.02  # seconds between looks at whether a lost server is there again


class Settling:
    """Ends loads when nothing writes into their blocks any more, in a thread of its own.

    Args:
        port, server, instance: of the worker.
        timeout: seconds after which a server that is not heard of counts as lost for good.
        gpu: whether what a killed server had queued may go on for a while.
        end: ends a load with an error.
    """

    def __init__(
        self,
        port: CachePort,
        server: ServedRegistration,
        instance: int,
        timeout: float,
        *,
        gpu: bool,
        end: Callable[[Asked, KVTransferError], None],
    ) -> None:
        self._port = port
        self._server = server
        self._instance = instance
        self._timeout = timeout
        self._teardown = TEARDOWN_SECONDS if gpu else 0.0
        self._end = end
        self._lock = threading.Lock()
        self._unsettled: list[tuple[Asked, KVTransferError]] = []
        self._thread = ThreadPoolExecutor(1, "lmcache-kernels-settle")

    def add(self, asked: Asked, error: KVTransferError) -> None:
        """End the load with ``error``, but not before it is over; never waits."""
        with self._lock:
            self._unsettled.append((asked, error))
        try:
            self._thread.submit(self._settle)
        except RuntimeError:  # closed
            self._end(asked, error)

    def close(self) -> None:
        """End what is added later at once."""
        self._thread.shutdown(wait=False)

    def _settle(self) -> None:
        with self._lock:
            left, self._unsettled = self._unsettled, []
        give_up_at = time.monotonic() + self._timeout
        pause = threading.Event()
        while left:
            ended = {one.incarnation for one, _ in left if self._server.has_ended(one.incarnation)}
            if ended:
                pause.wait(self._teardown)
            elif self._is_settled([one.number for one, _ in left], give_up_at):
                ended = {one.incarnation for one, _ in left}
            elif time.monotonic() >= give_up_at:
                logger.error(
                    "%d loads did not end in time, and the cache server that makes them is not "
                    "heard of: their blocks may still be written",
                    len(left),
                )
                ended = {one.incarnation for one, _ in left}
            else:
                pause.wait(_LOOK_AGAIN)
            for asked, error in left:
                if asked.incarnation in ended:
                    self._end(asked, error)
            left = [one for one in left if one[0].incarnation not in ended]

    def _is_settled(self, numbers: Sequence[int], give_up_at: float) -> bool:
        try:
            for start in range(0, len(numbers), MAX_TRANSFERS):
                some = list(numbers[start : start + MAX_TRANSFERS])
                message = Settle(instance=self._instance, transfers=some)
                ask(self._port, message, Done, max(0.0, give_up_at - time.monotonic()))
            return True
        except KVTransferError as lost:
            logger.debug("not settled: %s", lost)
            return False
