"""A cache server as a child process that does not outlive its parent."""

from __future__ import annotations

import logging
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError, TransferTimeout
from lmcache_kernels.transfer.memory.arena import sweep_stale_segments

from .config import ServerConfig
from .flags import flags_of
from .sources import ENVIRONMENT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_READY = re.compile(
    r"lmcache-kernels: serving (?P<url>\S+) \(arena (?P<name>\S+), (?P<size>\d+) bytes, "
    r"chunk (?P<chunk>\d+) tokens\)\n"
)
_STOP_TIMEOUT = 10.0  # seconds from SIGTERM to SIGKILL, besides what it may drain
_LOG_TAIL = 4000  # bytes of the server's log that are quoted


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that runs: where it listens, its process, its arena."""

    url: str
    pid: int
    arena_name: str
    arena_bytes: int
    chunk_tokens: int


@contextmanager
def spawn_server(
    *,
    size_gb: float = 1.0,
    host: str = "127.0.0.1",
    port: int = 0,
    chunk_size: int = 256,
    startup_timeout: float = 60.0,
    **settings: Any,
) -> Iterator[ServerProcess]:
    """Run a server while the context lasts; then it ends at once, without waiting for anybody.

    It has no HTTP side unless ``http_port`` is set. The server holds one end of a pipe and stops by itself when this process has ended, however
    that happened. Nothing is taken from ``LMCACHE_KERNELS_SERVE_*`` in the environment.

    Args:
        size_gb, host, port, chunk_size: see :class:`~.config.ServerConfig`; port 0 takes any free one.
        startup_timeout: seconds until it must be ready.
        settings: others, by the names of their fields in :class:`~.config.ServerConfig`.

    Raises:
        ConfigError: a setting that cannot work, or it could not start, with what it said.
        TransferTimeout: it was not ready after ``startup_timeout`` seconds.
    """
    chosen = {"drain_timeout_seconds": 0.0, "http_port": -1, **settings}
    chosen |= {"host": host, "port": port, "l1_size_gb": size_gb, "chunk_size": chunk_size}
    config = ServerConfig(**chosen)
    command = [sys.executable, "-m", "lmcache_kernels.adapters.server", "--stop-on-eof"]
    command += flags_of(config, chosen)
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            yield _wait_ready(process, log, startup_timeout)
        finally:
            _end(process, log, _STOP_TIMEOUT + config.drain_timeout_seconds)


def _wait_ready(process: subprocess.Popen[bytes], log: IO[bytes], timeout: float) -> ServerProcess:
    assert process.stdout is not None
    said = b""
    give_up_at = time.monotonic() + timeout
    while not said.endswith(b"\n"):
        left = max(0.0, give_up_at - time.monotonic())
        if not select.select([process.stdout], [], [], left)[0]:
            raise TransferTimeout(
                f"cache server: not ready after {timeout:g} s. It said: {_tail(log)}"
            )
        more = os.read(process.stdout.fileno(), 4096)
        if not more:
            raise ConfigError(f"cache server: it did not start. It said: {_tail(log)}")
        said += more
    ready = _READY.fullmatch(said.decode(errors="replace"))
    if ready is None:
        raise ConfigError(f"cache server: expected its ready line, got {said[:200]!r}")
    return ServerProcess(
        ready["url"], process.pid, ready["name"], int(ready["size"]), int(ready["chunk"])
    )


def _end(process: subprocess.Popen[bytes], log: IO[bytes], timeout: float) -> None:
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        logger.warning("cache server %d did not stop in %g s; killed", process.pid, timeout)
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if process.returncode < 0:
        sweep_stale_segments()
    elif process.returncode > 0:
        logger.warning("cache server ended with %d: %s", process.returncode, _tail(log))


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _LOG_TAIL))
    return log.read().decode(errors="replace").strip() or "nothing"
