"""What systemd is told of a service of ``Type=notify``, if it has asked."""

from __future__ import annotations

import logging
import os
import socket
import time

logger = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"


def reloading() -> str:
    """To be followed by :data:`READY` when that is over."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def notify(state: str) -> None:
    """Tell the service manager that started this process, as in sd_notify(3). Never fails."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), f"\0{path[1:]}" if path[0] == "@" else path)
    except OSError as error:
        logger.warning("the service manager at %s was not told %r: %s", path, state, error)
