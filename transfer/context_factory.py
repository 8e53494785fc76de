"""Which transfer context an engine gets: by what it was told, or what suits every device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

from lmcache_kernels.errors import ConfigError, LayoutError

from .arguments import list_of, one_of_kind
from .cache_forms import ShardPart
from .engine_driven.context import EngineDrivenContext
from .kv_groups import KVGroup
from .lmcache_driven.context import COPY_TIMEOUT, LmcacheDrivenContext
from .moving.movers import one_device
from .sharing.devices import backend_for
from .transfer_mode import transfer_mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .observer import Observer
    from .port import CachePort

logger = logging.getLogger(__name__)

TransferContext: TypeAlias = EngineDrivenContext | LmcacheDrivenContext


def create_transfer_context(
    kv_caches: Sequence[KVGroup],
    mode: str | None = None,
    *,
    chunk_tokens: int,
    part: ShardPart,
    instance: int | None = None,
    port: CachePort,
    timeout: float = 2.0,
    copy_timeout: float = COPY_TIMEOUT,
    max_programs: int | None = None,
    observer: Observer | None = None,
) -> TransferContext:
    """A context for the cache of an engine; not registered yet.

    Args:
        kv_caches: the cache by group. Keep the tensors alive until the context is closed.
        mode: ``engine_driven``, ``lmcache_driven`` or ``auto``; see :func:`.transfer_mode.transfer_mode`.
        chunk_tokens: tokens of one chunk.
        part: which part of the model's cache this worker holds.
        instance: id of this worker, below 2**63, which no other has; None: a random one.
        port: the cache.
        timeout: seconds a request may take that copies nothing.
        copy_timeout: seconds a copy by the server may take.
        max_programs: bound on the grid of every GPU kernel.
        observer: told of every transfer that ends.

    Raises:
        LayoutError: no group, groups on several devices, tensors that are not what was said of them,
            or a chunk size that a block size does not divide.
        ConfigError: no such mode, or one that the device or its memory is not up to, an argument of
            another kind, or a cache that works with other chunks.
        CapacityError: not enough shared memory for the mode lmcache_driven.
    """
    chosen = transfer_mode(mode)
    kv_caches = list_of("kv_caches", kv_caches, KVGroup)
    part = one_of_kind("part", part, ShardPart)
    groups = [group.read() for group in kv_caches]
    device = one_device(groups)
    logger.info("transfer context for a cache on %s: %s", device, chosen)
    if chosen == "engine_driven":
        return EngineDrivenContext(
            groups,
            chunk_tokens=chunk_tokens,
            shard=lambda layout: part.shard(layout.fingerprint),
            instance=instance,
            port=port,
            timeout=timeout,
            max_programs=max_programs,
            observer=observer,
        )
    _check_can_be_served(device)
    return LmcacheDrivenContext(
        kv_caches,
        chunk_tokens=chunk_tokens,
        part=part,
        instance=instance,
        port=port,
        timeout=timeout,
        copy_timeout=copy_timeout,
        max_programs=max_programs,
        observer=observer,
    )


def _check_can_be_served(device: str) -> None:
    kind = device.split(":", maxsplit=1)[0]
    remedy = "use the transfer mode engine_driven"
    try:
        backend = backend_for(kind)
    except LayoutError as error:
        raise ConfigError(f"lmcache_driven on {device}: {error}; {remedy}") from error
    if not backend.is_available():
        raise ConfigError(
            f"lmcache_driven on {device}: its backend {backend.backend_name} is not available; "
            f"{remedy}"
        )
