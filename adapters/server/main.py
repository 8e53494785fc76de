"""The server process: an arena, a service on it, a socket, until a signal ends it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.errors import ConfigError, KVTransferError
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.serving.eviction import Eviction
from lmcache_kernels.transfer.serving.known_workers import Liveness
from lmcache_kernels.transfer.serving.service import CacheService

from .collector import young_collections_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmcache_kernels.adapters.messaging.curve import ServerKeys

logger = logging.getLogger(__name__)

READY_LINE = "lmcache-kernels: serving {url} (arena {name}, {size} bytes, chunk {chunk} tokens)"
"""What is printed once the server accepts requests; parents read it."""

STARTUP_FAILED = 2
"""Exit status when the server could not start."""


def serve(
    *,
    size_gb: float,
    host: str = "127.0.0.1",
    port: int = 5555,
    chunk_size: int = 256,
    eviction_policy: str = "lru",
    eviction_watermark: float = 1.0,
    eviction_ratio: float = 0.2,
    worker_reap_timeout: float = 120.0,
    worker_registration_grace: float = 600.0,
    curve_secret_key: str = "",
    curve_clients: str = "",
    stop_on_eof: bool = False,
) -> None:
    """Run a cache server in the main thread until SIGTERM, SIGINT or SIGHUP, then remove its arena.

    Args:
        size_gb: host memory for chunks, in GiB of /dev/shm.
        host: loopback address, or ``localhost`` for 127.0.0.1; with keys any address.
        port: TCP port; 0 takes any free one.
        chunk_size: tokens of one chunk.
        eviction_policy, eviction_watermark, eviction_ratio: see
            :class:`~lmcache_kernels.transfer.serving.eviction.Eviction`.
        worker_reap_timeout, worker_registration_grace: seconds, see
            :meth:`~lmcache_kernels.transfer.serving.known_workers.Liveness.of_options`.
        curve_secret_key, curve_clients: see
            :meth:`~lmcache_kernels.adapters.messaging.curve.ServerKeys.read`; both or neither.
        stop_on_eof: also stop when standard input ends, so that the server does not outlive a
            parent that holds the other end.

    Raises:
        SystemExit: with status 2 and the reason on standard error, if it cannot start.
    """
    try:
        eviction = Eviction(eviction_policy, eviction_watermark, eviction_ratio)
        liveness = Liveness.of_options(worker_reap_timeout, worker_registration_grace)
        keys = _server_keys(curve_secret_key, curve_clients)
        _serve(size_gb, host, port, chunk_size, eviction, liveness, keys, stop_on_eof)
    except KVTransferError as error:
        sys.stderr.write(f"lmcache-kernels: {error}\n")
        raise SystemExit(STARTUP_FAILED) from error


def _serve(
    size_gb: float,
    host: str,
    port: int,
    chunk_size: int,
    eviction: Eviction,
    liveness: Liveness,
    keys: ServerKeys | None,
    stop_on_eof: bool,
) -> None:
    if not 0 < size_gb < math.inf:
        raise ConfigError(f"--l1-size-gb: expected a number above 0, got {size_gb}")
    if chunk_size < 1:
        raise ConfigError(f"--chunk-size: expected at least 1 token, got {chunk_size}")
    where = f"[{host}]" if ":" in host else host
    incarnation = secrets.token_hex(16)
    # The port comes first: a server that is there already explains why there is no memory either.
    with (
        CacheServerLoop(f"tcp://{where}:{port}", incarnation=incarnation, keys=keys) as loop,
        _stopped_by_signals(loop.stop),
        young_collections_only(),
    ):
        if stop_on_eof:
            threading.Thread(target=_wait_for_eof, args=(loop.stop,), daemon=True).start()
        arena = Arena.create(int(size_gb * (1 << 30)))
        try:
            service = CacheService(
                arena_name=arena.name,
                arena_bytes=arena.nbytes,
                chunk_tokens=chunk_size,
                incarnation=incarnation,
                eviction=eviction,
                liveness=liveness,
                arena=arena,
                wake=loop.wake,
            )
            ready = READY_LINE.format(
                url=loop.endpoint, name=arena.name, size=arena.nbytes, chunk=chunk_size
            )
            sys.stdout.write(f"{ready}\n")
            sys.stdout.flush()
            loop.run(service)
            service.close()
        finally:
            arena.close()
        stats = service.stats() | asdict(loop.counters)
        logger.info(
            "stopped; %s", ", ".join(f"{name} {count}" for name, count in stats.items() if count)
        )


def _server_keys(secret_key: str, clients: str) -> ServerKeys | None:
    if not secret_key and not clients:
        return None
    if not (secret_key and clients):
        raise ConfigError("--curve-secret-key and --curve-clients: expected both or neither")
    from lmcache_kernels.adapters.messaging.curve import ServerKeys

    return ServerKeys.read(secret_key, clients)


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_eof(stop: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # not open at all: the same as ended
        while os.read(0, 4096):
            pass
    stop()
