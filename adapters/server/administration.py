"""The HTTP side of a running server: metrics, its state, and changes for who has the token."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError

from .config import SETTINGS, key_of
from .sources import DEFAULT, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from lmcache_kernels.adapters.messaging.server import CacheServerLoop
    from lmcache_kernels.transfer.serving.service import CacheService

    from .config import ServerConfig
    from .control import Control
    from .sources import Effective

logger = logging.getLogger(__name__)

NO_PORT = -1
"""Means no HTTP."""

MAX_TOKEN_FILE = 4096
"""Bytes: what is longer is no token but some other file."""


def admin_token(config: ServerConfig) -> str | None:
    """The token in the file that the settings name; None if they name none.

    Raises:
        ConfigError: a file that cannot be read, or that everybody can; what is in it is no token; or
            there is none although other machines can reach the address.
    """
    token = _token(Path(config.admin_token_file)) if config.admin_token_file else None
    if config.http_port != NO_PORT:
        from lmcache_kernels.adapters.admin.access import Access

        Access(config.http_host, token)
    return token


def administration(
    effective: Effective,
    token: str | None,
    loop: CacheServerLoop,
    service: CacheService,
    control: Control,
) -> AbstractContextManager[object]:
    """The HTTP server that the settings want, to be closed with the context.

    Raises:
        ConfigError: an address that cannot be bound. Where the port is taken and nobody has set it, the
            log says so and there is no HTTP server.
    """
    config = effective.config
    if config.http_port == NO_PORT:
        return contextlib.nullcontext()
    from lmcache_kernels.adapters.admin.server import AdminServer

    try:
        http = AdminServer(
            config.http_host,
            config.http_port,
            token,
            loop=loop,
            service=service,
            phase=lambda: control.drain.phase.value,
            config=lambda: _settings(
                effective if control.reload is None else control.reload.running
            ),
            reload=control.reload,
        )
    except ConfigError as error:
        taken = getattr(error.__cause__, "errno", None) == errno.EADDRINUSE
        if not taken or effective.origin("http_port") != DEFAULT:
            raise
        logger.warning("no metrics and no administration over HTTP: %s", error)
        return contextlib.nullcontext()
    logger.info("metrics and administration at %s", http.endpoint)
    return http


def _token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_TOKEN_FILE + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-token-file: {path} cannot be read: {error}") from error
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f"--admin-token-file: everybody can read or change it; do chmod o= {path}"
        )
    if len(text) > MAX_TOKEN_FILE:
        raise ConfigError(f"--admin-token-file: expected a token, {path} is longer")
    return text.strip()


def _settings(effective: Effective) -> Mapping[str, Any]:
    """Each as a file would have it, and where it comes from."""
    return {
        key_of(name): {
            "value": shown(getattr(effective.config, name)),
            "origin": effective.origin(name),
        }
        for name in SETTINGS
    }
