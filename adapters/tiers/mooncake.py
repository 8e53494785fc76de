"""Chunks in a Mooncake Store: memory that the machines of a cluster put together.

A value is the slot and its seal (:mod:`.sealing`). The store copies the slot straight from and into
the arena; seals lie in memory of their own. A reader whose chunk is removed, or whose owner is
started again at the same address, would else get other bytes and not know.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import mmap
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError, TierUnavailable

from .batches import batches, check_keys, check_shards, names_in_batches
from .mooncake_client import address, connect
from .sealing import SEAL_BYTES, is_sealed, seal
from .settings import PREFIX, number, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.tiering.tier import Place

    from .settings import TierUrl

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""In one batch; a single place may be longer. At 10 MB/s still well within the 60 s after which the
store's client gives up a batch without stopping it."""

MOST_NAMES = 1024
"""In one batch."""

MASTER_AWAY = frozenset({-900, -901})
"""RPC_FAIL and RPC_TIMEOUT, of the store's error codes; any other concerns one chunk."""


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """
    Attributes:
        metadata: where transfer engines find each other, as Mooncake names it.
        protocol: of the transfers.
        devices: RDMA devices, by name.
        segment_gb: 1e9 bytes of this machine's memory that the store may use.
        local_hostname: under which other machines reach this one; if empty, the address from which
            the master is reached.
        timeout_seconds: for each request to the master and each standstill of a transfer.
        prefix: of all keys.
    """

    metadata: str = text("P2PHANDSHAKE", r"[!-~]{1,300}")
    protocol: str = text("tcp", "tcp|rdma")
    devices: str = text("", r"[A-Za-z0-9_,.-]{0,300}")
    segment_gb: float = number(1.0, 0.0, 1e6)
    local_hostname: str = text("", r"[A-Za-z0-9_.:\[\]-]{0,255}")
    timeout_seconds: int = whole(2, 1, 10)
    prefix: str = text("lmk:", PREFIX)


class MooncakeTier:
    """Made by :meth:`from_url`."""

    name = "mooncake"

    def __init__(self, host: str, port: int, settings: MooncakeSettings) -> None:
        self._master = (host, port)
        self._settings = settings
        self._arena: tuple[int, int] | None = None  # address, bytes
        self._state = threading.Condition()
        self._connecting = threading.Lock()
        self._store: Any = None
        self._seals: list[memoryview] = []  # registered and not in use
        self._damaged = 0
        self._calls = 0
        self._closed = False

    @classmethod
    def from_url(cls, url: TierUrl) -> MooncakeTier:
        """``mooncake://master[:port]?...``.

        Raises:
            ConfigError: no host, a path, a user, a wrong option, or no package ``mooncake``.
        """
        settings = url.settings(MooncakeSettings)
        if not url.host or url.path not in ("", "/") or url.user or url.password:
            raise ConfigError("mooncake tier: expected mooncake://master-host:port?options")
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(
                f"tier {url}: expected the package mooncake; "
                "pip install 'lmcache-kernels[mooncake]'"
            )
        return cls(url.host, url.port or 50051, settings)

    # --- Tier -------------------------------------------------------------------------------------

    def attach(self, arena: memoryview) -> None:
        """Remembers it; it is registered with the store when that is reached."""
        self._arena = address(arena), len(arena)

    def exists(self, keys: Sequence[ChunkKey]) -> list[bool]:
        check_keys(keys)
        found: list[bool] = []
        with self._using() as store:
            for some in self._names(keys):
                found += [code == 1 for code in self._judged(store.batch_is_exist(some))]
        return found

    def get_into(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        return self._move(self._get, keys, places)

    def put_from(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        return self._move(self._put, keys, places)

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        check_keys(keys)
        with self._using() as store:
            for some in self._names(keys):
                # By force: who asked for a chunk a moment ago has a lease on it.
                self._judged(store.batch_remove(some, True))

    def clear(self, shards: Sequence[bytes]) -> None:
        """The master goes through all its keys, once for each shard."""
        check_shards(shards)
        with self._using() as store:
            for shard in [shard.hex() for shard in shards] or ["[0-9a-f]{64}"]:
                pattern = f"^{self._settings.prefix}{shard}[0-9a-f]{{64}}$"
                self._judged([min(store.remove_by_regex(pattern, True), 0)])

    def stats(self) -> dict[str, int]:
        """``damaged`` chunks since the start; of the rest the master knows."""
        return {"damaged": self._damaged}

    def close(self) -> None:
        """Waits for calls under way. One that does not end in time keeps the store's client open."""
        with self._state:
            self._closed = True
            over = self._state.wait_for(
                lambda: not self._calls, 10.0 * self._settings.timeout_seconds
            )
            store, self._store = self._store, None
            if not over:
                logger.warning("mooncake tier: a call does not end; its client stays open")
                _LEFT_OPEN.append(store)
                return
        if store is not None:
            store.close()

    # --- one batch --------------------------------------------------------------------------------

    def _move(
        self,
        move: Callable[[Any, Sequence[ChunkKey], Sequence[Place], memoryview], list[bool]],
        keys: Sequence[ChunkKey],
        places: Sequence[Place],
    ) -> list[bool]:
        """Batch by batch; what there is no time for counts as not done."""
        check_keys(keys, places)
        done: list[bool] = []
        until = time.monotonic() + self._settings.timeout_seconds
        with self._using() as store, self._sealing(store) as seals:
            for some in batches(places, MOST_BYTES, MOST_NAMES):
                if done and time.monotonic() > until:
                    return done + [False] * (len(keys) - len(done))
                part = slice(some.start, some.stop)
                done += move(store, keys[part], places[part], seals)
        return done

    def _get(
        self, store: Any, keys: Sequence[ChunkKey], places: Sequence[Place], seals: memoryview
    ) -> list[bool]:
        (names,) = self._names(keys)
        codes = self._judged(store.batch_get_into_multi_buffers(names, *_buffers(places, seals)))
        done, damaged = [], []
        for key, name, place, found, code in zip(
            keys, names, places, _cut(seals), codes, strict=False
        ):
            whole = code == len(place) + SEAL_BYTES
            if whole and not is_sealed(key, place, found):
                damaged.append(name)
                whole = False
            done.append(whole)
        if damaged:
            logger.warning("mooncake tier: %d damaged chunks, such as %s", len(damaged), damaged[0])
            self._damaged += len(damaged)
            self._judged(store.batch_remove(damaged, True))
        return done

    def _put(
        self, store: Any, keys: Sequence[ChunkKey], places: Sequence[Place], seals: memoryview
    ) -> list[bool]:
        (names,) = self._names(keys)
        done = [code == 1 for code in self._judged(store.batch_is_exist(names))]
        missing = [i for i, there in enumerate(done) if not there]
        absent = [places[i] for i in missing]
        for i, place, put in zip(missing, absent, _cut(seals), strict=False):
            put[:] = seal(keys[i], place)
        codes = store.batch_put_from_multi_buffers(
            [names[i] for i in missing], *_buffers(absent, seals)
        )
        for i, code in zip(missing, self._judged(codes), strict=True):
            done[i] = code == 0
        return done

    def _names(self, keys: Sequence[ChunkKey]) -> list[list[str]]:
        return names_in_batches(self._settings.prefix, keys, MOST_NAMES)

    def _judged(self, codes: list[int]) -> list[int]:
        if MASTER_AWAY.intersection(codes):
            raise self._away("the master does not answer")
        return codes

    @contextlib.contextmanager
    def _sealing(self, store: Any) -> Iterator[memoryview]:
        """Memory for the seals of one batch, which the store has registered."""
        with self._state:
            seals = self._seals.pop() if self._seals else None
        if seals is None:
            seals = memoryview(mmap.mmap(-1, MOST_NAMES * SEAL_BYTES))
            if (code := store.register_buffer(address(seals), len(seals))) != 0:
                raise self._away(f"memory could not be registered, code {code}")
        try:
            yield seals
        finally:
            with self._state:
                self._seals.append(seals)

    @contextlib.contextmanager
    def _using(self) -> Iterator[Any]:
        """The store's client, which is not closed meanwhile."""
        with self._state:
            if self._closed:
                raise self._away("closed")
            self._calls += 1
        try:
            store = self._connected()
            if store.health_check() != 0:
                raise self._away("the master does not answer the client's heartbeat")
            yield store
        finally:
            with self._state:
                self._calls -= 1
                self._state.notify_all()

    def _connected(self) -> Any:
        with self._connecting:
            if self._store is None:
                self._store = self._connect()
            return self._store

    def _connect(self) -> Any:
        if self._arena is None:
            raise self._away("no arena is attached")
        settings = self._settings
        try:
            store = connect(
                self._master,
                settings.timeout_seconds,
                local_hostname=settings.local_hostname,
                metadata_server=settings.metadata,
                global_segment_size=int(settings.segment_gb * 1e9),
                protocol=settings.protocol,
                rdma_devices=settings.devices,
            )
        except (OSError, ImportError) as error:  # ImportError: one of Debian's libraries is missing
            raise self._away(str(error)) from error
        if (code := store.register_buffer(*self._arena)) != 0:
            store.close()
            raise self._away(f"the arena could not be registered, code {code}")
        return store

    def _away(self, reason: str) -> TierUnavailable:
        host, port = self._master
        return TierUnavailable(f"tier mooncake://{host}:{port}: {reason}")


_LEFT_OPEN: list[Any] = []
"""Clients in which a call has not ended: they must outlive it."""


def _cut(seals: memoryview) -> Iterator[memoryview]:
    """One after the other."""
    return (seals[at : at + SEAL_BYTES] for at in range(0, len(seals), SEAL_BYTES))


def _buffers(places: Sequence[Place], seals: memoryview) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and lengths of what each value is put together from."""
    first = address(seals)
    addresses = [[address(place), first + i * SEAL_BYTES] for i, place in enumerate(places)]
    return addresses, [[len(place), SEAL_BYTES] for place in places]
