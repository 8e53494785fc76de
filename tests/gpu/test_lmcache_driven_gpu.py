"""The context in which the server copies, of a GPU engine: through IPC memory and IPC events."""

from __future__ import annotations

import secrets

import msgspec
import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside
from served_worker import BLOCKS, CHUNK, ServedWorker
from transfer_suite import *  # noqa: F403
from transfer_suite import CHUNK_TOKENS, WAIT, context_of, group_of, load, names, store

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.errors import RemoteError, TransferTimeout
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.messages import LoadBlocks, StoreBlocks

pytestmark = pytest.mark.gpu

del test_a_flipped_bit_ends_a_load_before_its_chunk  # noqa: F821 - a server each, and they load torch

SOME_25_MS = 50_000_000
HALF_A_SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def device():
    return "cuda:0"


@pytest.fixture(scope="module")
def mode():
    return "lmcache_driven"


@pytest.fixture
def cache(device):
    made = make_cache(BY_NAME["kv_first_nhd"], blocks=12, device=device)
    made.fill_random(1)
    return made


def test_a_store_waits_for_what_the_engine_had_queued(connected, cache):
    """The server reads what was written 25 ms after the store was submitted."""
    context = connected([group_of(cache.tensors, cache.axes)])
    for _ in range(20):
        cache.fill(1)
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(SOME_25_MS)
        cache.fill(2)
        stored = names(1)
        transfer = context.submit_store(stored, [[0, 1]])
        assert not transfer.result.done()
        assert transfer.result.result(WAIT) == 1
        assert load(context, stored, [4, 5]) == 1
        assert set(oracle_chunk(cache, [4, 5]).tolist()) == {2}


def test_a_load_waits_for_what_the_engine_had_queued(connected, cache):
    """What the engine still had to write into the blocks does not overwrite what is loaded."""
    context = connected([group_of(cache.tensors, cache.axes)])
    expected = oracle_chunk(cache, [0, 1])
    stored = names(1)
    assert store(context, stored, [0, 1]) == 1
    for _ in range(10):
        torch.cuda._sleep(SOME_25_MS)
        cache.fill(7)
        assert load(context, stored, [4, 5]) == 1
        assert torch.equal(oracle_chunk(cache, [4, 5]), expected)


def test_a_transfer_whose_event_does_not_come_in_time_does_not_begin(server, cache):
    client = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)
    client.wait_ready(WAIT)
    context = context_of([group_of(cache.tensors, cache.axes)], client, mode="lmcache_driven")
    context.register()
    context._copy_timeout = 0.2
    stored = names(1)
    torch.cuda._sleep(HALF_A_SECOND)
    transfer = context.submit_store(names(1), [[0, 1]])
    assert isinstance(transfer.result.exception(WAIT), TransferTimeout)
    client.wait_ready(WAIT)  # a server that was late is asked whether it is there first
    context._copy_timeout = WAIT
    assert store(context, stored, [0, 1]) == 1
    before = cache.snapshot()
    context._copy_timeout = 0.2
    torch.cuda._sleep(HALF_A_SECOND)
    assert isinstance(
        context.submit_retrieve(stored, [[6, 7]]).exception(WAIT), (TransferTimeout, RemoteError)
    )
    torch.cuda.current_stream().synchronize()
    assert untouched_outside(cache, before, [])
    context.close()
    client.close()


@pytest.mark.parametrize("kind", [StoreBlocks, LoadBlocks])
def test_garbage_handles_are_refused_and_the_server_goes_on(server, cache, kind):
    client = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)
    client.wait_ready(WAIT)
    context = context_of([group_of(cache.tensors, cache.axes)], client, mode="lmcache_driven")
    context.register()
    stored = names(1)
    assert store(context, stored, [0, 1]) == 1
    asked = kind(
        instance=context.instance,
        transfer=1,
        digests=stored[0] if kind is LoadBlocks else secrets.token_bytes(32),
        blocks=[b"\2\0\0\0\3\0\0\0"],
        event=bytes(range(64)),
    )
    for event, words in ((bytes(range(64)), "cannot be opened"), (b"", "64 bytes"), (b"x", "64")):
        with pytest.raises(RemoteError, match=f"bad_request: .*{words}"):
            client.request(msgspec.structs.replace(asked, event=event), WAIT).result(WAIT)
    message = context._server._message
    (piece,) = message.groups[0]
    share = msgspec.structs.replace(piece.tensors[0].share, handle=bytes(64))
    tensors = tuple(msgspec.structs.replace(one, share=share) for one in piece.tensors)
    wrong = msgspec.structs.replace(piece, tensors=tensors)
    request = msgspec.structs.replace(message, instance=1, groups=[(wrong,)])
    with pytest.raises(RemoteError, match="bad_request"):
        client.request(request, WAIT).result(WAIT)
    assert load(context, stored, [8, 9]) == 1
    assert torch.equal(oracle_chunk(cache, [8, 9]), oracle_chunk(cache, [0, 1]))
    context.close()
    client.close()


def test_a_cache_of_this_process_is_copied_by_this_process(cache):
    with EmbeddedCache(1 << 20, chunk_tokens=CHUNK_TOKENS) as embedded:
        context = context_of([group_of(cache.tensors, cache.axes)], embedded, mode="lmcache_driven")
        stored = names(2)
        assert store(context, stored, [0, 1, 2, 3]) == 2
        assert load(context, stored, [6, 7, 8, 9]) == 2
        assert torch.equal(oracle_chunk(cache, [6, 7, 8, 9]), oracle_chunk(cache, [0, 1, 2, 3]))
        context.close()


def test_a_worker_killed_before_its_event_publishes_nothing(server):
    """Its GPU work dies with it, so the event says nothing any more about what is in the blocks."""
    assert CHUNK == CHUNK_TOKENS
    with ServedWorker(server.url, instance=7, device="cuda:0") as worker:
        worker.compute(2 * HALF_A_SECOND, 5)
        worker.submit("store", 3)
    with ServedWorker(server.url, instance=8, device="cuda:0", fill=9) as other:
        other.submit("load", 3)
        assert other.result() == 0
        other.submit("store", 2, 3)
        assert other.result() == 2
        other.submit("load", 2, 3)
        assert other.result() == 2
        assert other.block_values() == [9] * BLOCKS
        other.close()
