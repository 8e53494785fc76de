"""Storing and loading through a transfer context, and whether the bytes came back."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch

from .moving import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext

    from .cases import Case


def new_digests(chunks: int) -> list[bytes]:
    """Names that no chunk has yet."""
    return [secrets.token_bytes(32) for _ in range(chunks)]


def store(context: EngineDrivenContext, digests: list[bytes], ids: Sequence[int]) -> None:
    """Store new chunks and wait.

    Raises:
        RuntimeError: not all were stored.
    """
    stored = context.submit_store(digests, [ids]).result.result(TIMEOUT)
    if stored != len(digests):
        raise RuntimeError(f"stored {stored} of {len(digests)} chunks")


def load(context: EngineDrivenContext, digests: list[bytes], ids: Sequence[int]) -> None:
    """Load chunks and wait.

    Raises:
        RuntimeError: not all were loaded.
    """
    loaded = context.submit_retrieve(digests, [ids]).result(TIMEOUT)
    if loaded != len(digests):
        raise RuntimeError(f"loaded {loaded} of {len(digests)} chunks")


def comes_back(
    context: EngineDrivenContext,
    case: Case,
    caches: Sequence[torch.Tensor],
    digests: list[bytes],
    source: Sequence[int],
    target: Sequence[int],
) -> bool:
    """Are the blocks ``source``, stored and loaded, what ``target`` then holds?

    It holds other bytes before. The chunks stay stored.
    """
    store(context, digests, source)
    load(context, digests, target)
    axis = case.axes.split().index("block")
    here, there = (torch.tensor(ids, device=caches[0].device) for ids in (source, target))
    return all(
        torch.equal(cache.index_select(axis, here), cache.index_select(axis, there))
        for cache in caches
    )
