"""What can be read of a server over HTTP. ``/health`` does not wait for the server's thread at all."""

from __future__ import annotations

import platform
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from lmcache_kernels import __version__
from lmcache_kernels.transfer.messages import PROTOCOL_VERSION

from .asking import json_response, looked, name_of
from .metrics import exposition
from .snapshot import take
from .status import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request

    from lmcache_kernels.transfer.serving.chunk_table import ChunkState
    from lmcache_kernels.transfer.serving.service import CacheService

    from .snapshot import Loop, Snapshot

PAGE = 1000
"""Most chunks of one answer, and of one look at the table: less than a millisecond."""

MOST_LOOKS = 20
"""At the table for one answer, where few chunks are those that were asked for."""

SERVING = "serving"


class Looks:
    """Answers of one server.

    Args:
        loop, service: of the server.
        phase: what it is doing: ``serving``, or anything else while it is not ready.
        config: its settings, secrets left out.
    """

    def __init__(
        self,
        loop: Loop,
        service: CacheService,
        phase: Callable[[], str],
        config: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._loop = loop
        self._service = service
        self._phase = phase
        self._config = config
        self._started = loop.now()

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/version", self.version),
            Route("/status", self.status),
            Route("/metrics", self.metrics),
            Route("/config", self.config),
            Route("/cache/chunks", self.chunks),
            Route("/cache/pins", self.pins),
            Route("/quota", self.quotas),
        ]

    async def health(self, request: Request) -> Response:
        """The process lives. Nothing else is asked."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        phase = self._phase()
        if phase == SERVING:
            try:
                await looked(self._loop, lambda: None)
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
        wanted = None if shard is None else name_of("shard", shard)
        found: list[ChunkState] = []
        for _ in range(MOST_LOOKS):
            some = await looked(self._loop, partial(self._service.chunks, first, PAGE))
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

    async def pins(self, request: Request) -> Response:
        pins = await looked(self._loop, lambda: self._service.pins(self._loop.now()))
        return json_response({"pins": [pin._asdict() for pin in pins]})

    async def quotas(self, request: Request) -> Response:
        default, tenants = await looked(
            self._loop, lambda: (self._service.default_quota, self._service.quotas())
        )
        return json_response(
            {
                "default_bytes": default,
                "tenants": {name: use._asdict() for name, use in tenants.items()},
            }
        )

    async def _snapshot(self) -> Snapshot:
        asked = self._loop.now()
        return await looked(
            self._loop, lambda: take(self._loop, self._service, self._started, asked)
        )


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise HTTPException(400, f"{name}: expected an integer from {least} to {most}")
    return int(text)


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
