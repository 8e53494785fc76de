"""A server's ``/status``, asked for over HTTP and checked before it is shown."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

import msgspec

from lmcache_kernels.errors import ConfigError, PeerGone

TIMEOUT = 3.0
"""Seconds for one answer."""

MAX_ANSWER = 16 << 20
"""Bytes; four thousand workers take about one million."""


class Lookups(msgspec.Struct, frozen=True):
    answered: int = 0
    tokens: int = 0
    hit_tokens: int = 0


class Tier(msgspec.Struct, frozen=True):
    tier: str
    hit_tokens: int = 0
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    chunks: int | None = None
    details: dict[str, float] = {}


class Transfers(msgspec.Struct, frozen=True):
    ok: int = 0
    chunks: int = 0
    bytes: int = 0
    failed: dict[str, int] = {}


class UnderWay(msgspec.Struct, frozen=True):
    leases: int = 0
    stores: int = 0
    loads: int = 0
    requests_waiting: int = 0


class Worker(msgspec.Struct, frozen=True):
    instance: int
    shard: str
    last_seen_seconds: float
    copies: str


class Operation(msgspec.Struct, frozen=True):
    outcomes: dict[str, int]
    seconds: float


class Slow(msgspec.Struct, frozen=True):
    operation: str
    outcome: str
    seconds: float
    chunks: int
    seconds_ago: float


class Loop(msgspec.Struct, frozen=True):
    busy_seconds: float = 0.0
    delay_seconds: float = 0.0


class Evicted(msgspec.Struct, frozen=True):
    chunks: int = 0
    bytes: int = 0


class Status(msgspec.Struct, frozen=True):
    """What is shown of :func:`~lmcache_kernels.adapters.admin.status.status_of`; the rest is ignored."""

    version: str
    incarnation: str
    phase: str
    uptime_seconds: float
    chunk_tokens: int
    lookups: Lookups
    tiers: list[Tier]
    stores: Transfers
    loads: Transfers
    evicted: Evicted
    under_way: UnderWay
    workers: list[Worker]
    requests: dict[str, Operation]
    slowest: list[Slow]
    loop: Loop

    def at_start(self) -> Status:
        """The same server when it had done nothing."""
        return msgspec.structs.replace(
            self,
            uptime_seconds=0.0,
            lookups=Lookups(),
            tiers=[Tier(tier.tier) for tier in self.tiers],
            stores=Transfers(),
            loads=Transfers(),
            evicted=Evicted(),
            requests={},
            loop=Loop(),
        )


class StatusPage:
    """Where a server tells its status.

    Args:
        url: of the server's HTTP side, such as ``http://127.0.0.1:8080``.
        token: that a server wants which others can reach.

    Raises:
        ConfigError: no such URL.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: expected http://HOST:PORT, got {url}")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            self._request = urllib.request.Request(f"{self.url}/status", headers=headers)
        except ValueError as error:
            raise ConfigError(f"--url: expected http://HOST:PORT, got {url}: {error}") from error
        # Not through a proxy, whatever the environment says: it is this machine, mostly.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self) -> Status:
        """Ask.

        Raises:
            PeerGone: nothing there, or nothing that answers as a server does.
        """
        try:
            with self._opener.open(self._request, timeout=TIMEOUT) as answer:
                body = answer.read(MAX_ANSWER)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(1000).decode(errors="replace")
            raise PeerGone(f"{self.url}: status {error.code}: {said}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise PeerGone(f"{self.url}: {reason or type(error).__name__}") from error
        try:
            return msgspec.json.decode(body, type=Status)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise PeerGone(f"{self.url}: no cache server's status: {error}") from error
