"""What one process tells another about its queued work: a few bytes, to be waited for.

A signal names the process it comes from and, on a GPU, an event of it. A process's name is a
one-byte segment of shared memory that it holds the lock of, so whoever waits finds out when it ends,
however it ends: a CUDA event of a dead process never happens. That is why no stream is made to wait
for another process's event; a host thread looks, and for a bounded time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmcache_kernels.errors import (
    ConfigError,
    PeerGone,
    RemoteProtocolError,
    TransferFailed,
    TransferTimeout,
)
from lmcache_kernels.transfer.memory.arena import (
    NAME_PATTERN,
    SHM_DIRECTORY,
    Arena,
    sweep_stale_segments,
)
from lmcache_kernels.transfer.moving.device import POLL_SECONDS
from lmcache_kernels.transfer.sharing.ipc_events import ExportedEvents, import_event

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

NAME_BYTES = 48
"""Of a process's name: "lmcache_kernels_" and 32 hexadecimal digits."""

EVENTS_KEPT = 256
"""The youngest events that peers can wait for. An older one, whose signal nobody has waited for in
255 transfers, is dropped, so that peers that never wait cost a bounded amount."""

PEER_TIMEOUT = 10.0
"""Seconds that one side waits for what the other side's GPU had queued, unless it says otherwise."""

ALIVE_SECONDS = 0.05
"""How often one who waits looks whether the other process still lives."""


class PeerSignals:
    """Makes the signals of one end of a connection. Safe for threads.

    Attributes:
        name: of this end: what :func:`check_alive` takes, NAME_BYTES long.
    """

    def __init__(self) -> None:
        self._life = Arena.create(1)
        self._events = ExportedEvents(EVENTS_KEPT)
        self.name = self._life.name.encode()

    def signal(self, event: torch.cuda.Event | None) -> bytes:
        """What a peer can wait for: ``event``, recorded and interprocess, or None if it is over."""
        return self.name + (b"" if event is None else self._events.export(event))

    def close(self) -> None:
        """This end is gone, for all who look; its signals mean nothing any more. Idempotent."""
        self._life.close()


def split_name(data: bytes, what: str) -> tuple[str, bytes]:
    """The name of the sender that ``data`` begins with, and the rest.

    Raises:
        RemoteProtocolError: it begins with something else.
    """
    name = data[:NAME_BYTES].decode("ascii", "replace")
    if not NAME_PATTERN.fullmatch(name):
        raise RemoteProtocolError(
            f"{what}: expected {NAME_BYTES} bytes like {NAME_PATTERN.pattern} first, "
            f"got {data[:NAME_BYTES]!r}"
        )
    return name, data[NAME_BYTES:]


def check_alive(name: str) -> None:
    """Raise PeerGone if the process of that name has ended, or closed that end."""
    try:
        sweep_stale_segments()
    except OSError as error:
        raise ConfigError(f"{SHM_DIRECTORY}: cannot be read: {error}") from error
    if not (SHM_DIRECTORY / name).exists():
        raise PeerGone(
            f"peer {name}: its process has ended, or closed its end, or has another {SHM_DIRECTORY}"
        )


def wait_for(signal: bytes, device: str, timeout: float) -> None:
    """Return when what the signal stands for has happened.

    Args:
        signal: from :meth:`PeerSignals.signal` of another process whose device is of the same kind.
        device: of this process.
        timeout: seconds.

    Raises:
        RemoteProtocolError: not a signal.
        PeerGone: the other process ended before, or closed its end.
        TransferTimeout: not in that time.
        TransferFailed: CUDA reports an error of earlier work.
    """
    name, handle = split_name(signal, "signal")
    if device == "cpu":
        if handle:
            raise RemoteProtocolError(
                f"signal: expected no event in host memory, got {len(handle)} bytes of one"
            )
        return
    event = import_event(handle, device)
    try:
        wait_until(event.query, name, timeout)
    except RuntimeError as error:
        raise TransferFailed(f"signal: CUDA failed before it came: {error}") from error


def wait_until(done: Callable[[], bool], name: str, timeout: float) -> None:
    """Return when ``done()``, as long as the process ``name`` lives; see :func:`wait_for`."""
    start = time.monotonic()
    look = start
    while not done():
        now = time.monotonic()
        if now >= look:
            check_alive(name)
            look = now + ALIVE_SECONDS
        if now - start > timeout:
            raise TransferTimeout(f"peer {name}: its work was not done within {timeout} s")
        time.sleep(POLL_SECONDS)
