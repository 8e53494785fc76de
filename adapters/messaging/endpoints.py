"""What an address is, and which a server may bind: without keys, those that only this machine can reach."""

from __future__ import annotations

import errno
import re
import socket
from typing import TYPE_CHECKING

import zmq

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.addresses import is_loopback

if TYPE_CHECKING:
    from .sockets import Socket

_TCP = re.compile(r"tcp://(?P<host>\[[^\[\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})")
_IPC = re.compile(r"ipc://(?P<path>[^*].*)")


def check_url(url: object) -> None:
    """Raise ConfigError unless it is one that a client can try to connect to."""
    if not isinstance(url, str) or not (_TCP.fullmatch(url) or _IPC.fullmatch(url)):
        raise ConfigError(f"url: expected tcp://HOST:PORT or ipc://PATH, got {url!r:.80}")


def bind(router: Socket, url: str, *, keyed: bool = False) -> str:
    """Bind ``router`` to ``url`` and return where it listens; port 0 takes any free one.

    Args:
        keyed: whoever connects must have a key, so others may reach it.

    Raises:
        ConfigError: an address that others could reach, or that cannot be bound.
    """
    tcp, ipc = _TCP.fullmatch(url), _IPC.fullmatch(url)
    if tcp is not None:
        host = tcp["host"] if keyed else _loopback(tcp["host"])
        target = f"tcp://{host}:{_port(tcp['port'])}"
    elif ipc is not None:
        target = url
        _check_unused(ipc["path"])
    else:
        raise ConfigError(f"address: expected tcp://HOST:PORT or ipc://PATH, got {url!r}")
    router.set(zmq.IPV6, "[" in target)
    try:
        router.bind(target)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(target) from error
        raise ConfigError(f"{target}: cannot be bound: {error}") from error
    return router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _loopback(host: str) -> str:
    if not is_loopback(host):
        raise ConfigError(
            f"host: expected a loopback address such as 127.0.0.1, got {host}: other machines must "
            "not reach the server without CURVE keys; see lmcache-kernels keys, --curve-secret-key "
            "and --curve-clients"
        )
    return "127.0.0.1" if host == "localhost" else host


def _port(text: str) -> int:
    port = int(text)
    if port > 65535:
        raise ConfigError(f"port: expected 0 to 65535, got {port}")
    return port


def _check_unused(path: str) -> None:
    """Binding takes a path away from a server that listens there; do not."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect("\0" + path[1:] if path.startswith("@") else path)
        except BlockingIOError:  # its backlog is full
            pass
        except OSError:
            return
    raise _in_use(f"ipc://{path}")


def _in_use(target: str) -> ConfigError:
    where = _TCP.fullmatch(target)
    if where is None:
        return ConfigError(f"{target} is in use: another server listens there; take another path")
    return ConfigError(
        f"port {where['port']} is in use on {where['host']}: is a cache server running already? "
        "Choose another with --port, or --port 0 for any free one"
    )
