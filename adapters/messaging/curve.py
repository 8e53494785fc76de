"""CURVE keys: who a server is, who may talk to it, and nobody in between who reads along.

Keys are files as pyzmq writes them: ``NAME.key``, which may be shown to everyone, and
``NAME.key_secret``, which holds both halves and nobody else may read.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from lmcache_kernels.errors import ConfigError

if TYPE_CHECKING:
    from .sockets import Context, Socket

SECRET_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"
_DOMAIN = "lmcache-kernels"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Attributes:
    public, secret: of the server.
    clients: public keys of those who may connect.
    """

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]

    @classmethod
    def read(cls, secret_key: str | Path, clients: str | Path) -> ServerKeys:
        """From the server's secret file and the directory of its clients' public ones, as they are now.

        Raises:
            ConfigError: a file that is not there, is no such key or can be read by others; or a
                directory without keys, which would let nobody in.
        """
        public, secret = _secret_of(Path(secret_key))
        where = Path(clients)
        if not where.is_dir():
            raise ConfigError(f"curve clients: expected a directory of public keys, got {where}")
        known = frozenset(_load(path)[0] for path in where.glob(f"*{PUBLIC_SUFFIX}"))
        if not known:
            raise ConfigError(
                f"curve clients: no file {where}/*{PUBLIC_SUFFIX}: nobody could connect"
            )
        return cls(public, secret, known)

    def guard(self, router: Socket, context: Context) -> ThreadAuthenticator:
        """Before the socket is bound; what this returns is to be stopped after the socket is closed."""
        gatekeeper = ThreadAuthenticator(context)
        gatekeeper.start()
        self.admit(gatekeeper)
        router.zap_domain = _DOMAIN.encode()
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else nobody is asked once the authenticator is gone
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = self.public, self.secret
        return gatekeeper

    def admit(self, gatekeeper: ThreadAuthenticator) -> None:
        """Have these clients let in, and no others, from now on; from any thread."""
        gatekeeper.configure_curve_callback(_DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client may connect; what the authenticator asks."""
        return domain == _DOMAIN and key in self.clients


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Attributes:
    public, secret: of the client.
    server: public key of the server; anyone else who listens at its address is not talked to.
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    @classmethod
    def read(cls, secret_key: str | Path, server_key: str | Path) -> ClientKeys:
        """From the client's secret file and the server's public one.

        Raises:
            ConfigError: a file that is not there, is no such key, or is a secret that others can read.
        """
        public, secret = _secret_of(Path(secret_key))
        return cls(public, secret, _load(Path(server_key))[0])

    def apply(self, socket: Socket) -> None:
        """Before the socket connects."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.server


def create_keys(directory: str | Path, name: str) -> tuple[Path, Path]:
    """A new pair; its public and its secret file, which only this user can read.

    Raises:
        ConfigError: there is such a pair already, or it cannot be written there.
    """
    where = Path(directory)
    public, secret = where / f"{name}{PUBLIC_SUFFIX}", where / f"{name}{SECRET_SUFFIX}"
    if os.sep in name or not name:
        raise ConfigError(f"key name: expected one that a file can have, got {name!r}")
    if public.exists() or secret.exists():
        raise ConfigError(f"{public}: is there already; keys are never overwritten")
    before = os.umask(0o077)
    try:
        where.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(where, name)
    except OSError as error:
        raise ConfigError(f"{where}: keys cannot be written there: {error}") from error
    finally:
        os.umask(before)
    public.chmod(0o644)
    return public, secret


def _secret_of(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path}: expected a secret key (*{SECRET_SUFFIX}), this is a public one")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path}: others can read this secret key; do chmod 600 {path}")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a CURVE key file: {error}") from error
    for half in (public, secret):
        if half is not None and len(half) != 40:  # Z85 of 32 bytes
            raise ConfigError(
                f"{path}: expected a CURVE key file, got a key of {len(half)} characters"
            )
    return public, secret
