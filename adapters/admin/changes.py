"""What can be changed of a server over HTTP. None of it outlives the server."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Route

from lmcache_kernels.errors import ConfigError, KVTransferError
from lmcache_kernels.transfer.messages import (
    Clear,
    Cleared,
    Done,
    Found,
    Pin,
    Unpin,
)

from . import asking
from .asking import asked, changed, json_response, name_of
from .body import body_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from lmcache_kernels.transfer.serving.service import CacheService

    from .snapshot import Loop


class ClearBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``shards``: 64 hexadecimal digits each; without any, all that there is goes."""

    shards: list[str] = []


class PinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name, and which chunks it keeps for how long; shards and digests are hexadecimal."""

    pin: str
    shards: list[str]
    digests: list[str]
    seconds: float


class QuotaBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of slots."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]


class Changes:
    """Makes them.

    Args:
        loop, service: of the server.
        reload: reads the settings again, in a thread of its own, and returns what has changed, as
            something that JSON can hold; raises KVTransferError. None: it cannot.
    """

    def __init__(
        self, loop: Loop, service: CacheService, reload: Callable[[], object] | None
    ) -> None:
        self._loop = loop
        self._service = service
        self._reload = reload

    def routes(self) -> list[Route]:
        routes = [
            Route("/cache/clear", self.clear, methods=["POST"]),
            Route("/cache/pins", self.pin, methods=["POST"]),
            Route("/cache/pins/{pin:path}", self.unpin, methods=["DELETE"]),
            Route("/quota", self.default_quota, methods=["PUT", "DELETE"]),
            Route("/quota/{tenant:path}", self.quota, methods=["GET", "PUT", "DELETE"]),
        ]
        if self._reload is not None:
            routes.append(Route("/reload", self.reload, methods=["POST"]))
        return routes

    async def clear(self, request: Request) -> Response:
        body = await body_of(request, ClearBody)
        shards = [name_of("shards", shard) for shard in body.shards]
        reply = await asked(self._loop, Clear(shards=shards), Cleared)
        return json_response({"cleared": reply.chunks})

    async def pin(self, request: Request) -> Response:
        """Answered by how many of the chunks, from the first on, are there and kept now."""
        body = await body_of(request, PinBody)
        pin = Pin(
            pin=body.pin,
            shards=[name_of("shards", shard) for shard in body.shards],
            digests=b"".join([name_of("digests", digest) for digest in body.digests]),
            seconds=body.seconds,
        )
        reply = await asked(self._loop, pin, Found)
        return json_response({"pinned": reply.chunks})

    async def unpin(self, request: Request) -> Response:
        """A name that is not known is fine: pins end by themselves."""
        pin = request.path_params["pin"]
        await asked(self._loop, Unpin(pin=pin), Done)
        return json_response({"unpinned": pin})

    async def default_quota(self, request: Request) -> Response:
        """Of tenants that have none of their own."""
        await self._set_quota(request, None)
        default = await changed(self._loop, lambda: self._service.default_quota)
        return json_response({"default_bytes": default})

    async def quota(self, request: Request) -> Response:
        tenant = request.path_params["tenant"]
        if request.method in ("PUT", "DELETE"):
            await self._set_quota(request, tenant)
        use = (await changed(self._loop, self._service.quotas)).get(tenant)
        if use is None and request.method != "DELETE":
            raise HTTPException(404, f"tenant {tenant!r} has no quota of its own and uses nothing")
        return json_response({"tenant": tenant} | ({} if use is None else use._asdict()))

    async def reload(self, request: Request) -> Response:
        if self._reload is None:
            raise HTTPException(404)
        seconds = asking.CHANGE_TIMEOUT
        try:
            done = await asyncio.wait_for(asyncio.to_thread(self._reload), seconds)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from error
        except KVTransferError as error:  # among them one that is a TimeoutError, too
            raise HTTPException(503, str(error)) from error
        except asyncio.TimeoutError:
            raise HTTPException(503, f"not over after {seconds:g} s; it goes on") from None
        return json_response(done)

    async def _set_quota(self, request: Request, tenant: str | None) -> None:
        put = request.method == "PUT"
        nbytes = (await body_of(request, QuotaBody)).bytes if put else None
        try:
            await changed(self._loop, partial(self._service.set_quota, tenant, nbytes))
        except ConfigError as error:
            raise HTTPException(400, str(error)) from error
