"""CUDA events across processes: one records, the other lets a stream wait for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from lmcache_kernels.errors import LocalProtocolError, PeerGone, RemoteProtocolError

from .descriptors import CUDA_HANDLE_BYTES

if TYPE_CHECKING:
    import torch

EVENTS_KEPT = 2048
"""Exported events that wait for their acknowledgement. An engine has a transfer or two for each
running request in flight, hundreds; an event that 2048 younger ones followed belongs to a request
whose peer has died or given up, and dropping it keeps this process from growing for ever."""


class IpcEvent(Protocol):
    """What is used of ``torch.cuda.Event(interprocess=True)``."""

    def ipc_handle(self) -> bytes: ...


# Not the events themselves: torch 2.11 frees an event without clearing references to it of this kind.
_exporters: WeakSet[ExportedEvents] = WeakSet()
_exporters_lock = threading.Lock()


class ExportedEvents:
    """Keeps events alive for the peers that were sent their handles. Safe for threads.

    A handle only works while the event exists. So an exported event stays until the peer says that
    it no longer needs it, or until ``limit`` younger ones were exported.
    """

    def __init__(self, limit: int = EVENTS_KEPT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: dict[bytes, tuple[IpcEvent, int]] = {}  # oldest export first
        with _exporters_lock:
            _exporters.add(self)

    def export(self, event: IpcEvent) -> bytes:
        """The event's handle, for :func:`import_event`; acknowledge each export once.

        Raises:
            LocalProtocolError: an event that was not made with ``interprocess=True``.
        """
        try:
            handle = event.ipc_handle()
        except RuntimeError as error:
            raise LocalProtocolError(f"event: cannot be exported: {error}") from error
        with self._lock:
            _, count = self._kept.pop(handle, (event, 0))
            self._kept[handle] = (event, count + 1)
            while len(self._kept) > self._limit:
                del self._kept[next(iter(self._kept))]
        return handle

    def acknowledge(self, handle: bytes) -> None:
        """The peer is done with one export of the event; unknown handles are fine."""
        with self._lock:
            event, count = self._kept.get(handle, (None, 0))
            if event is not None and count > 1:
                self._kept[handle] = (event, count - 1)
            else:
                self._kept.pop(handle, None)

    def find(self, handle: bytes) -> IpcEvent | None:
        """The event that is kept for a handle."""
        with self._lock:
            return self._kept.get(handle, (None, 0))[0]

    def __len__(self) -> int:
        """Events that are kept."""
        return len(self._kept)


def import_event(handle: bytes, device: str) -> torch.cuda.Event:
    """The event behind a handle, to wait for on streams of ``device`` (``"cuda:0"``).

    Raises:
        RemoteProtocolError: not a handle.
        PeerGone: its owner has ended or dropped the event.
    """
    import torch

    if len(handle) != CUDA_HANDLE_BYTES:
        raise RemoteProtocolError(
            f"event handle: expected {CUDA_HANDLE_BYTES} bytes, got {len(handle)}"
        )
    with _exporters_lock:
        exporters = list(_exporters)
    for exporter in exporters:  # the driver does not open what this process exported
        own = exporter.find(handle)
        if isinstance(own, torch.cuda.Event):
            return own
    try:
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(torch.device(device), handle)
    except RuntimeError as error:
        raise PeerGone(f"event cannot be opened; has its owner ended? ({error})") from error
    return event
