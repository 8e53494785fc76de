"""Page-lock host memory for a GPU's copy engines, or say once why that did not work."""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 30
"""Registered at a time: one registration of 512 GiB and more fails on current drivers. A copy must
not span two registrations (CUDA calls it an invalid argument), see :meth:`PinnedRegion.cuts`."""

_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class PinnedRegion:
    """Host memory [address, address + nbytes), registered with CUDA while this lives.

    ``pinned`` tells whether it worked. When it did not, copies still are correct but no longer
    asynchronous, and one warning has said so.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        import torch

        self._runtime = torch.cuda.cudart()
        self._address = address
        self._pieces: list[int] = []
        self.pinned = True
        for start, size in _pieces(address, nbytes):
            code = int(self._runtime.cudaHostRegister(start, size, 0))
            if code:
                _forget_cuda_error()
            if code not in (0, _ALREADY_REGISTERED):
                self.close()
                self.pinned = False
                logger.warning(
                    "could not pin %.1f GiB of host memory (CUDA error %d after %.1f GiB); "
                    "transfers will be slower. Raise the memlock limit (ulimit -l) or use a "
                    "smaller arena.",
                    nbytes / 2**30,
                    code,
                    (start - address) / 2**30,
                )
                return
            if code == 0:
                self._pieces.append(start)

    def cuts(self, address: int, nbytes: int) -> tuple[int, ...]:
        """Offsets inside [address, address + nbytes) where another registration begins."""
        if not self.pinned:
            return ()
        first = PIECE_BYTES - (address - self._address) % PIECE_BYTES
        return tuple(range(first, nbytes, PIECE_BYTES))

    def close(self) -> None:
        """Undo the registration, last piece first."""
        while self._pieces:
            self._runtime.cudaHostUnregister(self._pieces.pop())


def _forget_cuda_error() -> None:
    """CUDA keeps the error of a failed call for whoever asks next, which would be a kernel launch."""
    import torch

    version = (torch.version.cuda or "").split(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{version}")  # the one torch has loaded
    runtime.cudaGetLastError()


def _pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, nbytes, PIECE_BYTES):
        yield address + offset, min(PIECE_BYTES, nbytes - offset)
