"""Settings of the connector: the ``lmcache.mp.*`` keys of ``kv_connector_extra_config``. Pure but for key files."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.transfer_mode import transfer_mode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_kernels.adapters.messaging.curve import ClientKeys

logger = logging.getLogger(__name__)

PREFIX = "lmcache.mp."

_HOST = re.compile(r"(tcp://)?(\[[^\[\]\s]+\]|[^\[\]\s:/]+)")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What can be set, each field a key behind ``lmcache.mp.``.

    Attributes:
        host: where the server listens; a bare name or address, or with a scheme (``tcp://``).
        port: its port.
        chunk_size: tokens of one chunk; must equal the server's and be a multiple of every block
            size of the model.
        load_async: load between steps while other requests run, rather than inside the step.
        layerwise: stores begin while the step still computes, layer by layer; and with ``load_async``
            off, the step begins with the first layers while the others are still being loaded. vLLM
            then cannot replay a step as one CUDA graph. What the server copies goes whole.
        lookup_timeout: seconds until a lookup counts as a miss.
        request_timeout: seconds a single request of a transfer may take.
        connect_timeout: seconds the engine's start waits for the server before it goes on without.
        heartbeat_interval: seconds between pings.
        model_name: names the weights instead of their path and files; empty for the latter.
        mp_transfer_mode: ``engine_driven`` (also ``auto``): the engine's process copies chunks;
            ``lmcache_driven``: the server does. Empty: what ``LMCACHE_MP_TRANSFER_MODE`` says.
        max_programs: bound on the grid of the GPU kernels, which the model's kernels share the
            multiprocessors with; 0 for none. Without a bound they are over soonest, which was seen to
            disturb decoding least.
        curve_secret_key, curve_server_key: the engine's ``*.key_secret`` file and the server's
            ``*.key``, for a server that wants keys; both or neither.
    """

    host: str = "tcp://localhost"
    port: int = 5555
    chunk_size: int = 256
    load_async: bool = True
    layerwise: bool = False
    lookup_timeout: float = 2.0
    request_timeout: float = 2.0
    connect_timeout: float = 1.5
    heartbeat_interval: float = 10.0
    model_name: str = ""
    mp_transfer_mode: str = ""
    max_programs: int = 0
    curve_secret_key: str = ""
    curve_server_key: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{PREFIX}{field.name}: expected seconds > 0, got {value}")
        if not _HOST.fullmatch(self.host):
            raise ConfigError(
                f"{PREFIX}host: expected a name or an address ([...] around IPv6) without a port, "
                f"got {self.host!r}"
            )
        if not 0 < self.port < 65536:
            raise ConfigError(f"{PREFIX}port: expected 1 to 65535, got {self.port}")
        if self.max_programs < 0:
            raise ConfigError(f"{PREFIX}max_programs: expected >= 0, got {self.max_programs}")
        if bool(self.curve_secret_key) != bool(self.curve_server_key):
            raise ConfigError(
                f"{PREFIX}curve_secret_key and {PREFIX}curve_server_key: expected both or neither"
            )
        if self.chunk_size < 1:
            raise ConfigError(f"{PREFIX}chunk_size: expected >= 1 token, got {self.chunk_size}")
        try:
            transfer_mode(self.mp_transfer_mode or None)
        except ConfigError as error:
            raise ConfigError(f"{PREFIX}mp_transfer_mode: {error}") from error

    @property
    def loads_by_layer(self) -> bool:
        """Whether a step may begin before all it loads is there."""
        return self.stores_by_layer and not self.load_async

    @property
    def stores_by_layer(self) -> bool:
        """Whether stores begin before the step has computed all that they read."""
        return self.layerwise and self.transfer_mode == "engine_driven"

    @property
    def transfer_mode(self) -> str:
        """``engine_driven`` or ``lmcache_driven``."""
        return transfer_mode(self.mp_transfer_mode or None)

    @property
    def url(self) -> str:
        host = self.host if "://" in self.host else f"tcp://{self.host}"
        return f"{host}:{self.port}"

    def keys(self) -> ClientKeys | None:
        """Of a server that wants CURVE; None if none are set.

        Raises:
            ConfigError: files that cannot be read or are no keys.
        """
        if not self.curve_secret_key:
            return None
        from lmcache_kernels.adapters.messaging.curve import ClientKeys

        return ClientKeys.read(self.curve_secret_key, self.curve_server_key)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any] | None) -> ConnectorConfig:
        """Read the settings; absent keys and keys set to None take their default.

        Keys without the prefix belong to others and are ignored; an unknown key with it is a typo
        and gets a warning.

        Raises:
            ConfigError: a value that cannot be converted or cannot work, naming the key.
        """
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in (extra or {}).items():
            if not key.startswith(PREFIX) or value is None:
                continue
            name = key.removeprefix(PREFIX)
            if name not in known:
                logger.warning("unknown setting %s is ignored; known are %s", key, sorted(known))
                continue
            values[name] = _convert(key, value, known[name].default)
        config = cls(**values)
        for name, field in known.items():
            value = getattr(config, name)
            if value == field.default:
                logger.info("%s%s = %s", PREFIX, name, value)
            else:
                logger.info(
                    "%s%s = %s (overridden, default %s)", PREFIX, name, value, field.default
                )
        return config


def _convert(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        text = str(value).strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise ConfigError(f"{key}: expected one of {', '.join(_TRUE + _FALSE)}, got {value!r}")
    kind = type(default)
    wrong = ConfigError(f"{key}: expected {kind.__name__}, got {value!r}")
    if isinstance(value, bool):
        raise wrong
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong from error
    if kind is int and isinstance(value, float) and converted != value:
        raise wrong
    return converted
