"""What callers hand over is of the kind that is expected: looked at where it comes in. Pure."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_kernels.errors import ConfigError, KVTransferError, LayoutError

if TYPE_CHECKING:
    from .port import CachePort

T = TypeVar("T")


def integer(
    what: str,
    value: object,
    least: int,
    most: int | None = None,
    error: type[KVTransferError] = ConfigError,
) -> int:
    """``value``, which must be an integer from ``least`` to ``most``."""
    number = None if isinstance(value, bool) else _index(value)
    if number is None or number < least or (most is not None and number > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise error(f"{what}: expected an integer {bounds}, got {value!r:.80}")
    return number


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def instance_id(value: object) -> int:
    """The id of a worker: a random one for None, which is nobody else's."""
    return secrets.randbits(63) if value is None else integer("instance", value, 0, (1 << 63) - 1)


def one_of_kind(
    what: str, value: object, kind: type[T], error: type[KVTransferError] = ConfigError
) -> T:
    """``value``, which must be of that type."""
    if not isinstance(value, kind):
        raise error(f"{what}: expected a {kind.__name__}, got {type(value).__name__}")
    return value


def list_of(what: str, values: object, kind: type[T]) -> tuple[T, ...]:
    """``values``, which must be a list of objects of that type.

    Raises:
        LayoutError: they are not.
    """
    if not isinstance(values, Sequence):
        raise LayoutError(
            f"{what}: expected a list of {kind.__name__}, got {type(values).__name__}"
        )
    return tuple(
        one_of_kind(f"{what}[{index}]", value, kind, LayoutError)
        for index, value in enumerate(values)
    )


def check_named(what: str, tensors: object) -> None:
    """Raise LayoutError unless it is a mapping, as caches by name are."""
    if not isinstance(tensors, Mapping):
        raise LayoutError(f"{what}: expected tensors by name, got {type(tensors).__name__}")


def check_port(port: CachePort, chunk_tokens: int) -> None:
    """Raise ConfigError unless this is a cache, and one that works with such chunks.

    One that has not reached its server yet does not know, and must be looked at again.
    """
    if not callable(getattr(port, "request", None)):
        raise ConfigError(
            f"port: expected a cache, such as an EmbeddedCache or a CacheClient, got {port!r:.80}"
        )
    if port.chunk_tokens not in (None, chunk_tokens):
        raise ConfigError(
            f"chunk_tokens: expected {port.chunk_tokens}, as the cache has, got {chunk_tokens}"
        )


def check_transfer(digests: object, block_ids: object, skip_tokens: object = 0) -> None:
    """Raise LayoutError unless there are two lists, of any kind, and a number of tokens."""
    for what, value in (("digests", digests), ("block_ids", block_ids)):
        if not hasattr(value, "__len__"):
            raise LayoutError(f"{what}: expected a list, got {type(value).__name__}")
    integer("skip_first_n_tokens", skip_tokens, 0, error=LayoutError)
