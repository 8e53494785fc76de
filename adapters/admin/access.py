"""Who may ask what over HTTP. Pure.

Reads are open where only this machine can ask. Changes need the token everywhere, and so do reads that
come from elsewhere. On loopback a request must also name this machine as its host: a web page that lets
its own name point here cannot read what the browser gets.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

SHORTEST_TOKEN = 16
"""Characters; shorter ones can be guessed."""

OPEN = frozenset({"/health", "/ready"})
"""What everybody may read: one word, which a supervisor without a token needs."""

READS = frozenset({"GET", "HEAD"})

_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status, the reason, and headers of the answer."""

    status: int
    reason: str
    headers: Mapping[str, str] | None = None


class Access:
    """The rules for one address.

    Args:
        host: that is bound.
        token: None: nobody may change anything.

    Raises:
        ConfigError: an address that others can reach and no token, or a token that is too short or
            cannot be sent in a header.
    """

    def __init__(self, host: str, token: str | None) -> None:
        self._loopback = is_loopback(host)
        if token is None:
            if not self._loopback:
                raise ConfigError(
                    f"HTTP host: expected a loopback address such as 127.0.0.1, got {host}: other "
                    "machines must not reach it without a token; see --admin-token-file"
                )
        elif len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable()):
            raise ConfigError(
                f"admin token: expected at least {SHORTEST_TOKEN} printable ASCII characters, got "
                f"{len(token)}"
            )
        self._authorization = None if token is None else f"Bearer {token}".encode()

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why the request is not served; None if it may be.

        Args:
            headers: by lower-case name.
        """
        if self._loopback and not is_loopback(_host_of(headers.get("host", ""))):
            return Refusal(400, "host: expected this machine's loopback address or localhost")
        reads = method in READS
        if reads and (self._loopback or path in OPEN):
            return None
        if self._authorization is None:
            return Refusal(
                403, "changes are off: start the server with --admin-token-file to allow them"
            )
        given = headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, self._authorization):
            return Refusal(
                401,
                "expected the header Authorization: Bearer TOKEN with the server's token",
                {"www-authenticate": "Bearer"},
            )
        return None


def _host_of(header: str) -> str:
    """Without the port: ``localhost:8080`` is ``localhost``, ``[::1]:8080`` is ``[::1]``."""
    parts = _HOST.fullmatch(header)
    return "" if parts is None else parts["host"]
