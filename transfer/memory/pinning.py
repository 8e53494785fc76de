"""Page-lock host memory for a GPU's copy engines, beside what else goes on.

Copies through memory that is not registered yet, or cannot be, are correct all the same; but CUDA
then passes them through memory of its own, several times as slowly, while the calling thread waits.
"""

from __future__ import annotations

import logging
import resource
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 30
"""Registered at a time, in some 50 ms (21-28 GB/s beside an H200, driver 580, 30 November 2026): one
registration of 512 GiB and more fails on current drivers. A copy must not span two registrations
(CUDA calls it an invalid argument), see :meth:`PinnedRegion.cuts`."""

CLOSE_SECONDS = 5.0
"""What closing waits for the piece that is being registered."""

_CAPTURING = (900, 901)
"""cudaErrorStreamCaptureUnsupported and -Invalidated: somebody captures a graph, which ends."""

RETRY_SECONDS = 0.05


class HostRegistry(Protocol):
    """What CUDA does with host memory. Calls with a code return CUDA's: 0 when it worked."""

    def register(self, address: int, nbytes: int) -> int: ...

    def unregister(self, address: int) -> int:
        """Undo the registration that began at ``address``."""
        ...

    def forget_error(self) -> None:
        """CUDA keeps the error of a failed call for whoever asks next: a kernel launch, maybe."""
        ...

    def same_addresses(self) -> bool:
        """Whether kernels find registered memory at the host's address."""
        ...

    def device_address(self, address: int) -> int:
        """Where they find it, otherwise; 0 if nowhere."""
        ...


class PinnedRegion:
    """Host memory [address, address + nbytes), registered with CUDA piece by piece while this lives.

    A thread in the background does it, from the first piece on; pieces that somebody waits for come
    first. If CUDA refuses one, a warning says so, and those registered before are given back.

    Args:
        registry: None: CUDA's own.
        when_unused: calls what it is given once no copy uses the region, and before another may. By
            default nobody knows of any.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        registry: HostRegistry | None = None,
        *,
        when_unused: Callable[[Callable[[], None]], None] = lambda action: action(),
    ) -> None:
        if registry is None:
            from lmcache_kernels.transfer.moving.cuda_host import CudaHostMemory

            registry = CudaHostMemory()
        self._registry = registry
        self._when_unused = when_unused
        self._address = address
        self._nbytes = nbytes
        self._piece_bytes = PIECE_BYTES
        self._count = -(-nbytes // PIECE_BYTES)
        self._changed = threading.Condition()
        self._wanted: deque[int] = deque()  # numbers of pieces
        self._found_at: dict[
            int, int
        ] = {}  # by number of each registered piece, a kernel's address
        self._ours: list[int] = []  # addresses to unregister, in the order of their registration
        self._stopped = False
        self._over = False  # nothing will be registered any more
        self._stuck = False  # CUDA did not give a registration back
        self._then: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name="lmcache-kernels-pin", daemon=True).start()

    @property
    def pinned(self) -> bool:
        """Whether all of it is registered."""
        with self._changed:
            return len(self._found_at) == self._count

    def wait_for(self, address: int, nbytes: int, timeout: float) -> bool:
        """Whether this part is registered in full, after ``timeout`` seconds at most."""
        pieces = self._pieces(address, nbytes)
        with self._changed:
            if not self._over:
                self._wanted.extend(n for n in pieces if n not in self._found_at)
                self._changed.wait_for(lambda: self._over or self._have(pieces), timeout)
            return self._have(pieces)

    def cuts(self, address: int, nbytes: int) -> tuple[int, ...]:
        """Offsets inside [address, address + nbytes) where another registration begins, or will."""
        pieces = self._pieces(address, nbytes)
        return tuple(self._start(number) - address for number in pieces[1:])

    def region(self, address: int) -> int:
        """The number of the registration that the address lies in, or will."""
        return self._pieces(address, 1)[0]

    def device_address(self, address: int, nbytes: int) -> int | None:
        """Where kernels may read and write this part.

        None: nowhere, because it is not registered in full, or is in pieces that do not lie side
        by side for the device.
        """
        pieces = self._pieces(address, nbytes)
        with self._changed:
            found = [self._found_at.get(number, 0) for number in pieces]
        apart = any(
            found[0] + index * self._piece_bytes != base for index, base in enumerate(found)
        )
        if apart or not all(found):
            return None
        return found[0] + address - self._start(pieces[0])

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """Undo the registrations, last one first.

        Args:
            then: called when CUDA has nothing to do with the memory any more, so that it may go: now,
                or by the thread in the background if a registration takes long. Never if CUDA keeps
                one.
        """
        with self._changed:
            self._stopped = True
            self._then = then
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._over, CLOSE_SECONDS):
                logger.warning("CUDA still registers memory after %s s", CLOSE_SECONDS)
                return
        self._finish()

    def _finish(self) -> None:
        """By whoever comes second: the closing thread or the one in the background."""
        self._unregister()
        with self._changed:
            then, self._then = self._then, lambda: None
        if self._stuck:
            logger.warning("CUDA has kept registered memory; its mapping stays")
        else:
            then()

    # --- the background ---------------------------------------------------------------------------

    def _run(self) -> None:
        code = 0
        try:
            while code == 0 and (number := self._next()) is not None:
                code = self._register(number)
                if code in _CAPTURING:
                    code = 0
                    with self._changed:
                        self._changed.wait_for(lambda: self._stopped, RETRY_SECONDS)
        finally:
            with self._changed:
                done = len(self._ours)
                self._over = True
                self._changed.notify_all()
        if code:
            self._warn(code, done * self._piece_bytes)
            self._when_unused(self._unregister)
        elif self._stopped:  # also if closing has stopped waiting
            self._finish()

    def _next(self) -> int | None:
        with self._changed:
            if self._stopped:
                return None
            while self._wanted:
                number = self._wanted.popleft()
                if number not in self._found_at:
                    return number
            return next((n for n in range(self._count) if n not in self._found_at), None)

    def _register(self, number: int) -> int:
        start = self._start(number)
        size = min(self._piece_bytes, self._address + self._nbytes - start)
        code = self._registry.register(start, size)
        if code:
            self._registry.forget_error()
            # Also where CUDA says that the memory is registered: that may be memory that was at these
            # addresses before.
            return code
        same = self._registry.same_addresses()
        found_at = start if same else self._registry.device_address(start)
        with self._changed:
            self._found_at[number] = found_at
            self._ours.append(start)
            self._changed.notify_all()
        return 0

    def _unregister(self) -> None:
        with self._changed:
            self._found_at.clear()
            while self._ours:
                if self._registry.unregister(self._ours.pop()):
                    self._registry.forget_error()
                    self._stuck = True

    def _warn(self, code: int, done: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        logger.warning(
            "could not pin host memory: CUDA error %d after %d of %d MiB. Transfers stay correct but "
            "get slower. Needed are %d KiB of lockable memory, the limit (ulimit -l) is %s: raise it "
            "(docker: --ulimit memlock=-1), or use a smaller arena",
            code,
            done >> 20,
            self._nbytes >> 20,
            -(-self._nbytes // 1024),
            "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB",
        )

    # --- pieces -----------------------------------------------------------------------------------

    def _pieces(self, address: int, nbytes: int) -> range:
        """Numbers of the pieces that a range touches."""
        offset = address - self._address
        if offset < 0 or nbytes < 1 or offset + nbytes > self._nbytes:
            raise LayoutError(
                f"pinned region: expected a range inside its {self._nbytes} bytes, got {nbytes} at "
                f"{offset}"
            )
        return range(offset // self._piece_bytes, (offset + nbytes - 1) // self._piece_bytes + 1)

    def _start(self, number: int) -> int:
        return self._address + number * self._piece_bytes

    def _have(self, pieces: range) -> bool:
        return all(number in self._found_at for number in pieces)
