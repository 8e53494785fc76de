"""Which workers are registered, for which chunks, and what becomes of what a lost one was doing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES

from .expiring import Expiring
from .request_checks import RefusedError, check_instance

if TYPE_CHECKING:
    from .served_cache import ServedCache
    from .store import ChunkStore


MAX_WORKERS = 1 << 12
"""More are refused: whoever sends registrations without end shall not fill the server's memory."""

SHORTEST_REAP = 30.0
"""Seconds below which a worker would be dropped for a ping or two that were late."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """How long a worker that is not heard of counts as alive, in seconds; both may be infinite.

    Attributes:
        reap_after: one that has pinged before, as engines do from when they run.
        grace: one that has not. Between its registration and its first ping an engine may compile and
            warm up for minutes.

    Raises:
        ConfigError: times that are not above 0, or a shorter grace.
    """

    reap_after: float = 120.0
    grace: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.reap_after <= self.grace:
            raise ConfigError(
                "liveness of workers: expected 0 < reap_after <= grace seconds, got "
                f"{self.reap_after} and {self.grace}"
            )

    @classmethod
    def of_options(cls, reap_timeout: float, grace: float) -> Liveness:
        """As a configuration has them.

        Args:
            reap_timeout: 0: workers are never dropped.

        Raises:
            ConfigError: numbers that are not finite, a timeout below 30, or a shorter grace.
        """
        if reap_timeout == 0:
            return cls(math.inf, math.inf)
        if not SHORTEST_REAP <= reap_timeout <= grace < math.inf:
            raise ConfigError(
                "worker-reap-timeout-seconds and worker-registration-grace-seconds: expected 0, or at "
                f"least {SHORTEST_REAP:g} seconds and a grace that is not shorter, got {reap_timeout:g} and "
                f"{grace:g}"
            )
        return cls(reap_timeout, grace)


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A registration.

    Attributes:
        shard: what it moves; ``chunk_bytes``: payload of one chunk.
        owner: under which the store knows what it is doing.
        cache: from and to which the server copies itself; None: the worker copies.
    """

    shard: bytes
    chunk_bytes: int
    owner: int
    cache: ServedCache | None = None

    @property
    def slot_bytes(self) -> int:
        return HEADER_BYTES + self.chunk_bytes


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What can be told of a worker: for how many seconds nothing was heard of it, whether it has
    ``pinged`` since it registered, and whether the server copies for it."""

    instance: int
    shard: bytes
    chunk_bytes: int
    silent_seconds: float
    pinged: bool
    server_copies: bool


class KnownWorkers:
    """The registrations by instance; they expire unless the worker is heard of.

    Args:
        store: where lost workers leave things.
        arena_bytes: for messages.
        liveness: when silent ones are dropped.
    """

    def __init__(self, store: ChunkStore, arena_bytes: int, liveness: Liveness) -> None:
        self._store = store
        self._arena_bytes = arena_bytes
        self._new: Expiring[int, KnownWorker] = Expiring(liveness.grace, "grace")
        self._of_shard: dict[bytes, dict[int, int]] = {}  # instances and the sizes of their chunks
        self._proven: Expiring[int, KnownWorker] = Expiring(liveness.reap_after, "reap_after")

    def __len__(self) -> int:
        return len(self._new) + len(self._proven)

    def change(self, liveness: Liveness) -> None:
        """Drop silent workers after these times from now on."""
        self._new.ttl, self._proven.ttl = liveness.grace, liveness.reap_after

    def add(self, instance: int, worker: KnownWorker, now: float) -> None:
        """Register, in place of what the instance had registered before.

        Raises:
            RefusedError: chunks that do not fit, or that others of the shard have in another size; or
                too many workers.
        """
        if len(self) >= MAX_WORKERS and self.seen(instance, now) is None:
            raise RefusedError("busy", f"{MAX_WORKERS} workers are registered already")
        if not self._store.fits(worker.slot_bytes):
            raise RefusedError(
                "no_space",
                f"one chunk takes {worker.slot_bytes} bytes, the arena has "
                f"{self._arena_bytes}: make the arena larger",
            )
        others = self._of_shard.get(worker.shard, {}).keys() - {instance}
        if others and (expected := self.chunk_bytes(worker.shard)) != worker.chunk_bytes:
            raise RefusedError(
                "bad_request",
                f"chunk_bytes: expected {expected}, as worker {min(others)} of the same shard has, "
                f"got {worker.chunk_bytes}",
            )
        self.remove(instance)
        self._of_shard.setdefault(worker.shard, {})[instance] = worker.chunk_bytes
        self._new.put(instance, worker, now)

    def chunk_bytes(self, shard: bytes) -> int | None:
        """Of the chunks of a shard; None if no worker is registered for it."""
        return next(iter(self._of_shard.get(shard, {}).values()), None)

    def remove(self, instance: int) -> KnownWorker | None:
        """Forget the worker and discard what it was doing; who it was."""
        worker = self._new.pop(instance) or self._proven.pop(instance)
        if worker is not None:
            self._drop(instance, worker)
        return worker

    def expire(self, now: float) -> list[tuple[int, float]]:
        """Remove those that were silent for too long; who, and for how many seconds."""
        dropped = []
        for table in (self._new, self._proven):
            for instance, worker in table.expire(now):
                self._drop(instance, worker)
                dropped.append((instance, table.ttl))
        return dropped

    def pinged(self, instance: int, now: float) -> bool:
        """The worker said that it is alive; whether it is registered."""
        worker = self._new.pop(instance) or self._proven.get(instance)
        if worker is not None:
            self._proven.put(instance, worker, now)
        return worker is not None

    def states(self, now: float) -> list[WorkerState]:
        """Of all of them, by instance."""
        states = [
            WorkerState(
                instance, worker.shard, worker.chunk_bytes, silent, pinged, worker.cache is not None
            )
            for table, pinged in ((self._proven, True), (self._new, False))
            for instance, worker, silent in table.ages(now)
        ]
        return sorted(states, key=lambda state: state.instance)

    def seen(self, instance: int, now: float) -> KnownWorker | None:
        """The worker, which was just heard of; None if it is not registered."""
        for table in (self._proven, self._new):
            worker = table.get(instance)
            if worker is not None:
                table.put(instance, worker, now)
                return worker
        return None

    def known(self, instance: int, now: float) -> KnownWorker:
        """:meth:`seen`, of a worker that must be registered.

        Raises:
            RefusedError: it is not.
        """
        check_instance(instance)
        worker = self.seen(instance, now)
        if worker is None:
            raise RefusedError(
                "unknown_instance", f"worker {instance} is not registered: register again"
            )
        return worker

    def _drop(self, instance: int, worker: KnownWorker) -> None:
        others = self._of_shard[worker.shard]
        del others[instance]
        if not others:
            del self._of_shard[worker.shard]
        if worker.cache is None:
            self._store.drop_owner(worker.owner)
        else:
            worker.cache.retire()  # its slots are given back when no copy uses them
