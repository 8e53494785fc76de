"""The server process: an arena, a service on it, a socket, until it is told to end."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from lmcache_kernels.adapters.messaging.server import CacheServerLoop
from lmcache_kernels.errors import ConfigError, KVTransferError
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.serving.service import CacheService

from . import systemd
from .administration import admin_token, administration
from .collector import young_collections_only
from .control import Control, server_keys
from .flags import parse
from .logs import ServerLog
from .signals import Signals, at_end_of_input
from .sources import Effective, Sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.transfer.tiering.tier import Tier

logger = logging.getLogger(__name__)

READY_LINE = "lmcache-kernels: serving {url} (arena {name}, {size} bytes, chunk {chunk} tokens)"
"""What is printed once the server accepts requests; parents read it."""

STARTUP_FAILED = 2
"""Exit status when the server could not start."""

NO_SOURCES = Sources()


def run(arguments: Sequence[str], program: str) -> None:
    """``lmcache-kernels serve``: returns when the server has ended as it was told to.

    Args:
        arguments: of the command line.
        program: for messages.

    Raises:
        SystemExit: with status 2 and the reason on standard error, if it cannot start.
    """
    try:
        line = parse(arguments, os.environ, program)
        effective = line.sources.read()
        if line.print_config:
            sys.stdout.write(effective.text())
        else:
            serve(effective, line.sources, stop_on_eof=line.stop_on_eof)
    except KVTransferError as error:
        sys.stderr.write(f"lmcache-kernels: {error}\n")
        raise SystemExit(STARTUP_FAILED) from error


def serve(
    effective: Effective, sources: Sources = NO_SOURCES, *, stop_on_eof: bool = False
) -> None:
    """Run a cache server in the main thread until it is told to end, then remove its arena.

    SIGTERM and SIGINT drain it, and end it at once when they come again. SIGHUP reads the file of
    settings again, and is like SIGTERM if there is none.

    Args:
        effective: the settings.
        sources: from which they are read again; from nothing, unless they name a file.
        stop_on_eof: also drain when standard input ends, so that the server does not outlive a parent
            that holds the other end.

    Raises:
        KVTransferError: it cannot start.
    """
    config = effective.config
    keys = server_keys(config)
    token = admin_token(config)
    host = f"[{config.host}]" if ":" in config.host else config.host
    incarnation = secrets.token_hex(16)
    tiers = _tiers(effective)
    # The port comes first: a server that is there already explains why there is no memory either.
    with (
        ServerLog(config.log_format, config.log_level) as log,
        CacheServerLoop(f"tcp://{host}:{config.port}", incarnation=incarnation, keys=keys) as loop,
        Signals(loop) as signals,
        young_collections_only(),
    ):
        arena = Arena.create(config.l1_bytes)
        try:
            service = CacheService(
                arena_name=arena.name,
                arena_bytes=arena.nbytes,
                chunk_tokens=config.chunk_size,
                incarnation=incarnation,
                write_ttl=config.l1_write_ttl_seconds,
                lease_ttl=config.session_ttl_seconds,
                read_ttl=config.l1_read_ttl_seconds,
                eviction=config.eviction,
                liveness=config.liveness,
                quotas=config.quotas,
                arena=arena,
                tiers=tiers,
                tier_store_policy=config.l2_store_policy,
                wake=loop.wake,
            )
            control = Control(loop, service, log, effective, sources, keys)
            signals.actions = {
                signal.SIGTERM: control.interrupt,
                signal.SIGINT: control.interrupt,
                signal.SIGHUP: control.hang_up,
            }
            if stop_on_eof:
                at_end_of_input(loop, control.end)
            ready = READY_LINE.format(
                url=loop.endpoint, name=arena.name, size=arena.nbytes, chunk=config.chunk_size
            )
            with closing(service), administration(effective, token, loop, service, control):
                sys.stdout.write(f"{ready}\n")
                sys.stdout.flush()
                systemd.notify(systemd.READY)
                loop.run(control.drain)
        finally:
            arena.close()
        stats = service.stats() | asdict(loop.counters)
        logger.info(
            "stopped; %s", ", ".join(f"{name} {count}" for name, count in stats.items() if count)
        )


def _tiers(effective: Effective) -> list[Tier]:
    """In their order; nothing of them is opened or reached yet.

    Raises:
        ConfigError: one that cannot be, with where it comes from.
    """
    urls = effective.config.l2_tier
    if not urls:
        return []
    from lmcache_kernels.adapters.tiers.opening import open_tier

    try:
        return [open_tier(url) for url in urls]
    except ConfigError as error:
        raise ConfigError(f"{effective.origin('l2_tier')}: {error}") from error
