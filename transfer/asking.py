"""Ask a cache and wait for the reply."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, TypeVar

from lmcache_kernels.errors import KVTransferError, RemoteProtocolError, TransferTimeout

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .messages import Reply, Request
    from .port import CachePort

R = TypeVar("R", bound="Reply")


def ask(port: CachePort, message: Request, reply_type: type[R], timeout: float) -> R:
    """The reply to ``message``.

    Raises:
        KVTransferError: what :meth:`.port.CachePort.request` has its futures end with.
    """
    return answer(port.request(message, timeout), message, reply_type, timeout)


def answer(future: Future[Reply], message: Request, reply_type: type[R], timeout: float) -> R:
    """The reply to ``message``, which was sent with ``timeout``; see :func:`ask`."""
    name = type(message).__name__
    try:
        # The port keeps the deadline; the second bound only guards against a port that does not.
        reply = future.result(timeout + 1.0)
    except FutureTimeout as error:
        if isinstance(error, KVTransferError):
            raise
        raise TransferTimeout(f"no reply to {name} in {timeout + 1.0:g} s") from error
    return checked(reply, name, reply_type)


def checked(reply: Reply, name: str, reply_type: type[R]) -> R:
    """The reply to a message of that name, which must be of that type.

    Raises:
        RemoteProtocolError: it is not.
    """
    if not isinstance(reply, reply_type):
        raise RemoteProtocolError(
            f"reply to {name}: expected {reply_type.__name__}, got {type(reply).__name__}"
        )
    return reply
