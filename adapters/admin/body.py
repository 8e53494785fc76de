"""The body of a request: JSON of a known form, of a bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T", bound=msgspec.Struct)

MAX_BODY = 1 << 20
"""Bytes: some ten thousand chunks by name."""


async def body_of(request: Request, form: type[T]) -> T:
    """What was sent; nothing at all counts as ``{}``.

    Raises:
        HTTPException: 413: too long; 415: no JSON; 400: not of this form.
    """
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"body: expected at most {MAX_BODY} bytes")
    if data and request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "body: expected the content type application/json")
    try:
        return msgspec.json.decode(data or b"{}", type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise HTTPException(400, f"body: {error}") from error
