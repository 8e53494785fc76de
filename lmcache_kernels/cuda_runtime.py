"""The CUDA runtime that torch has loaded, for what torch does not offer, or only at a price."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ROWS = _ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _SIZE, ctypes.c_int, _ADDRESS
_NON_BLOCKING = 1  # cudaStreamNonBlocking: the default stream does not wait for it, nor it for that
_LOWEST_PRIORITY = 0
_ANY_DIRECTION = 4  # cudaMemcpyDefault: the addresses say which

# What torch.cuda's own functions call, without their checks, which cost microseconds.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
"""The calling thread's."""

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
"""Of a device and the calling thread: its handle."""


@cache
def cuda_runtime() -> ctypes.CDLL:
    """The library, with the contexts that torch uses; its calls give up Python's lock."""
    return ctypes.CDLL(_library())


@dataclass(frozen=True)
class QueueCalls:
    """What queues work in streams; each call gives CUDA's code, 0 when it worked.

    Attributes:
        copy: to, from, bytes, direction, stream; :meth:`queue_copy` knows the direction.
        rows: to, its pitch, from, its pitch, bytes of a row, rows, direction, stream; likewise.
        record: event, stream.
        wait: stream, event, 0.
    """

    copy: Callable[[int, int, int, int, int], int]
    rows: Callable[[int, int, int, int, int, int, int, int], int]
    record: Callable[[int, int], int]
    wait: Callable[[int, int, int], int]

    def queue_copy(self, to: int, origin: int, nbytes: int, stream: int) -> int:
        """Between two addresses, of devices or of host memory."""
        return self.copy(to, origin, nbytes, _ANY_DIRECTION, stream)

    def queue_rows(
        self,
        to: int,
        to_apart: int,
        origin: int,
        origin_apart: int,
        nbytes: int,
        count: int,
        stream: int,
    ) -> int:
        """The same of ``count`` stretches of ``nbytes``, whose beginnings lie so far apart."""
        return self.rows(to, to_apart, origin, origin_apart, nbytes, count, _ANY_DIRECTION, stream)


@cache
def quick() -> QueueCalls:
    """Calls that keep Python's lock, for they take a microsecond or two.

    Giving the lock up and taking it again costs far more than that where other threads want it, as
    an engine's does. A copy costs the host 2.2 us and an event 0.5; torch's copy_, with the stream
    made current, 14 (host of an H200, torch 2.11, 30 November 2026).
    """
    return _calls(ctypes.PyDLL(_library()))


@cache
def patient() -> QueueCalls:
    """The same without the lock: for copies of memory that is not pinned, during which CUDA waits."""
    return _calls(cuda_runtime())


def _calls(library: ctypes.CDLL) -> QueueCalls:
    return QueueCalls(
        copy=_typed(library, "MemcpyAsync", _ADDRESS, _ADDRESS, _SIZE, ctypes.c_int, _ADDRESS),
        rows=_typed(library, "Memcpy2DAsync", *_ROWS),
        record=_typed(library, "EventRecord", _ADDRESS, _ADDRESS),
        wait=_typed(library, "StreamWaitEvent", _ADDRESS, _ADDRESS, ctypes.c_uint),
    )


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the lowest priority that nobody else has; the device must be the current one.

    torch has 32 streams a device and hands them out again and again, so one of its may be one of the
    engine's.

    Raises:
        TransferFailed: CUDA refuses.
    """
    handle = _ADDRESS()
    create = _typed(
        cuda_runtime(),
        "StreamCreateWithPriority",
        ctypes.POINTER(_ADDRESS),
        ctypes.c_uint,
        ctypes.c_int,
    )
    code = create(ctypes.byref(handle), _NON_BLOCKING, _LOWEST_PRIORITY)
    if code:
        forget_error()
        raise TransferFailed(f"no stream on {device}: CUDA error {code}")
    return torch.cuda.ExternalStream(handle.value, device)


def forget_error() -> None:
    """CUDA keeps the error of a failed call for whoever asks next: a kernel launch, maybe."""
    _typed(cuda_runtime(), "GetLastError")()


def _typed(library: ctypes.CDLL, name: str, *types: Any) -> Callable[..., int]:
    function: Callable[..., int] = getattr(library, ("hip" if torch.version.hip else "cuda") + name)
    function.argtypes = types  # type: ignore[attr-defined]
    return function


def _library() -> str:
    if torch.version.hip:
        return "libamdhip64.so"
    version = (torch.version.cuda or "").split(".")[0]
    return f"libcudart.so.{version}"
