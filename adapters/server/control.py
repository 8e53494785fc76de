"""What can be asked of a running server from outside: to end, and to read its settings again."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.serving.draining import Drain, Phase

from . import systemd
from .reload import Reload

if TYPE_CHECKING:
    from lmcache_kernels.adapters.messaging.curve import ServerKeys
    from lmcache_kernels.adapters.messaging.server import CacheServerLoop
    from lmcache_kernels.transfer.serving.service import CacheService

    from .config import ServerConfig
    from .logs import ServerLog
    from .sources import Effective, Sources


class Control:
    """For the server's thread, but for :attr:`reload`, which is for all others.

    Args:
        loop: which is to be stopped in the end; ``service``: which it serves; ``log``: of both.
        effective: the settings that count; ``keys``: of those who may connect.
        sources: from which the settings are read again.

    Attributes:
        drain: what the loop is to serve, in place of the service; its phase says whether it ends.
        reload: reads the settings again; None if there is no file of settings.
    """

    def __init__(
        self,
        loop: CacheServerLoop,
        service: CacheService,
        log: ServerLog,
        effective: Effective,
        sources: Sources,
        keys: ServerKeys | None,
    ) -> None:
        config = effective.config
        self.drain = Drain(service, config.drain_timeout_seconds, loop.stop)
        self.reload: Reload | None = None
        if sources.file is not None:
            again = partial(server_keys, config)
            self.reload = Reload(sources, effective, keys, again, loop.call, self._apply)
        self._loop = loop
        self._service = service
        self._log = log

    def end(self) -> None:
        """Let what is under way come to its end, and begin nothing new."""
        systemd.notify(systemd.STOPPING)
        self.drain.begin(time.monotonic())

    def interrupt(self) -> None:
        """The same; at once, if that was said before."""
        if self.drain.phase is Phase.SERVING:
            self.end()
        else:
            self.drain.stop()

    def hang_up(self) -> None:
        """Reload; without a file of settings, the terminal is gone and the server ends."""
        if self.reload is None:
            self.interrupt()
        else:
            self.reload.in_background()

    def _apply(self, config: ServerConfig, keys: ServerKeys | None) -> None:
        self._service.change(config.eviction, config.liveness, config.quotas)
        self.drain.timeout = config.drain_timeout_seconds
        self._log.change(config.log_format, config.log_level)
        if keys is not None:
            self._loop.admit(keys)


def server_keys(config: ServerConfig) -> ServerKeys | None:
    """The keys that the settings name, as their files are now; None if they name none.

    Raises:
        ConfigError: files that cannot be used.
    """
    if not config.curve_secret_key:
        return None
    from lmcache_kernels.adapters.messaging.curve import ServerKeys

    return ServerKeys.read(config.curve_secret_key, config.curve_clients)
