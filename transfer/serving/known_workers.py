"""Which workers are registered, for which chunks, and what becomes of what a lost one was doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES

from .expiring import Expiring
from .request_checks import RefusedError, check_instance

if TYPE_CHECKING:
    from .served_cache import ServedCache
    from .store import ChunkStore


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


class KnownWorkers:
    """The registrations by instance; they expire unless the worker is heard of.

    Args:
        store: where lost workers leave things.
        arena_bytes: for messages.
        ttl: seconds of silence after which a worker counts as dead.

    Raises:
        ConfigError: a time that is not above 0.
    """

    def __init__(self, store: ChunkStore, arena_bytes: int, ttl: float) -> None:
        self._store = store
        self._arena_bytes = arena_bytes
        self._known: Expiring[int, KnownWorker] = Expiring(ttl, "worker_ttl")

    def __len__(self) -> int:
        return len(self._known)

    @property
    def ttl(self) -> float:
        return self._known.ttl

    def add(self, instance: int, worker: KnownWorker, now: float) -> None:
        """Register, in place of what the instance had registered before.

        Raises:
            RefusedError: chunks that do not fit, or that others of the shard have in another size.
        """
        if not self._store.fits(worker.slot_bytes):
            raise RefusedError(
                "no_space",
                f"one chunk takes {worker.slot_bytes} bytes, the arena has "
                f"{self._arena_bytes}: make the arena larger",
            )
        for number, other in self._known.items():
            if (
                number != instance
                and other.shard == worker.shard
                and other.chunk_bytes != worker.chunk_bytes
            ):
                raise RefusedError(
                    "bad_request",
                    f"chunk_bytes: expected {other.chunk_bytes}, as worker {number} of the same "
                    f"shard has, got {worker.chunk_bytes}",
                )
        self.remove(instance)
        self._known.put(instance, worker, now)

    def remove(self, instance: int) -> KnownWorker | None:
        """Forget the worker and discard what it was doing; who it was."""
        worker = self._known.pop(instance)
        if worker is not None:
            self._drop(worker)
        return worker

    def expire(self, now: float) -> list[int]:
        """Remove those that were silent for too long."""
        silent = self._known.expire(now)
        for _, worker in silent:
            self._drop(worker)
        return [instance for instance, _ in silent]

    def seen(self, instance: int, now: float) -> KnownWorker | None:
        """The worker, which was just heard of; None if it is not registered."""
        worker = self._known.get(instance)
        if worker is not None:
            self._known.put(instance, worker, now)
        return worker

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

    def _drop(self, worker: KnownWorker) -> None:
        if worker.cache is None:
            self._store.drop_owner(worker.owner)
        else:
            worker.cache.retire()  # its slots are given back when no copy uses them
