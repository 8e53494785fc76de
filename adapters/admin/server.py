"""The HTTP server: a thread with an event loop of its own beside the server's thread."""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmcache_kernels.errors import ConfigError

from .access import Access
from .asking import json_response
from .changes import Changes
from .looks import SERVING, Looks
from .prefetches import Prefetches

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from lmcache_kernels.transfer.serving.service import CacheService

    from .snapshot import Loop

logger = logging.getLogger(__name__)

CONNECTION_SECONDS = 15.0
"""A connection carries one request and lasts no longer, whatever its client does."""

MAX_CONNECTIONS = 128
"""Of more, the oldest that has not asked anything yet is closed, so that the files of this process are
not used up."""

MAX_HEADERS = 16 << 10
"""Bytes of a request's first line and headers."""

BACKLOG = 128


class AdminServer:
    """Answers from when it is made until :meth:`close`.

    Args:
        host: to bind; without a token a loopback address, or ``localhost`` for 127.0.0.1.
        port: 0 takes any free one.
        token: that changes need, and reads from elsewhere.
        loop, service: of the cache server.
        phase, config: see :class:`~.looks.Looks`; ``reload``: see :class:`~.changes.Changes`.

    Attributes:
        endpoint: where it listens, such as ``http://127.0.0.1:8080``.

    Raises:
        ConfigError: an address that others could reach without a token, a token that is too short, or
            an address that cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str | None,
        *,
        loop: Loop,
        service: CacheService,
        phase: Callable[[], str] = lambda: SERVING,
        config: Callable[[], Mapping[str, Any]] = dict,
        reload: Callable[[], object] | None = None,
    ) -> None:
        access = Access(host, token)
        looks = Looks(loop, service, phase, config)
        changes = Changes(loop, service, reload)
        app = Starlette(
            routes=[*looks.routes(), *changes.routes(), *Prefetches(loop).routes()],
            exception_handlers={HTTPException: _refused, Exception: _failed},
        )
        app.router.redirect_slashes = False
        self._socket = _listen(host, port)
        self.endpoint = _endpoint(self._socket)
        self._server = uvicorn.Server(
            uvicorn.Config(
                _Gate(app, access),
                loop="asyncio",
                http=_OneRequest,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                headers=[("connection", "close")],
                h11_max_incomplete_event_size=MAX_HEADERS,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._run, name="lmcache-kernels-http", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening and end what is under way; bounded, idempotent."""
        self._server.should_exit = True
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("the HTTP server has not ended in %g s", timeout)
        self._socket.close()

    def __enter__(self) -> AdminServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException:  # the cache goes on without it
            logger.exception("the HTTP server has ended")


class _OneRequest(H11Protocol):
    """A connection of bounded length: a client that never ends its request, or never reads the answer,
    keeps nobody waiting."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            # Whoever has not asked anything yet goes first: idle connections keep nobody out.
            idle = [
                one
                for one in self.connections
                if isinstance(one, _OneRequest) and one.cycle is None
            ]
            if not idle:
                self._end = None
                transport.abort()
                return
            oldest = min(idle, key=lambda one: one._began)
            self.connections.discard(oldest)
            oldest.transport.abort()
        super().connection_made(transport)
        self._began = self.loop.time()
        self._end = self.loop.call_later(CONNECTION_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
            super().connection_lost(exc)


class _Gate:
    """Lets in what :class:`~.access.Access` does."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._access.refusal(scope["method"], scope["path"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        response = json_response({"error": refusal.reason}, refusal.status)
        response.headers.update(refusal.headers or {})
        await response(scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    response = json_response({"error": error.detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return json_response({"error": f"{type(error).__name__}; the server's log has the trace"}, 500)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"HTTP address {host} port {port}: cannot be bound: {error}; choose another with "
            "--http-host and --http-port"
        ) from error
    return listener


def _endpoint(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
