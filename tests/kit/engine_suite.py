"""What only a worker that copies by itself does, on a CPU engine or a GPU one.

The CPU and GPU test modules import these tests and say where they run through ``device``.
"""

from __future__ import annotations

import secrets

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside
from gate_port import GatePort

from lmcache_kernels.errors import CapacityError, Closed, LayoutError
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven import inline_slots, registration
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.engine_driven.layered_load import LayeredLoad
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import CommitStore, PrepareStore, Register
from lmcache_kernels.transfer.moving.movers import mover_for
from lmcache_kernels.views import group_of

CHUNK_TOKENS = 8
WAIT = 30.0


@pytest.fixture
def port():
    """A cache in this process behind a gate."""
    with EmbeddedCache(1 << 18, chunk_tokens=CHUNK_TOKENS) as inner:
        yield GatePort(inner)


@pytest.fixture
def context_of(port):
    """Makes contexts at that cache and closes what was made."""
    made = []

    def make(*caches, **options):
        made.append(
            EngineDrivenContext(
                [group_of(cache.tensors, cache.axes) for cache in caches],
                chunk_tokens=CHUNK_TOKENS,
                shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
                instance=secrets.randbits(63),
                port=port,
                timeout=WAIT,
                **options,
            )
        )
        return made[-1]

    yield make
    for context in made:
        context.close()


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


def store(context, digests, *ids):
    return context.submit_store(digests, ids).result.result(WAIT)


def load(context, digests, *ids, **options):
    return context.submit_retrieve(digests, ids, **options).result(WAIT)


def test_mp_077_a_skip_that_ends_inside_a_block_is_rounded_down_and_logged(
    device, context_of, caplog
):
    """Of two groups only one has blocks that the skip divides."""
    small = make_cache(BY_NAME["kv_first_nhd"], blocks=14, tokens=2, device=device)
    large = make_cache(BY_NAME["latent"], blocks=7, tokens=8, device=device)
    for cache in (small, large):
        cache.fill_random(7)
    context = context_of(small, large)
    digests = names(1)
    store(context, digests, [0, 1, 2, 3], [0])
    before = [small.snapshot(), large.snapshot()]
    assert load(context, digests, [4, 5, 6, 7], [1]) == 1
    assert "skip_first_n_tokens" not in caplog.text
    assert load(context, digests, [8, 9, 10, 11], [2], skip_first_n_tokens=2) == 1
    assert untouched_outside(small, before[0], [4, 5, 6, 7, 9, 10, 11])
    assert untouched_outside(large, before[1], [1, 2])
    (record,) = [r for r in caplog.records if "skip_first_n_tokens" in r.getMessage()]
    assert record.levelname == "ERROR"
    assert "the 8 tokens of a block of group 1, got 2" in record.getMessage()
    caplog.clear()
    assert load(context, digests, [8, 9, 10, 11], [2], skip_first_n_tokens=3) == 1
    assert caplog.text.count("got 3") == 2


def test_mp_078_only_chunks_that_are_missing_are_gathered(device, port, context_of):
    """Chunks 0 and 2 are there: the slots of 1 and 3 are written and no other. All are there: there
    is no gather and no commit."""
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=20, device=device)
    cache.fill_random(16)
    gathered = []

    class Counting:
        def __init__(self, groups, layout):
            self._mover = mover_for(groups, layout, None)
            self.synchronous = self._mover.synchronous
            self.ready, self.close = self._mover.ready, self._mover.close
            self.scatter = self._mover.scatter

        def gather(self, moves, after, layers=None):
            gathered.append([move.blocks for move in moves])
            return self._mover.gather(moves, after, layers)

    context = context_of(cache, mover=Counting)
    digests = names(4)
    assert store(context, [digests[0], digests[2]], [0, 1, 4, 5]) == 2
    (registered,) = [r for q, r in port.replies if isinstance(q, Register)]
    arena = Arena.attach(registered.arena_name, registered.arena_bytes)
    before = bytes(arena.view(0, arena.nbytes))
    assert store(context, digests, list(range(8))) == 2
    (_, slots) = [r for q, r in port.replies if isinstance(q, PrepareStore)]
    after = bytearray(arena.view(0, arena.nbytes))
    arena.close()
    assert slots.indices == [1, 3]
    for offset in slots.offsets:
        span = slice(offset, offset + HEADER_BYTES + context.layout.nbytes)
        assert after[span] != before[span]
        after[span] = before[span]
    assert after == before
    assert gathered[1] == [((2, 3),), ((6, 7),)]
    commits = len(port.of(CommitStore))
    assert store(context, digests, list(range(8))) == 0
    assert (len(gathered), len(port.of(CommitStore))) == (2, commits)
    assert load(context, digests, list(range(8, 16))) == 4
    assert torch.equal(oracle_chunk(cache, list(range(8, 16))), oracle_chunk(cache, list(range(8))))


@pytest.mark.parametrize("by_message", ["store", "load", "both"])
@pytest.mark.parametrize("layout", ["kv_first_nhd", "fused_hnd", "latent"])
def test_mp_079_without_the_arena_chunks_go_through_messages_with_the_same_result(
    by_message, layout, device, port, context_of, monkeypatch, caplog
):
    """In parts, for a chunk is larger than a message; the other worker may have the arena mapped."""
    monkeypatch.setattr(inline_slots, "MAX_PART", 300)
    source = make_cache(BY_NAME[layout], blocks=20, device=device)
    target = make_cache(BY_NAME[layout], blocks=20, device=device)
    source.fill_random(21)
    contexts = []
    for direction, cache in (("store", source), ("load", target)):
        with monkeypatch.context() as patch:
            if by_message in (direction, "both"):
                patch.setattr(registration, "Attachment", refuse_to_map)
            contexts.append(context_of(cache))
            contexts[-1].register()
    storing, loading = contexts
    assert caplog.text.count("cannot be mapped") == (2 if by_message == "both" else 1)
    digests = names(3)
    ids, to = [7, 0, 3, 11, 5, 2], [1, 10, 4, 8, 0, 9]
    assert store(storing, [digests[1]], [3, 11]) == 1
    assert store(storing, digests, ids) == 2
    before = target.snapshot()
    assert load(loading, [*digests, *names(1)], [*to, 12, 13]) == 3
    assert torch.equal(oracle_chunk(target, to), oracle_chunk(source, ids))
    assert untouched_outside(target, before, to)
    assert load(loading, digests, [14, 15, 16, 17, 18, 19], skip_first_n_tokens=12) == 3
    assert untouched_outside(target, before, [*to, 17, 18, 19])


def refuse_to_map(*_, **__):
    raise CapacityError("not in this container")


def test_fault_b03_transfers_back_to_back_through_memory_that_is_not_pinned(
    device, context_of, monkeypatch
):
    """Six stores and six loads of other content each, none of which waits for the one before: no
    memory in between is used again too early."""
    cache = make_cache(BY_NAME["kv_first_hnd"], blocks=48, device=device)
    cache.fill_random(17)
    context = context_of(cache)
    monkeypatch.setattr(context._server, "_pin", False)
    digests = names(12)
    parts = [(digests[2 * n : 2 * n + 2], list(range(4 * n, 4 * n + 4))) for n in range(6)]
    stores = [context.submit_store(some, [ids]) for some, ids in parts]
    assert [one.result.result(WAIT) for one in stores] == [2] * 6
    loads = [context.submit_retrieve(some, [[b + 24 for b in ids]]) for some, ids in parts]
    assert [one.result(WAIT) for one in loads] == [2] * 6
    assert torch.equal(
        oracle_chunk(cache, list(range(24, 48))), oracle_chunk(cache, list(range(24)))
    )


def layered(context, digests, ids, layers=((0, 1),)):
    return context.submit_layered_retrieve(digests, [ids], layers)


def test_a_layered_load_brings_what_any_load_brings(device, context_of):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=20, device=device)
    cache.fill_random(3)
    context = context_of(cache)
    digests = names(4)
    store(context, digests, list(range(8)))
    load = layered(context, digests, list(range(8, 16)), [[1, 0]])
    assert all(load.wait_layer(place, WAIT) for place in (0, 1))
    assert load.result.result(WAIT) == 4
    assert torch.equal(oracle_chunk(cache, list(range(8, 16))), oracle_chunk(cache, list(range(8))))


def test_a_layered_load_of_what_is_not_there_lets_the_engine_go_on(device, context_of):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    context = context_of(cache)
    load = layered(context, names(1), [0, 1])
    assert load.wait_layer(0, WAIT)
    assert load.wait_layer(1, WAIT)
    assert load.result.result(WAIT) == 0


def test_layers_that_are_not_those_of_the_cache_fail_the_load(device, context_of):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    cache.fill_random(4)
    context = context_of(cache)
    digests = names(1)
    store(context, digests, [0, 1])
    for layers in ([], [[0, 1], [2, 3]], [[]], [[0, 1, 2]]):
        load = layered(context, digests, [4, 5], layers)
        with pytest.raises(LayoutError, match="layers"):
            load.result.result(WAIT)
        assert load.wait_layer(0, WAIT)
    assert layered(context, digests, [4, 5]).result.result(WAIT) == 1


def test_a_layer_that_does_not_come_is_waited_for_so_long_and_no_longer(device, context_of, port):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    load = LayeredLoad(context_of(cache)._mover)
    assert not load.wait_layer(0, 0.01)
    load.result.set_exception(CapacityError("no"))
    assert load.wait_layer(0, 0.01)


def test_a_layered_store_reads_each_layer_once_it_was_said_to_be_saved(device, context_of):
    """Not what was in the blocks when it was submitted; the engine computes them in any order."""
    cache = make_cache(BY_NAME["kv_first_nhd"], layers=5, blocks=20, device=device)
    context = context_of(cache)
    cache.fill(1)
    digests = names(3)
    order = [3, 0, 4, 1, 2]
    store = context.submit_layered_store(digests, [list(range(6))], [order])
    for place in range(5):
        cache.tensors[order.index(place)].fill_(place + 2)
        store.saved(place)
    assert store.result.result(WAIT) == 3
    before = oracle_chunk(cache, list(range(6)))
    assert load(context, digests, list(range(8, 14))) == 3
    assert torch.equal(oracle_chunk(cache, list(range(8, 14))), before)


def test_a_layered_store_that_is_flushed_in_the_middle_is_not_found(device, context_of, port):
    cache = make_cache(BY_NAME["kv_first_nhd"], layers=3, blocks=8, device=device)
    cache.fill_random(5)
    context = context_of(cache)
    digests = names(2)
    for saved in range(3):
        begun = context.submit_layered_store(digests, [[0, 1, 2, 3]], [[0, 1, 2]])
        for place in range(saved):
            begun.saved(place)
        context.flush_inflight_stores(WAIT)
        cache.fill(9)
        begun.saved(2)
        with pytest.raises(Closed, match="stopped before"):
            begun.result.result(WAIT)
        assert load(context, digests, [4, 5, 6, 7]) == 0
    assert port.inner.stats()["writing"] == 0
    assert store(context, digests, [0, 1, 2, 3]) == 2
