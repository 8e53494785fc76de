"""The CUDA runtime that torch has loaded, for what torch does not offer, or only at a price."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ANY_DIRECTION = 4  # cudaMemcpyDefault: the addresses say which


@cache
def cuda_runtime() -> ctypes.CDLL:
    """The library, with the contexts that torch uses; its calls give up Python's lock."""
    return ctypes.CDLL(_library())


@dataclass(frozen=True)
class Quick:
    """Calls of a microsecond or two, which keep Python's lock; each gives CUDA's code.

    Giving the lock up and taking it again costs far more than that where other threads want it, as
    an engine's does. A copy costs the host 2.2 us and an event 0.5; torch's copy_, with the stream
    made current, 14 (host of an H200, torch 2.11, 30 November 2026).

    Attributes:
        copy: to, from, bytes, direction, stream; :meth:`queue_copy` knows the direction.
        record: event, stream.
        wait: stream, event, 0.
    """

    copy: Callable[[int, int, int, int, int], int]
    record: Callable[[int, int], int]
    wait: Callable[[int, int, int], int]

    def queue_copy(self, to: int, origin: int, nbytes: int, stream: int) -> int:
        """Between two addresses, of devices or of host memory."""
        return self.copy(to, origin, nbytes, _ANY_DIRECTION, stream)


@cache
def quick() -> Quick:
    """See :class:`Quick`."""
    library = ctypes.PyDLL(_library())
    prefix = "hip" if torch.version.hip else "cuda"
    copy = getattr(library, f"{prefix}MemcpyAsync")
    copy.argtypes = [_ADDRESS, _ADDRESS, _SIZE, ctypes.c_int, _ADDRESS]
    record = getattr(library, f"{prefix}EventRecord")
    record.argtypes = [_ADDRESS, _ADDRESS]
    wait = getattr(library, f"{prefix}StreamWaitEvent")
    wait.argtypes = [_ADDRESS, _ADDRESS, ctypes.c_uint]
    return Quick(copy, record, wait)


def _library() -> str:
    if torch.version.hip:
        return "libamdhip64.so"
    version = (torch.version.cuda or "").split(".")[0]
    return f"libcudart.so.{version}"
