"""Chunks as values in a Valkey or Redis server or cluster, which servers share.

A value is the slot and its seal (:mod:`.sealing`); its key is a prefix and both ids in hex.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError, KVTransferError, TierUnavailable

from .batches import batches, check_keys, check_shards, names_in_batches
from .sealing import SEAL_BYTES, is_sealed, seal
from .settings import PREFIX, flag, number, text, whole
from .valkey_nodes import Nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.tiering.tier import Place

    from .settings import TierUrl

logger = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""Of values in one batch; a single one may be longer."""

MOST_NAMES = 1024
"""In one batch."""

_PATH = r"[^\s]*"
_MOVED = ("MOVED ", "ASK ", "TRYAGAIN ")
_OTHER_TYPE = "WRONGTYPE "


@dataclass(frozen=True, slots=True)
class ValkeySettings:
    """
    Attributes:
        prefix: of all keys.
        ttl_seconds: after which a chunk is forgotten; 0 for never.
        timeout_seconds: for each connection and each wait for the server. A call goes on with no
            further batch when it has taken as long.
        cluster: the server is a node of a cluster.
        tls_ca, tls_cert, tls_key: files, for ``valkeys://`` and ``rediss://``: who vouches for the
            server if not the machine's authorities, and who we are.
    """

    prefix: str = text("lmk:", PREFIX)
    ttl_seconds: int = whole(0, 0, 10**9)
    timeout_seconds: float = number(2.0, 0.01, 60.0)
    cluster: bool = flag(False)
    tls_ca: str = text("", _PATH)
    tls_cert: str = text("", _PATH)
    tls_key: str = text("", _PATH)


class ValkeyTier:
    """Made by :meth:`from_url`."""

    name = "valkey"

    def __init__(self, url: TierUrl, settings: ValkeySettings, nodes: Nodes) -> None:
        self._url = url
        self._settings = settings
        self._nodes = nodes
        self._lock = threading.Lock()
        self._damaged = 0
        self._closed = False

    @classmethod
    def from_url(cls, url: TierUrl) -> ValkeyTier:
        """``valkey://[user:password@]host[:port][/database]?...``, ``redis``; with TLS ``valkeys``,
        ``rediss``.

        Raises:
            ConfigError: no host, a wrong database or option, or no package ``valkey``.
        """
        settings = url.settings(ValkeySettings)
        if not url.host:
            raise ConfigError(f"tier {url.scheme}://: expected a host, got none")
        if not re.fullmatch("(/[0-9]{0,5})?", url.path):
            raise ConfigError(f"tier {url.scheme}://{url.host}: expected a number behind the slash")
        database = int(url.path[1:] or 0)
        tls = url.scheme in ("valkeys", "rediss")
        if settings.cluster and database:
            raise ConfigError(f"tier {url}: expected database 0 of a cluster, got {database}")
        if (settings.tls_ca or settings.tls_cert or settings.tls_key) and not tls:
            raise ConfigError(f"tier {url}: expected valkeys:// with tls_ca, tls_cert, tls_key")
        if bool(settings.tls_cert) != bool(settings.tls_key):
            raise ConfigError(f"tier {url}: expected tls_cert and tls_key together, got one")
        if importlib.util.find_spec("valkey") is None:
            raise ConfigError(
                f"tier {url}: expected the package valkey; pip install 'lmcache-kernels[tiers]'"
            )
        options: dict[str, Any] = {
            "db": database,
            "username": url.user or None,
            "password": url.password or None,
            "socket_timeout": settings.timeout_seconds,
            "socket_connect_timeout": settings.timeout_seconds,
        }
        if tls:
            options |= {
                "ssl": True,
                "ssl_check_hostname": True,
                "ssl_ca_certs": settings.tls_ca or None,
                "ssl_certfile": settings.tls_cert or None,
                "ssl_keyfile": settings.tls_key or None,
            }
        nodes = Nodes(url.host, url.port or 6379, options, cluster=settings.cluster)
        return cls(url, settings, nodes)

    # --- Tier -------------------------------------------------------------------------------------

    def attach(self, arena: memoryview) -> None:
        """Nothing to do: values are copied by the client."""

    def exists(self, keys: Sequence[ChunkKey]) -> list[bool]:
        check_keys(keys)
        return [
            reply == 1
            for names in self._names(keys)
            for reply in self._ask(names, lambda pipe, name, _: pipe.exists(name))
        ]

    def get_into(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        return self._move(self._get, keys, places)

    def put_from(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        return self._move(self._put, keys, places)

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        check_keys(keys)
        for names in self._names(keys):
            self._unlink(names)

    def clear(self, shards: Sequence[bytes]) -> None:
        """Goes through all keys of the database; the server stays usable meanwhile."""
        check_shards(shards)
        prefix = self._settings.prefix
        wanted = "|".join(shard.hex() for shard in shards) or "[0-9a-f]{64}"
        ours = re.compile(f"{prefix}({wanted})[0-9a-f]{{64}}".encode())
        match = f"{prefix}{shards[0].hex()}*" if len(shards) == 1 else f"{prefix}*"
        with self._reaching():
            for client in self._nodes.all():
                cursor = 0
                while True:
                    cursor, some = client.scan(cursor, match=match, count=MOST_NAMES)
                    names = [name.decode() for name in some if ours.fullmatch(name)]
                    for first in range(0, len(names), MOST_NAMES):
                        self._unlink(names[first : first + MOST_NAMES])
                    if not cursor:
                        break

    def stats(self) -> dict[str, int]:
        """``damaged`` values since the start."""
        return {"damaged": self._damaged}

    def close(self) -> None:
        self._closed = True
        self._nodes.close()

    # --- one batch --------------------------------------------------------------------------------

    def _move(
        self,
        move: Callable[[Sequence[ChunkKey], Sequence[Place]], list[bool]],
        keys: Sequence[ChunkKey],
        places: Sequence[Place],
    ) -> list[bool]:
        """Batch by batch; what there is no time for counts as not done."""
        check_keys(keys, places)
        done: list[bool] = []
        until = time.monotonic() + self._settings.timeout_seconds
        for some in batches(places, MOST_BYTES, MOST_NAMES):
            if done and time.monotonic() > until:
                return done + [False] * (len(keys) - len(done))
            done += move(keys[some.start : some.stop], places[some.start : some.stop])
        return done

    def _get(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        # One byte more than it should be: a value that is too long shows itself, however long it is.
        (names,), ends = self._names(keys), [len(place) + SEAL_BYTES for place in places]
        values = self._ask(names, lambda pipe, name, i: pipe.getrange(name, 0, ends[i]))
        damaged, done = [], []
        for key, name, place, value in zip(keys, names, places, values, strict=True):
            whole = isinstance(value, bytes) and len(value) == len(place) + SEAL_BYTES
            if whole:
                view = memoryview(value)
                whole = is_sealed(key, view[: len(place)], view[len(place) :])
                if whole:
                    place[:] = view[: len(place)]
                else:
                    damaged.append(name)
            done.append(whole)
        if damaged:
            logger.warning(
                "valkey tier: %d damaged chunks, such as %s, go", len(damaged), damaged[0]
            )
            with self._lock:
                self._damaged += len(damaged)
            self._unlink(damaged)
        return done

    def _put(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        (names,) = self._names(keys)
        lengths = self._ask(names, lambda pipe, name, _: pipe.strlen(name))
        done = [
            length == len(place) + SEAL_BYTES for length, place in zip(lengths, places, strict=True)
        ]
        missing = [i for i, there in enumerate(done) if not there]
        if missing:
            expiry = self._settings.ttl_seconds or None
            absent = [names[i] for i in missing]
            values = [_value(keys[i], places[i]) for i in missing]
            replies = self._ask(absent, lambda pipe, name, i: pipe.set(name, values[i], ex=expiry))
            for i, reply in zip(missing, replies, strict=True):
                done[i] = reply is True
        return done

    def _unlink(self, names: Sequence[str]) -> None:
        self._ask(names, lambda pipe, name, _: pipe.unlink(name))

    # --- connections ------------------------------------------------------------------------------

    def _names(self, keys: Sequence[ChunkKey]) -> list[list[str]]:
        return names_in_batches(self._settings.prefix, keys, MOST_NAMES)

    def _ask(self, names: Sequence[str], command: Callable[[Any, str, int], Any]) -> list[Any]:
        """The reply to the command for each name; None where the server refuses just this one.

        Args:
            command: gets a pipeline, a name and its position.
        """
        replies: list[Any] = [None] * len(names)
        with self._reaching():
            for client, positions in self._nodes.by_node(names):
                with client.pipeline(transaction=False) as pipe:
                    for position in positions:
                        command(pipe, names[position], position)
                    for position, reply in zip(
                        positions, pipe.execute(raise_on_error=False), strict=True
                    ):
                        replies[position] = self._judged(reply)
        return replies

    def _judged(self, reply: Any) -> Any:
        """A refusal of one chunk is None, any other error is raised."""
        from valkey.exceptions import OutOfMemoryError

        if not isinstance(reply, Exception):
            return reply
        if isinstance(reply, OutOfMemoryError) or str(reply).startswith(_OTHER_TYPE):
            return None
        if str(reply).startswith(_MOVED):
            self._nodes.moved()
            return None
        raise reply

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Whatever goes wrong inside means that the server cannot be used."""
        if self._closed:
            raise TierUnavailable(f"tier {self._url}: closed")
        try:
            yield
        except KVTransferError:
            raise
        except Exception as error:
            self._nodes.moved()
            # Without its cause: what the client's errors carry may hold values and passwords.
            what = f"{type(error).__name__}: {error}"[:300]
            raise TierUnavailable(f"tier {self._url}: {what}") from None


def _value(key: ChunkKey, slot: Place) -> memoryview:
    value = bytearray(len(slot) + SEAL_BYTES)
    value[: len(slot)] = slot
    value[len(slot) :] = seal(key, slot)
    return memoryview(value)
