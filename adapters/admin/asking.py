"""What is asked over HTTP becomes a call between two requests of the server's thread.

Whatever that thread does, each wait for it is bounded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lmcache_kernels.errors import Closed
from lmcache_kernels.transfer.messages import DIGEST_BYTES, ErrorReply

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from lmcache_kernels.transfer.messages import Request

    from .snapshot import Loop

T = TypeVar("T")

LOOK_TIMEOUT = 1.0
"""Seconds in which the server's thread must have time for a look at it."""

CHANGE_TIMEOUT = 10.0
"""Seconds that a change may take."""

_STATUS_OF_CODE = {"bad_request": 400, "unsupported": 404, "busy": 503, "expired": 503}


async def looked(loop: Loop, look: Callable[[], T]) -> T:
    """What ``look`` returns in the server's thread."""
    return await _within(loop.call(look), LOOK_TIMEOUT)


async def changed(loop: Loop, change: Callable[[], T]) -> T:
    """What ``change`` returns in the server's thread."""
    return await _within(loop.call(change), CHANGE_TIMEOUT)


async def asked(
    loop: Loop, request: Request, expected: type[T], seconds: float = CHANGE_TIMEOUT
) -> T:
    """The reply that a client would get, who waits for so long."""
    reply = await _within(loop.ask(request, seconds), seconds)
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


def name_of(what: str, text: str) -> bytes:
    """A shard or digest, written in hexadecimal digits."""
    if len(text) == 2 * DIGEST_BYTES:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    raise HTTPException(400, f"{what}: expected {2 * DIGEST_BYTES} hexadecimal digits")


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
