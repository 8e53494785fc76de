"""What storing and loading must do, on a CPU engine or a GPU one, through a real server process.

The test modules import these tests and say where they run through ``device``, and who copies through
``mode``.
"""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from arena_tools import damage_headers, flip_payload_bit
from cachekit import BY_NAME, LAYOUTS, make_cache, oracle_chunk, untouched_outside
from hybridkit import block_bytes, gemma, qwen3_next

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.errors import Closed, KVTransferError, LayoutError, PeerGone
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.context_factory import create_transfer_context
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.kv_groups import KVGroup

CHUNK_TOKENS = 8  # two blocks of four
WAIT = 30.0

group_of = KVGroup.of


@pytest.fixture(scope="module")
def mode():
    return "engine_driven"


@pytest.fixture(scope="module")
def server():
    with spawn_server(size_gb=0.05, chunk_size=CHUNK_TOKENS) as running:
        yield running


@pytest.fixture
def connected(server, mode):
    """Makes contexts at the module's server and closes what was made."""
    with ExitStack() as opened:

        def make(groups):
            if mode == "engine_driven":
                read = [group.read() for group in groups]
                connection = connect(server.url, read, chunk_tokens=CHUNK_TOKENS, timeout=WAIT)
                return opened.enter_context(connection)
            client = opened.enter_context(CacheClient(server.url, chunk_tokens=CHUNK_TOKENS))
            client.wait_ready(WAIT)
            context = context_of(groups, client, mode=mode)
            opened.callback(context.close)
            context.register()
            return context

        yield make


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


def store(context, digests, ids):
    return context.submit_store(digests, [ids]).result.result(WAIT)


def load(context, digests, ids, **options):
    return context.submit_retrieve(digests, [ids], **options).result(WAIT)


@pytest.mark.parametrize(
    "model", [gemma, partial(qwen3_next, tokens=8)], ids=["gemma", "qwen3_next"]
)
def test_hybrid_models_come_back_bit_exact(model, device, connected):
    """Groups of unlike blocks, heads and states; blocks outside a window are left alone."""
    caches, groups, _ = model(device)
    context = connected(groups)
    counts = [2 * count for count in context.layout.blocks_per_chunk]
    here = [list(range(count)) for count in counts]
    there = [list(range(2 * count, count, -1)) for count in counts]
    digests = names(2)
    expected = [
        [block_bytes(caches, group, layer, block) for block in here[group]]
        for group in range(2)
        for layer in range(len(caches[group]))
    ]
    assert context.submit_store(digests, here).result.result(WAIT) == 2
    null = there[0][0]
    before = [block_bytes(caches, 0, layer, null) for layer in range(len(caches[0]))]
    window = [ABSENT, *there[0][1:]]
    assert context.submit_retrieve(digests, [window, there[1]]).result(WAIT) == 2
    found = [
        [block_bytes(caches, group, layer, block) for block in there[group]]
        for group in range(2)
        for layer in range(len(caches[group]))
    ]
    for layer, was in enumerate(before):
        assert found[layer][0] == was
        found[layer][0] = expected[layer][0]
    assert found == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_mp_075_every_layout_comes_back_bit_exact_in_other_blocks(layout, dtype, device, connected):
    """Split, fused and latent caches; what is not named keeps what it holds."""
    source = make_cache(layout, blocks=12, dtype=dtype, device=device)
    source.fill_random(11)
    target = make_cache(layout, blocks=12, dtype=dtype, device=device)
    digests = names(3)
    ids, to = [7, 0, 3, 11, 5, 2], [1, 10, 4, 8, 0, 9]
    expected = oracle_chunk(source, ids)
    kept = source.snapshot()
    assert store(connected([group_of(source.tensors, layout.axes)]), digests, ids) == 3
    assert untouched_outside(source, kept, [])
    before = target.snapshot()
    assert load(connected([group_of(target.tensors, layout.axes)]), digests, to) == 3
    assert torch.equal(oracle_chunk(target, to), expected)
    assert untouched_outside(target, before, to)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.uint8, torch.int8, torch.float8_e5m2],
    ids=str,
)
def test_mp_075_every_byte_value_survives_storing(dtype, device, connected):
    """NaN patterns among them: bytes are moved, never converted."""
    layout = BY_NAME["kv_first_hnd"]
    source = make_cache(layout, blocks=8, dim=32, dtype=dtype, device=device)
    for storage in source.storages:
        storage.copy_(torch.arange(storage.numel()).remainder(256).to(torch.uint8))
    context = connected([group_of(source.tensors, layout.axes)])
    expected = oracle_chunk(source, [3, 4])
    assert set(expected.tolist()) == set(range(256))
    digests = names(1)
    assert store(context, digests, [3, 4]) == 1
    assert load(context, digests, [6, 1]) == 1
    assert torch.equal(oracle_chunk(source, [6, 1]), expected)


def test_token_major_and_head_major_engines_share_chunks(device, connected):
    nhd = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    hnd = make_cache(BY_NAME["block_first_hnd"], blocks=8, device=device)
    nhd.fill_random(2)
    digests = names(2)
    assert store(connected([group_of(nhd.tensors, nhd.axes)]), digests, [1, 2, 3, 4]) == 2
    assert load(connected([group_of(hnd.tensors, hnd.axes)]), digests, [0, 7, 6, 5]) == 2
    assert torch.equal(oracle_chunk(hnd, [0, 7, 6, 5]), oracle_chunk(nhd, [1, 2, 3, 4]))


def test_caches_of_other_shapes_never_share(device, connected):
    one = make_cache(BY_NAME["kv_first_nhd"], heads=2, device=device)
    other = make_cache(BY_NAME["kv_first_nhd"], heads=4, dim=4, device=device)
    digests = names(1)
    assert store(connected([group_of(one.tensors, one.axes)]), digests, [0, 1]) == 1
    before = other.snapshot()
    assert load(connected([group_of(other.tensors, other.axes)]), digests, [0, 1]) == 0
    assert untouched_outside(other, before, [])


def test_mp_083_several_groups_travel_together(device, connected):
    """Groups with their own block sizes, widths, dtypes and block ids."""
    kinds = [
        ("kv_first_hnd", 4, torch.float16),
        ("latent", 2, torch.uint8),
        ("fused_nhd", 8, torch.float32),
    ]
    caches = [
        make_cache(BY_NAME[name], blocks=16, tokens=tokens, dtype=dtype, device=device)
        for name, tokens, dtype in kinds
    ]
    for cache in caches:
        cache.fill_random(4)
    context = connected([group_of(cache.tensors, cache.axes) for cache in caches])
    ids = [[5, 1, 9, 3], [0, 1, 2, 3, 12, 13, 14, 15], [7, 2]]
    to = [[0, 2, 4, 6], [4, 5, 6, 7, 8, 9, 10, 11], [0, 15]]
    expected = [oracle_chunk(cache, i) for cache, i in zip(caches, ids, strict=True)]
    digests = names(2)
    assert context.submit_store(digests, ids).result.result(WAIT) == 2
    before = [cache.snapshot() for cache in caches]
    assert context.submit_retrieve(digests, to).result(WAIT) == 2
    for cache, blocks, wanted, was in zip(caches, to, expected, before, strict=True):
        assert torch.equal(oracle_chunk(cache, blocks), wanted)
        assert untouched_outside(cache, was, blocks)


@pytest.mark.parametrize(("skip", "kept"), [(0, 0), (2, 1), (6, 3), (8, 4), (42, 21), (99, 32)])
def test_mp_076_d27_skipped_leading_tokens_leave_whole_blocks_alone(skip, kept, device, connected):
    """Those blocks are shared with other requests; the skip runs on over every chunk."""
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=70, tokens=2, device=device)
    cache.fill_random(6)
    context = connected([group_of(cache.tensors, cache.axes)])
    digests = names(8)
    ids, to = list(range(32)), list(range(68, 36, -1))
    expected = oracle_chunk(cache, ids[kept:]) if kept < 32 else None
    store(context, digests, ids)
    before = cache.snapshot()
    assert load(context, digests, to, skip_first_n_tokens=skip) == 8
    assert untouched_outside(cache, before, to[kept:])
    if expected is not None:
        assert torch.equal(oracle_chunk(cache, to[kept:]), expected)


def test_absent_blocks_are_skipped(device, connected):
    cache = make_cache(BY_NAME["fused_hnd"], blocks=10, device=device)
    cache.fill_random(8)
    context = connected([group_of(cache.tensors, cache.axes)])
    digests = names(2)
    expected = oracle_chunk(cache, [1, 3])
    store(context, digests, [0, 1, 2, 3])
    before = cache.snapshot()
    assert load(context, digests, [ABSENT, 8, ABSENT, 9]) == 2
    assert torch.equal(oracle_chunk(cache, [8, 9]), expected)
    assert untouched_outside(cache, before, [8, 9])


def test_fault_a12_a_tail_that_is_no_whole_chunk_is_ignored(device, connected):
    """68 blocks for 8 whole chunks of 8: 4 tail blocks; and a prompt without a whole chunk."""
    cache = make_cache(BY_NAME["latent"], blocks=140, tokens=1, device=device)
    cache.fill_random(9)
    context = connected([group_of(cache.tensors, cache.axes)])
    ids = list(range(68))
    digests = names(8)
    expected = oracle_chunk(cache, ids[:64])
    before = cache.snapshot()
    assert store(context, digests, ids) == 8
    to = list(range(70, 138))
    assert load(context, digests, to) == 8
    assert torch.equal(oracle_chunk(cache, to[:64]), expected)
    assert untouched_outside(cache, before, to[:64])
    assert store(context, [], [0, 1, 2]) == 0
    assert load(context, [], [0, 1, 2]) == 0


def test_bad_block_ids_are_refused_before_anything_moves(device, connected):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=6, device=device)
    context = connected([group_of(cache.tensors, cache.axes)])
    before = cache.snapshot()
    digests = names(2)
    for ids, message in (
        ([[0, 1, 2]], "2 chunks need 4 blocks, got 3"),
        ([[0, 1], [2, 3]], "expected one list for each of 1 groups, got 2"),
    ):
        with pytest.raises(LayoutError, match=message):
            context.submit_store(digests, ids)
        with pytest.raises(LayoutError, match=message):
            context.submit_retrieve(digests, ids)
    for ids, message in (([0, 1, 2, 6], "got 6"), ([0, 1, 2, -5], "got -5")):
        with pytest.raises(LayoutError, match=message):
            store(context, digests, ids)
        with pytest.raises(LayoutError, match=message):
            load(context, digests, ids)
    with pytest.raises(LayoutError, match="named twice"):
        load(context, digests, [0, 1, 1, 2])
    with pytest.raises(LayoutError, match="got -1"):
        store(context, digests, [0, 1, ABSENT, 2])
    assert untouched_outside(cache, before, [])
    assert load(context, digests, [0, 1, 2, 3]) == 0


def test_a_chunk_is_stored_once_and_absent_ones_end_a_load(device, connected):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=12, device=device)
    cache.fill_random(10)
    context = connected([group_of(cache.tensors, cache.axes)])
    digests = names(4)
    assert store(context, digests[:2], [0, 1, 2, 3]) == 2
    assert store(context, digests[:3], [0, 1, 2, 3, 4, 5]) == 1
    before = cache.snapshot()
    assert load(context, digests, [6, 7, 8, 9, 10, 11, 0, 1]) == 3
    assert torch.equal(oracle_chunk(cache, [10, 11]), oracle_chunk(cache, [4, 5]))
    assert untouched_outside(cache, before, [6, 7, 8, 9, 10, 11])


def test_a_damaged_chunk_is_not_loaded_and_not_offered_again(device, mode):
    with spawn_server(size_gb=0.01, chunk_size=CHUNK_TOKENS) as server:
        cache = make_cache(BY_NAME["kv_first_nhd"], blocks=12, device=device)
        cache.fill_random(12)
        client = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)
        client.wait_ready(WAIT)
        context = plain_context(cache, client, mode=mode)
        digests = names(2)
        assert store(context, digests, [0, 1, 2, 3]) == 2
        assert damage_headers(server) == 2
        before = cache.snapshot()
        assert load(context, digests, [6, 7, 8, 9]) == 0
        assert untouched_outside(cache, before, [])
        assert store(context, digests[:1], [0, 1]) == 1  # it is missing now, so it can come again
        assert load(context, digests[:1], [6, 7]) == 1
        assert torch.equal(oracle_chunk(cache, [6, 7]), oracle_chunk(cache, [0, 1]))
        context.close()
        client.close()


@pytest.mark.parametrize("skipped", [0, CHUNK_TOKENS * 3 // 2])
@pytest.mark.parametrize("bit", [0, 31, 8 * 200 + 5, -1])
def test_a_flipped_bit_ends_a_load_before_its_chunk(bit, skipped, device, mode):
    """Wherever it is, also in a block that the load leaves out; the chunk is not offered again."""
    with spawn_server(size_gb=0.01, chunk_size=CHUNK_TOKENS) as server:
        cache = make_cache(BY_NAME["kv_first_hnd"], blocks=12, device=device)
        cache.fill_random(14)
        client = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)
        client.wait_ready(WAIT)
        context = plain_context(cache, client, mode=mode)
        digests = names(3)
        assert store(context, digests, [0, 1, 2, 3, 4, 5]) == 3
        flip_payload_bit(server, 1, bit % (8 * context.layout.nbytes))
        found = context.submit_retrieve(
            digests, [[6, 7, 8, 9, 10, 11]], skip_first_n_tokens=skipped
        )
        assert found.result(WAIT) == 1
        assert load(context, digests, [6, 7, 8, 9, 10, 11]) == 1
        assert torch.equal(oracle_chunk(cache, [6, 7]), oracle_chunk(cache, [0, 1]))
        assert store(context, digests, [0, 1, 2, 3, 4, 5]) == 1
        assert load(context, digests, [6, 7, 8, 9, 10, 11]) == 3
        context.close()
        client.close()


def test_chunks_that_are_left_out_whole_are_not_read_and_may_be_damaged(device, mode):
    with spawn_server(size_gb=0.01, chunk_size=CHUNK_TOKENS) as server:
        cache = make_cache(BY_NAME["kv_first_hnd"], blocks=12, device=device)
        cache.fill_random(15)
        client = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)
        client.wait_ready(WAIT)
        context = plain_context(cache, client, mode=mode)
        digests = names(3)
        assert store(context, digests, [0, 1, 2, 3, 4, 5]) == 3
        before = cache.snapshot()
        flip_payload_bit(server, 1, 77)
        found = context.submit_retrieve(
            digests, [[6, 7, 8, 9, 10, 11]], skip_first_n_tokens=2 * CHUNK_TOKENS
        )
        assert found.result(WAIT) == 3
        assert torch.equal(oracle_chunk(cache, [10, 11]), oracle_chunk(cache, [4, 5]))
        assert untouched_outside(cache, before, [10, 11])
        assert load(context, digests, [6, 7, 8, 9, 10, 11]) == 1
        context.close()
        client.close()


@pytest.mark.parametrize("where", ["server", "this process"])
def test_fault_a16_latents_of_rank_three_and_four_are_the_same(where, device, mode):
    """A prompt ends inside a chunk: its last 5 tokens stay behind. Through a server's arena and
    through one of this very process."""
    flat = [torch.zeros(9, 4, 24, dtype=torch.int16, device=device) for _ in range(3)]
    deep = [torch.zeros(9, 4, 1, 24, dtype=torch.int16, device=device) for _ in range(3)]
    for index, layer in enumerate(flat):
        layer.copy_(torch.arange(9 * 4 * 24).view(9, 4, 24) * (index + 3))
    shallow, nested = group_of(flat, "block token dim"), group_of(deep, "block token 1 dim")
    with ExitStack() as stack:
        if where == "server":
            server = stack.enter_context(spawn_server(size_gb=0.01, chunk_size=CHUNK_TOKENS))
            port = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)
            port.wait_ready(WAIT)
        else:
            port = EmbeddedCache(1 << 20, chunk_tokens=CHUNK_TOKENS)
        stack.callback(port.close)
        storing, loading = (context_of([group], port, mode=mode) for group in (shallow, nested))
        stack.callback(storing.close)
        stack.callback(loading.close)
        digest = names(1)
        assert store(storing, digest, [3, 5, 1, 7]) == 1
        assert load(loading, digest, [0, 8, 2, 4]) == 1
    for layer, same in zip(deep, flat, strict=True):
        assert torch.equal(layer[[0, 8], :, 0], same[[3, 5]])
        assert not layer[1:8].any()


def plain_context(cache, client, timeout=WAIT, mode="engine_driven"):
    return context_of([group_of(cache.tensors, cache.axes)], client, timeout, mode)


def context_of(groups, client, timeout=WAIT, mode="engine_driven"):
    return create_transfer_context(
        groups,
        mode,
        chunk_tokens=CHUNK_TOKENS,
        part=ShardPart(),
        instance=secrets.randbits(63),
        port=client,
        timeout=timeout,
    )


def load_again_and_again(context, digests, ids):
    """Until the loss of a server is noticed, its last answers may still be on their way."""
    while True:
        load(context, digests, ids)


def test_a_killed_server_fails_transfers_and_its_successor_serves_them(device, mode):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=12, device=device)
    cache.fill_random(13)
    digests = names(2)
    with spawn_server(size_gb=0.01, chunk_size=CHUNK_TOKENS) as first:
        client = CacheClient(first.url, chunk_tokens=CHUNK_TOKENS)
        client.wait_ready(WAIT)
        context = plain_context(cache, client, mode=mode)
        assert store(context, digests, [0, 1, 2, 3]) == 2
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(KVTransferError):
            load_again_and_again(context, digests, [6, 7, 8, 9])
        port = int(first.url.rsplit(":", 1)[1])
    with pytest.raises(PeerGone):
        store(context, digests, [0, 1, 2, 3])
    with spawn_server(port=port, size_gb=0.01, chunk_size=CHUNK_TOKENS):
        client.wait_ready(WAIT)
        assert load(context, digests, [6, 7, 8, 9]) == 0
        assert store(context, digests, [0, 1, 2, 3]) == 2
        assert load(context, digests, [6, 7, 8, 9]) == 2
        assert torch.equal(oracle_chunk(cache, [6, 7, 8, 9]), oracle_chunk(cache, [0, 1, 2, 3]))
        context.close()
        client.close()


def test_after_close_everything_is_refused_through_the_future(device, connected):
    cache = make_cache(BY_NAME["kv_first_nhd"], device=device)
    context = connected([group_of(cache.tensors, cache.axes)])
    context.close()
    context.close()
    with pytest.raises(Closed):
        store(context, names(1), [0, 1])
    with pytest.raises(Closed):
        load(context, names(1), [0, 1])
