"""Stores name the tenant for whom they are, whichever process copies."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import pytest
from cachekit import BY_NAME, make_cache

from lmcache_kernels.errors import RemoteError
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.context_factory import create_transfer_context
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.kv_groups import KVGroup

CHUNK = 8  # two blocks of four tokens
WAIT = 30.0


@pytest.fixture(params=["engine_driven", "lmcache_driven"])
def made(request):
    """(context, the service of its cache)"""
    with ExitStack() as closing:
        cache = make_cache(BY_NAME["kv_first_nhd"], blocks=24)
        cache.fill_random(1)
        server = closing.enter_context(EmbeddedCache(1 << 20, chunk_tokens=CHUNK))
        context = create_transfer_context(
            [KVGroup.of(cache.tensors, cache.axes)],
            request.param,
            chunk_tokens=CHUNK,
            part=ShardPart(),
            port=server,
        )
        closing.callback(context.close)
        yield context, server._service


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


def test_a_store_is_within_the_quota_of_its_tenant(made):
    context, service = made
    assert context.submit_store(names(1), [[0, 1]], tenant="a").result.result(WAIT) == 1
    slot = service.stats()["used_bytes"]
    service.set_quota("a", 2 * slot)
    service.set_quota("b", 9 * slot)
    assert service.quotas() == {"a": (2 * slot, slot), "b": (9 * slot, 0)}
    assert context.submit_store(names(3), [range(6)], tenant="a").result.result(WAIT) == 2
    assert context.submit_store(names(3), [range(6)], tenant="b").result.result(WAIT) == 3
    assert context.submit_store(names(2), [range(4)]).result.result(WAIT) == 2
    assert service.quotas() == {"a": (2 * slot, 2 * slot), "b": (9 * slot, 3 * slot)}


def test_a_tenant_that_cannot_be_fails_the_store_and_nothing_else(made):
    context, service = made
    with pytest.raises(RemoteError, match="tenant: expected") as caught:
        context.submit_store(names(1), [[0, 1]], tenant="a/b").result.result(WAIT)
    assert caught.value.code == "bad_request"
    assert service.stats()["used_bytes"] == 0
    assert context.submit_store(names(1), [[0, 1]], tenant="ab").result.result(WAIT) == 1
