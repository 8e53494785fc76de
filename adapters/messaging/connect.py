"""From a URL and a cache to a transfer context: for programs with one process and one cache."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import shard_id

from .client import CacheClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_kernels.plane import CacheGroup
    from lmcache_kernels.transfer.observer import Observer

    from .curve import ClientKeys


@contextmanager
def connect(
    url: str,
    groups: Sequence[CacheGroup],
    *,
    chunk_tokens: int = 256,
    timeout: float = 10.0,
    max_programs: int | None = None,
    observer: Observer | None = None,
    keys: ClientKeys | None = None,
) -> Iterator[EngineDrivenContext]:
    """A context that stores and loads ``groups``, the whole of a model's cache, at a server.

    Args:
        url: of the server, as ``lmcache-kernels serve`` prints it.
        groups: keep their tensors alive meanwhile.
        chunk_tokens: tokens of one chunk; must be the server's.
        timeout: seconds to wait for the server, and for each request.
        max_programs: bound on the grid of every GPU kernel.
        observer: told of every transfer that ends.
        keys: of a server that wants CURVE.

    Raises:
        PeerGone: no server answered. ConfigError: it works with other chunks. LayoutError: the
        groups cannot be stored in such chunks.
    """
    client = CacheClient(url, chunk_tokens=chunk_tokens, keys=keys)
    try:
        client.wait_ready(timeout)
        context = EngineDrivenContext(
            groups,
            chunk_tokens=chunk_tokens,
            shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
            port=client,
            timeout=timeout,
            max_programs=max_programs,
            observer=observer,
        )
        client.instance_id = context.instance  # its pings keep the worker registered
        try:
            context.register()
            yield context
        finally:
            context.close()
    finally:
        client.close()
