"""Settings that change while the server runs: read again, compared, applied."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmcache_kernels.errors import KVTransferError, TransferTimeout

from . import systemd
from .config import SETTINGS, key_of
from .sources import Effective, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from lmcache_kernels.adapters.messaging.curve import ServerKeys

    from .config import ServerConfig
    from .sources import Sources

logger = logging.getLogger(__name__)

APPLY_TIMEOUT = 30.0
"""Seconds the server's thread has to take settings over; it needs microseconds."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload found; values as a file would have them.

    Attributes:
        changed: settings that have another value now: (before, now).
        waiting: those that count after a restart: (now, then).
        keys_new, keys_gone: keys of clients that may connect now, or may not any more.
    """

    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    waiting: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    keys_new: int = 0
    keys_gone: int = 0


class Reload:
    """Call it to read the settings again, from any thread but the server's own.

    Args:
        sources: from which the settings come.
        running: those that count now.
        keys: of those who may connect now; ``read_keys``: of those who are to.
        call: has something called in the server's thread.
        apply: called there, with settings of which only live ones can differ, and with the keys.

    Attributes:
        running: the settings that count, and where each comes from.
    """

    def __init__(
        self,
        sources: Sources,
        running: Effective,
        keys: ServerKeys | None,
        read_keys: Callable[[], ServerKeys | None],
        call: Callable[[Callable[[], None]], Future[None]],
        apply: Callable[[ServerConfig, ServerKeys | None], None],
    ) -> None:
        self.running = running
        self._sources = sources
        self._keys = keys
        self._read_keys = read_keys
        self._call = call
        self._apply = apply
        self._one_at_a_time = threading.Lock()

    def __call__(self) -> Reloaded:
        """Apply what can be applied while the server runs, and say what that was.

        Raises:
            KVTransferError: the settings or the keys cannot be read, and nothing is changed; or the
                server does not take them, because it ends or hangs.
        """
        with self._one_at_a_time:
            systemd.notify(systemd.reloading())
            try:
                done = self._reload()
            except KVTransferError as error:
                logger.error("not reloaded, nothing is changed: %s", error)
                raise
            finally:
                systemd.notify(systemd.READY)
        self._tell(done)
        return done

    def in_background(self) -> None:
        """The same in a thread of its own; the log says how it went."""

        def attempt() -> None:
            with suppress(KVTransferError):  # which has been logged
                self()

        threading.Thread(target=attempt, name="lmcache-kernels-reload", daemon=True).start()

    def _reload(self) -> Reloaded:
        found, keys = self._sources.read(), self._read_keys()
        before, after = self.running.config, found.config
        differ = [one for one in SETTINGS if getattr(before, one) != getattr(after, one)]
        live = [name for name in differ if SETTINGS[name].live]
        running = Effective(
            replace(before, **{name: getattr(after, name) for name in live}),
            {**self.running.origins, **{name: found.origin(name) for name in live}},
        )
        known = frozenset() if self._keys is None else self._keys.clients
        knows = frozenset() if keys is None else keys.clients

        def take_over() -> None:
            self._apply(running.config, keys)
            self.running, self._keys = running, keys

        applied = self._call(take_over)
        try:
            applied.result(APPLY_TIMEOUT)
        except FutureTimeout as error:
            applied.cancel()
            raise TransferTimeout(f"the server did nothing for {APPLY_TIMEOUT:g} s") from error
        changes = {
            name: (shown(getattr(before, name)), shown(getattr(after, name))) for name in differ
        }
        return Reloaded(
            changed={name: changes[name] for name in live},
            waiting={name: changes[name] for name in differ if name not in live},
            keys_new=len(knows - known),
            keys_gone=len(known - knows),
        )

    def _tell(self, done: Reloaded) -> None:
        for name, (before, now) in done.changed.items():
            logger.info("%s: %s -> %s (%s)", key_of(name), before, now, self.running.origin(name))
        if done.keys_new or done.keys_gone:
            logger.info("keys of clients: %d new, %d gone", done.keys_new, done.keys_gone)
        if done.waiting:
            logger.warning(
                "changed, but only after a restart: %s",
                ", ".join(
                    f"{key_of(it)}: {now} -> {then}" for it, (now, then) in done.waiting.items()
                ),
            )
        if done == Reloaded():
            logger.info("reloaded, nothing has changed")
