"""The ceiling of every transfer between a GPU and host memory: plain copies between two pieces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from .streams import forked, new_stream, on, point_in
from .timing import Contender

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_kernels.transfer.moving.moves import Completion

CEILING = "link"
LINK_BYTES = 256 << 20
SLICE_BYTES = 16 << 20
"""Of copies both ways at once: 98.8 GB/s so, 95.5 in one piece each (H200, driver 580.159, 30 November
2026)."""


class PlainLink:
    """Plain copies between pinned memory and the device, ``nbytes`` each.

    A copy out of the device and one into it touch different memory.
    """

    def __init__(self, device: str, nbytes: int = LINK_BYTES) -> None:
        self.nbytes = nbytes
        self._out, self._into = (_pieces(device, nbytes) for _ in range(2))
        self._streams = [new_stream(device) for _ in range(2)]

    def contender(self, out: bool) -> Contender:
        """One copy of everything, out of the device or into it."""
        return Contender(CEILING, partial(self.copy, out, self.nbytes), self.nbytes)

    def both_ways(self) -> Contender:
        """Both at once."""
        return Contender(CEILING, self._copy_both_ways, 2 * self.nbytes)

    def copy(self, out: bool, nbytes: int) -> None:
        """Queue one copy of so many bytes, or several one after the other if that is more."""
        host, here = self._out if out else self._into
        to, origin = (host, here) if out else (here, host)
        for start in range(0, nbytes, self.nbytes):
            size = min(self.nbytes, nbytes - start)
            to[:size].copy_(origin[:size], non_blocking=True)

    def _copy_both_ways(self) -> None:
        with forked(self._streams):
            for pairs in zip(self._slices(True), self._slices(False), strict=True):
                for stream, (to, origin) in zip(self._streams, pairs, strict=True):
                    with on(stream):
                        to.copy_(origin, non_blocking=True)

    def queue(self, out: bool) -> Completion:
        """Queue everything one way, slice by slice, on a stream of its own."""
        stream = self._streams[0 if out else 1]
        with on(stream):
            for to, origin in self._slices(out):
                to.copy_(origin, non_blocking=True)
        return point_in(stream)

    def _slices(self, out: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where to and where from."""
        host, here = self._out if out else self._into
        to, origin = (host, here) if out else (here, host)
        return zip(to.split(SLICE_BYTES), origin.split(SLICE_BYTES), strict=True)


def _pieces(device: str, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes of the host and of the device."""
    here = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
    host.copy_(torch.randint_like(here, 256))
    return host, here
