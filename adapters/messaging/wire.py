"""How requests and replies look on a socket: two frames, both msgpack. Pure.

A request is ``[header, body]`` with a :class:`RequestHeader`, a reply ``[header, body]`` with a
:class:`ReplyHeader`; the bodies are the structs of :mod:`lmcache_kernels.transfer.messages`, told
apart by ``op``. Fields that this version does not know are ignored; everything else that is not
exactly this is a :class:`MalformedMessage`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import msgspec

from lmcache_kernels.errors import LocalProtocolError, RemoteProtocolError
from lmcache_kernels.transfer.messages import AnyReply, AnyRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.transfer.messages import Reply, Request

MAX_FRAME = 16 << 20
"""Bytes of the largest frame. A lookup of 65536 chunks has 2 MiB, a store of them by the server 10 MiB
at 32 blocks a chunk."""

T = TypeVar("T")


class RequestHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a server must know before it looks at a request.

    ``uid`` comes back in the reply. ``incarnation`` names the server that the request is meant for
    (empty for the first one of a connection). ``deadline`` is in seconds of that server's clock;
    0 means none.
    """

    uid: Annotated[int, msgspec.Meta(ge=0)]
    incarnation: Annotated[str, msgspec.Meta(max_length=64)]
    deadline: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True):
    """``uid`` of the request that this answers."""

    uid: Annotated[int, msgspec.Meta(ge=0)]


class _Operation(msgspec.Struct, frozen=True):
    op: str


class MalformedMessage(RemoteProtocolError):
    """Frames that are no message.

    ``uid`` is that of the message if its header could be read, else None. ``code`` is the error
    code to answer with: ``unsupported`` for an operation we do not know, else ``bad_request``.
    """

    def __init__(self, message: str, *, uid: int | None = None, code: str = "bad_request") -> None:
        super().__init__(message)
        self.uid = uid
        self.code = code


def _operations(union: Any) -> frozenset[str]:
    return frozenset(str(kind.__struct_config__.tag) for kind in get_args(union))


_encoder = msgspec.msgpack.Encoder()
_request_header = msgspec.msgpack.Decoder(RequestHeader)
_reply_header = msgspec.msgpack.Decoder(ReplyHeader)
_operation = msgspec.msgpack.Decoder(_Operation)
_request: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyRequest)
_reply: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyReply)
_request_ops = _operations(AnyRequest)
_reply_ops = _operations(AnyReply)


def encode_body(message: Request | Reply) -> bytes:
    """The second frame of a request or a reply.

    Raises:
        LocalProtocolError: a field that has no place in msgpack, or more than ``MAX_FRAME`` bytes.
    """
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"{type(message).__name__}: cannot be sent: {error}") from error
    if len(body) > MAX_FRAME:
        raise LocalProtocolError(
            f"{type(message).__name__}: expected <= {MAX_FRAME} bytes, got {len(body)}: "
            "name fewer chunks in one message"
        )
    return body


def request_frames(uid: int, incarnation: str, deadline: float, body: bytes) -> list[bytes]:
    """A request as frames; ``body`` is from :func:`encode_body`."""
    header = RequestHeader(uid=uid, incarnation=incarnation, deadline=deadline)
    return [_encoder.encode(header), body]


def reply_frames(uid: int, body: bytes) -> list[bytes]:
    """A reply as frames; ``body`` is from :func:`encode_body`."""
    return [_encoder.encode(ReplyHeader(uid=uid)), body]


def decode_request(frames: Sequence[bytes]) -> tuple[RequestHeader, Request]:
    """The request in ``frames``.

    Raises:
        MalformedMessage: anything that is no request.
    """
    header = _header(frames, _request_header)
    if not math.isfinite(header.deadline):
        raise MalformedMessage(
            f"deadline: expected a finite number, got {header.deadline}", uid=header.uid
        )
    return header, _body(frames, header.uid, _request, _request_ops)


def decode_reply(frames: Sequence[bytes]) -> tuple[int, Reply]:
    """The uid and the reply in ``frames``.

    Raises:
        MalformedMessage: anything that is no reply.
    """
    uid = _header(frames, _reply_header).uid
    return uid, _body(frames, uid, _reply, _reply_ops)


def _header(frames: Sequence[bytes], decoder: msgspec.msgpack.Decoder[T]) -> T:
    if not frames:
        raise MalformedMessage("expected 2 frames, got none")
    return _decode(decoder, frames[0], "header", None)


def _body(
    frames: Sequence[bytes],
    uid: int,
    decoder: msgspec.msgpack.Decoder[Any],
    known: frozenset[str],
) -> Any:
    if len(frames) != 2:
        raise MalformedMessage(f"expected 2 frames, got {len(frames)}", uid=uid)
    try:
        return _decode(decoder, frames[1], "body", uid)
    except MalformedMessage as error:
        try:
            op = _decode(_operation, frames[1], "body", uid).op
        except MalformedMessage:
            raise error from None
        if op in known:
            raise
        raise MalformedMessage(
            f"unknown operation {op[:64]!r}", uid=uid, code="unsupported"
        ) from error


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes, what: str, uid: int | None) -> T:
    if len(frame) > MAX_FRAME:
        raise MalformedMessage(f"{what}: expected <= {MAX_FRAME} bytes, got {len(frame)}", uid=uid)
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        # Cut, because a message of the decoder can quote what it was sent.
        raise MalformedMessage(f"{what}: {str(error)[:200]}", uid=uid) from error
