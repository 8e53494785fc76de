"""The HTTP side of a running server: metrics, its state, and changes for who has the token."""

from __future__ import annotations

import contextlib
import logging
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

    from .control import Control
    from .sources import Effective

logger = logging.getLogger(__name__)

NO_PORT = -1
"""Means no HTTP."""

MAX_TOKEN_FILE = 4096
"""Bytes: what is longer is no token but some other file."""


def administration(
    effective: Effective, loop: CacheServerLoop, service: CacheService, control: Control
) -> AbstractContextManager[object]:
    """The HTTP server that the settings want, to be closed with the context.

    Raises:
        ConfigError: an address that cannot be used, or a token that is none. Where nobody has set the
            port and it is taken, the log says so and there is none.
    """
    config = effective.config
    if config.http_port == NO_PORT:
        return contextlib.nullcontext()
    token = _token(config.admin_token_file)
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
        if any(effective.origin(name) != DEFAULT for name in ("http_host", "http_port")):
            raise
        logger.warning("no metrics and no administration over HTTP: %s", error)
        return contextlib.nullcontext()
    logger.info("metrics and administration at %s", http.endpoint)
    return http


def _token(file: str) -> str | None:
    if not file:
        return None
    try:
        with Path(file).open("rb") as opened:
            text = opened.read(MAX_TOKEN_FILE + 1)
        if len(text) > MAX_TOKEN_FILE:
            raise ConfigError(f"--admin-token-file: expected a token, {file} is longer")
        return text.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-token-file: {file} cannot be read: {error}") from error


def _settings(effective: Effective) -> Mapping[str, Any]:
    """Each as a file would have it, and where it comes from."""
    return {
        key_of(name): {
            "value": shown(getattr(effective.config, name)),
            "origin": effective.origin(name),
        }
        for name in SETTINGS
    }
