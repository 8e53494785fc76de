"""Every setting of a cache server, once: type, default, range, unit and what it does. Pure.

Flags, environment variables, keys of a file and the table in ``docs/server.md`` follow from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.serving.eviction import POLICIES, Eviction
from lmcache_kernels.transfer.serving.known_workers import SHORTEST_REAP, Liveness
from lmcache_kernels.transfer.serving.leases import LEASE_TTL
from lmcache_kernels.transfer.serving.quotas import Quotas
from lmcache_kernels.transfer.serving.tickets import READ_TTL, WRITE_TTL
from lmcache_kernels.transfer.tiering.policies import STORE_POLICIES

from .kinds import Choice, Kind, Number, Several, Text

_QUOTA = Number(0, 1_000_000)

SHORTEST_HOLD = 180.0
"""Seconds below which a slot could go to others while its worker, which waits up to two minutes for a
device, still uses it."""

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a setting besides its name.

    Attributes:
        default: its value where nobody says anything.
        kind: which values it takes.
        help: what it does, in a sentence or two.
        unit: of the number; empty for what has none.
        live: it can be changed while the server runs.
    """

    default: Any
    kind: Kind
    help: str
    unit: str = ""
    live: bool = False


def _setting(default: Any, kind: Kind, text: str, *, unit: str = "", live: bool = False) -> Any:
    """A field, as :func:`dataclasses.field` makes it."""
    return field(default=default, metadata={"is": Setting(default, kind, text, unit, live)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of one server, checked.

    Raises:
        ConfigError: a value that its setting does not take, or values that do not go together.
    """

    host: str = _setting(
        "127.0.0.1",
        Text("ADDRESS", may_be_empty=False),
        "Address to bind: without keys a loopback one.",
    )
    port: int = _setting(
        5555, Number(0, 65535, whole=True), "TCP port to bind; 0 takes any free one."
    )
    l1_size_gb: float = _setting(
        4.0,
        Number(0, 1_000_000, above=True),
        "Host memory for chunks (the first level), in /dev/shm; all of it is taken at start.",
        unit="GiB",
    )
    chunk_size: int = _setting(
        256,
        Number(1, 1 << 20, whole=True),
        "Length of one chunk; engines must agree.",
        unit="tokens",
    )
    eviction_policy: str = _setting(
        "lru",
        Choice(tuple(POLICIES)),
        "Which idle chunk goes first: lru (idle for longest) or s3fifo (those that nobody has found "
        "since they were stored, so that prompts seen once do not push out shared prefixes).",
    )
    eviction_trigger_watermark: float = _setting(
        1.0,
        Number(0, 1, above=True),
        "Used part of the memory at which some is freed ahead of need; 1: never.",
        live=True,
    )
    eviction_ratio: float = _setting(
        0.2, Number(0, 1, above=True), "Part of the memory that is freed then.", live=True
    )
    l2_tier: tuple[str, ...] = _setting(
        (),
        Several(Text("URL", may_be_empty=False)),
        "A tier below the memory, such as file:///var/cache/lmcache-kernels?size_gb=100; several are "
        "asked in this order. docs/tiers.md lists them.",
    )
    l2_store_policy: str = _setting(
        "all",
        Choice(STORE_POLICIES),
        "What goes down to tiers: every chunk that is stored, those that somebody has found, nothing.",
    )
    quota: tuple[str, ...] = _setting(
        (),
        Several(Text("TENANT=GB", may_be_empty=False)),
        "Memory in GiB that the chunks of a tenant (in vLLM a cache_salt) may use; *=GB is of every "
        "tenant without one of its own. Changed over HTTP, it is so until the next reload.",
        live=True,
    )
    l1_write_ttl_seconds: float = _setting(
        WRITE_TTL,
        Number(SHORTEST_HOLD),
        "How long a worker has to commit a store, after which what it wrote is discarded.",
        unit="seconds",
    )
    l1_read_ttl_seconds: float = _setting(
        READ_TTL,
        Number(SHORTEST_HOLD),
        "How long a worker has to end a load, after which its chunks may be evicted.",
        unit="seconds",
    )
    session_ttl_seconds: float = _setting(
        LEASE_TTL,
        Number(1),
        "How long the chunks that a lookup has found stay for its request, unless it ends before: "
        "longer than requests wait in an engine's queue.",
        unit="seconds",
    )
    worker_reap_timeout_seconds: float = _setting(
        120.0,
        Number(0),
        "Silence after which a worker that has pinged is dropped, and what it was writing "
        f"discarded: at least {SHORTEST_REAP:g}, or 0 for never.",
        unit="seconds",
        live=True,
    )
    worker_registration_grace_seconds: float = _setting(
        600.0,
        Number(0),
        "The same of a worker that has not pinged yet, because its engine is still warming up.",
        unit="seconds",
        live=True,
    )
    curve_secret_key: str = _setting(
        "", Text("FILE"), "The server's *.key_secret file: whoever connects needs a key, too."
    )
    curve_clients: str = _setting(
        "",
        Text("DIRECTORY"),
        "Where the *.key files of those are who may connect. A reload looks for them again; who is "
        "connected stays so.",
    )
    http_host: str = _setting(
        "127.0.0.1",
        Text("ADDRESS", may_be_empty=False),
        "Address for metrics and administration: without a token a loopback one.",
    )
    http_port: int = _setting(
        8080,
        Number(-1, 65535, whole=True),
        "TCP port for metrics and administration; 0 takes any free one, -1: none. Where the default is "
        "taken by somebody else the server goes on without.",
    )
    admin_token_file: str = _setting(
        "", Text("FILE"), "Holds the token that changes over HTTP need, 16 characters or more."
    )
    drain_timeout_seconds: float = _setting(
        20.0,
        Number(0),
        "How long a server that is told to end waits for what is under way; 0: not at all.",
        unit="seconds",
        live=True,
    )
    log_format: str = _setting(
        "text", Choice(LOG_FORMATS), "Lines for people, or a JSON object a line.", live=True
    )
    log_level: str = _setting("info", Choice(LOG_LEVELS), "The least that is logged.", live=True)

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            try:
                value = setting.kind.of_value(getattr(self, name))
            except ConfigError as error:
                raise ConfigError(f"{flag_of(name)}: {error}") from error
            object.__setattr__(self, name, value)  # 4 has become 4.0 where a fraction may be
        _ = self.liveness, self.quotas
        if self.l1_bytes < 1:
            raise ConfigError(f"--l1-size-gb: {self.l1_size_gb:g} GiB round down to no byte")
        if bool(self.curve_secret_key) != bool(self.curve_clients):
            raise ConfigError("--curve-secret-key and --curve-clients: expected both or neither")

    @property
    def l1_bytes(self) -> int:
        return int(self.l1_size_gb * (1 << 30))

    @property
    def eviction(self) -> Eviction:
        return Eviction(self.eviction_policy, self.eviction_trigger_watermark, self.eviction_ratio)

    @property
    def liveness(self) -> Liveness:
        return Liveness.of_options(
            self.worker_reap_timeout_seconds, self.worker_registration_grace_seconds
        )

    @property
    def quotas(self) -> Quotas:
        tenants: dict[str, int] = {}
        default = None
        for said in self.quota:
            tenant, equals, text = said.rpartition("=")
            if not equals:
                raise ConfigError(f"--quota: expected TENANT=GB, got {said[:80]!r}")
            try:
                nbytes = int(_QUOTA.of_text(text) * (1 << 30))
            except ConfigError as error:
                raise ConfigError(f"--quota {tenant[:80]}: {error}") from error
            if "=" in tenant or "," in tenant:
                raise ConfigError(f"--quota: expected one TENANT=GB each time, got {said[:80]!r}")
            if tenant == "*":
                default = nbytes
            else:
                tenants[tenant] = nbytes
        try:
            return Quotas(tenants, default)
        except ConfigError as error:
            raise ConfigError(f"--quota: {error}") from error


SETTINGS: dict[str, Setting] = {one.name: one.metadata["is"] for one in fields(ServerConfig)}
"""By the names of the fields, in their order."""


def flag_of(name: str) -> str:
    """The flag of a field: ``--l1-size-gb`` of ``l1_size_gb``."""
    return f"--{key_of(name)}"


def key_of(name: str) -> str:
    """What the field is called in a file: ``l1-size-gb`` of ``l1_size_gb``."""
    return name.replace("_", "-")
