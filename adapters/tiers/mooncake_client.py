"""The client of a Mooncake Store, made so that its calls end.

What it does (0.3.13), as measured, and what follows from it:

- A failed ``setup`` is tried 20 times, for 90 s, and holds the interpreter's lock meanwhile. So a
  connection is tried first, and the client made only if that works, in one attempt.
- A transfer from a machine that hangs ends after 60 s, and goes on writing into its place if the
  machine comes back after that. With timeouts set for the transport it ends within three times
  those, and writes nothing afterwards.
- A master that is away costs each call 4.5 s, or the timeout if it hangs, until the client's
  heartbeat has noticed. When the master is back the client finds it by itself and offers its memory
  again, within two seconds or so. What a master knew goes with it.
- A call after ``close`` is a crash; ``close`` takes 2 s, 9 s while the master is away, and holds the
  interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TRANSFER_BUFFER_BYTES = 1 << 20
"""Of the client's own; nothing goes through it when places are registered."""

_ENVIRONMENT = threading.Lock()


def connect(master: tuple[str, int], seconds: int, *, local_hostname: str, **setup: Any) -> Any:
    """A ``MooncakeDistributedStore`` that is set up.

    Args:
        master: host and port.
        seconds: for a request to the master, and for a standstill of a transfer.
        local_hostname: if empty, the address from which the master is reached.
        setup: more of its settings, as it names them.

    Raises:
        OSError: the master is not there, or the store cannot be set up.
        ImportError: the package is not there, or a library that it needs.
    """
    with socket.create_connection(master, seconds) as probe:
        local = local_hostname or probe.getsockname()[0]
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    with _environment(seconds):
        code = store.setup(
            {
                "local_hostname": local,
                "master_server_addr": "{}:{}".format(*master),
                "local_buffer_size": TRANSFER_BUFFER_BYTES,
                **setup,
            }
        )
    if code != 0:
        raise OSError(f"the store's client could not be set up, code {code}")
    return store


def address(memory: memoryview) -> int:
    """Where it begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@contextlib.contextmanager
def _environment(seconds: int) -> Iterator[None]:
    """What the client takes from the environment while it is set up; the operator's word goes first."""
    values = {
        "MC_STORE_CLIENT_SETUP_RETRIES": 1,
        "MC_RPC_TIMEOUT_MS": seconds * 1000,
        "MC_RPC_CONNECT_TIMEOUT_MS": seconds * 1000,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_ADMISSION_TIMEOUT_MS": seconds * 1000,
    }
    with _ENVIRONMENT:
        ours = {name: str(value) for name, value in values.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                del os.environ[name]
