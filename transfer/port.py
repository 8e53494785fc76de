"""The seam between whoever uses a cache and the cache itself: ask, get a future.

Two things implement it: :class:`~lmcache_kernels.transfer.embedded.EmbeddedCache` in this process
and :class:`~lmcache_kernels.adapters.messaging.client.CacheClient` over a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .messages import Reply, Request


class CachePort(Protocol):
    """Somewhere to send requests."""

    @property
    def incarnation(self) -> str | None:
        """Id of the server we are connected to; None while there is none.

        A changed id means that the server restarted and knows nothing about us.
        """
        ...

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens per chunk the server works with; None until it was reached once."""
        ...

    def request(self, message: Request, timeout: float) -> Future[Reply]:
        """Send ``message``; never blocks and never raises.

        The future finishes exactly once and within ``timeout`` seconds: with the reply type that
        ``REPLY_OF`` names, or with RemoteError, PeerGone, TransferTimeout, RemoteProtocolError or
        Closed. While no server is connected it fails at once with PeerGone.
        """
        ...

    def close(self) -> None:
        """Fail what is pending and release everything; bounded and idempotent."""
        ...
