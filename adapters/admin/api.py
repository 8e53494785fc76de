"""The endpoints: what is asked over HTTP becomes a call between two requests of the server's thread.

Whatever that thread does, each wait for it is bounded, and ``/health`` does not wait for it at all.
"""

from __future__ import annotations

import asyncio
import platform
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from lmcache_kernels import __version__
from lmcache_kernels.errors import Closed, ConfigError
from lmcache_kernels.transfer.messages import (
    DIGEST_BYTES,
    PROTOCOL_VERSION,
    Clear,
    Cleared,
    ErrorReply,
)

from .body import body_of
from .metrics import exposition
from .snapshot import take
from .status import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from starlette.requests import Request

    from lmcache_kernels.transfer.messages import Request as Message
    from lmcache_kernels.transfer.serving.chunk_table import ChunkState
    from lmcache_kernels.transfer.serving.service import CacheService

    from .snapshot import Loop, Snapshot

    Reload = Callable[[], Mapping[str, Any]]

T = TypeVar("T")
M = TypeVar("M")

LOOK_TIMEOUT = 1.0
"""Seconds in which the server's thread must have time for a look at it."""

CHANGE_TIMEOUT = 10.0
"""Seconds that a change may take."""

PAGE = 1000
"""Most chunks of one answer, and of one look at the table: less than a millisecond."""

MOST_LOOKS = 20
"""At the table for one answer, where few chunks are those that were asked for."""

SERVING = "serving"

_STATUS_OF_CODE = {"bad_request": 400, "unsupported": 404, "busy": 503, "expired": 503}


class ClearBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``shards``: 64 hexadecimal digits each; without any, all that there is goes."""

    shards: list[str] = []


class Api:
    """Answers of one server.

    Args:
        loop, service: of the server.
        phase: what it is doing: ``serving``, or anything else while it is not ready.
        config: its settings, secrets left out.
        reload: reads the configuration again and returns what has changed, in a thread of its own;
            raises ConfigError. None: it cannot.
    """

    def __init__(
        self,
        loop: Loop,
        service: CacheService,
        *,
        phase: Callable[[], str],
        config: Callable[[], Mapping[str, Any]],
        reload: Reload | None,
    ) -> None:
        self._loop = loop
        self._service = service
        self._phase = phase
        self._config = config
        self._reload = reload
        self._started = loop.now()

    def routes(self) -> list[Route]:
        routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/version", self.version),
            Route("/status", self.status),
            Route("/metrics", self.metrics),
            Route("/config", self.config),
            Route("/cache/chunks", self.chunks),
            Route("/cache/clear", self.clear, methods=["POST"]),
        ]
        if self._reload is not None:
            routes.append(Route("/reload", self.reload, methods=["POST"]))
        return routes

    # --- looks ------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """The process lives. Nothing else is asked."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        phase = self._phase()
        if phase == SERVING:
            try:
                await self._looked(lambda: None)
            except HTTPException:
                phase = "busy"
        return json_response({"status": phase}, 200 if phase == SERVING else 503)

    async def version(self, request: Request) -> Response:
        return json_response(
            {
                "version": __version__,
                "protocol": PROTOCOL_VERSION,
                "python": platform.python_version(),
                "incarnation": self._service.incarnation,
            }
        )

    async def status(self, request: Request) -> Response:
        return json_response(status_of(await self._snapshot(), self._phase()))

    async def metrics(self, request: Request) -> Response:
        snapshot = await self._snapshot()
        body, content_type = exposition(snapshot, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def config(self, request: Request) -> Response:
        return json_response(dict(self._config()))

    async def chunks(self, request: Request) -> Response:
        """A page; ``next`` is where the next one begins, None behind the last.

        Chunks that come or go between two pages move those behind them, so that some are left out or
        come twice.
        """
        limit = _number(request, "limit", 100, least=1, most=PAGE)
        first = _number(request, "after", 0, least=0, most=1 << 40)
        shard = request.query_params.get("shard")
        wanted = None if shard is None else _shard(shard)
        found: list[ChunkState] = []
        for _ in range(MOST_LOOKS):
            some = await self._looked(partial(self._service.chunks, first, PAGE))
            for state in some:
                first += 1
                if wanted is None or state.shard == wanted:
                    found.append(state)
                    if len(found) == limit:
                        break
            if len(found) == limit or len(some) < PAGE:
                break
        more = len(found) == limit or len(some) == PAGE
        return json_response(
            {"chunks": [_chunk(state) for state in found], "next": first if more else None}
        )

    # --- changes ----------------------------------------------------------------------------------

    async def clear(self, request: Request) -> Response:
        body = await body_of(request, ClearBody)
        reply = await self._asked(Clear(shards=[_shard(shard) for shard in body.shards]), Cleared)
        return json_response({"cleared": reply.chunks})

    async def reload(self, request: Request) -> Response:
        if self._reload is None:
            raise HTTPException(404)
        try:
            changed = await asyncio.wait_for(asyncio.to_thread(self._reload), CHANGE_TIMEOUT)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from error
        except asyncio.TimeoutError:
            raise HTTPException(503, f"not over after {CHANGE_TIMEOUT:g} s; it goes on") from None
        return json_response(dict(changed))

    # --- the server's thread ----------------------------------------------------------------------

    async def _snapshot(self) -> Snapshot:
        asked = self._loop.now()
        return await self._looked(lambda: take(self._loop, self._service, self._started, asked))

    async def _looked(self, look: Callable[[], T]) -> T:
        return await _within(self._loop.call(look), LOOK_TIMEOUT)

    async def _asked(self, message: Message, expected: type[M]) -> M:
        reply = await _within(self._loop.ask(message, CHANGE_TIMEOUT), CHANGE_TIMEOUT)
        if isinstance(reply, ErrorReply):
            raise HTTPException(_STATUS_OF_CODE.get(reply.code, 500), reply.message)
        if not isinstance(reply, expected):
            raise TypeError(f"expected {expected.__name__}, got {reply!r:.200}")
        return reply


def json_response(content: Any, status: int = 200) -> Response:
    """An answer that nobody may keep."""
    return Response(
        msgspec.json.encode(content),
        status,
        headers={"content-type": "application/json", "cache-control": "no-store"},
    )


async def _within(future: Future[T], seconds: float) -> T:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except asyncio.TimeoutError:
        what = "nothing was done" if future.cancelled() else "it may be done later"
        raise HTTPException(
            503, f"the server's thread had no time for {seconds:g} s; {what}"
        ) from None
    except Closed as error:
        raise HTTPException(503, "the server has stopped") from error


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise HTTPException(400, f"{name}: expected an integer from {least} to {most}")
    return int(text)


def _shard(text: str) -> bytes:
    if len(text) == 2 * DIGEST_BYTES:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    raise HTTPException(400, f"shard: expected {2 * DIGEST_BYTES} hexadecimal digits")


def _chunk(state: ChunkState) -> dict[str, Any]:
    what = ("held" if state.holders else "idle") if state.resident else "writing"
    return {
        "shard": state.shard.hex(),
        "digest": state.digest.hex(),
        "bytes": state.nbytes,
        "state": what,
        "holders": state.holders,
        "hits": state.hits,
    }
