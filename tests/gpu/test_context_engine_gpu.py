"""What only a worker that copies by itself does, on a GPU engine: the order of its work and ours."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from engine_suite import *  # noqa: F403
from engine_suite import BY_NAME, load, make_cache, names, oracle_chunk, store, torch

from lmcache_kernels.transfer.memory.pinning import PinnedRegion
from lmcache_kernels.transfer.moving.gpu_mover import GpuMover

pytestmark = pytest.mark.gpu

SPIN = 50_000_000
"""Cycles: some 25 ms."""


@pytest.fixture(scope="module")
def device():
    return "cuda:0"


def stored_content(context, cache, submit):
    """The bytes that are stored of blocks that hold 1, and for which the engine has queued 2."""
    cache.fill(1)
    torch.cuda.current_stream().synchronize()
    torch.cuda._sleep(SPIN)
    cache.fill(2)
    digests = names(1)
    assert submit(digests).result.result(30) == 1
    cache.fill(3)
    assert load(context, digests, [4, 5]) == 1
    return set(oracle_chunk(cache, [4, 5]).tolist())


def test_fault_b01_a_store_reads_what_the_engine_has_queued_and_not_computed(context_of, device):
    """100 times of 100, on the engine's stream, which another one of the engine's may be."""
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    context = context_of(cache)
    for turn in range(100):
        with torch.cuda.stream(torch.cuda.Stream() if turn % 2 else torch.cuda.default_stream()):
            found = stored_content(context, cache, lambda d: context.submit_store(d, [[0, 1]]))
        assert found == {2}


def test_fault_b01_without_the_wait_for_the_engine_it_would_be_seen(context_of, device):
    class Hasty(GpuMover):
        def ready(self):
            return None

    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    context = context_of(cache, mover=Hasty)
    store(context, names(1), [0, 1])  # so that nothing is compiled in the meantime
    found = [
        stored_content(context, cache, lambda d: context.submit_store(d, [[0, 1]]))
        for _ in range(5)
    ]
    assert {1} in found


def test_fault_j03_submits_do_not_wait_for_a_device_that_stands_still(context_of, device, request):
    """2000 small transfers, each a chunk; the 99th of a hundred takes less than a millisecond.

    The submits are the only work of their thread, and the garbage collector's walks are not theirs.
    """
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    context = context_of(cache)
    digests = names(1)
    store(context, digests, [0, 1])
    load(context, digests, [2, 3])
    torch.cuda._sleep(80 * SPIN)
    stands = torch.cuda.Event()
    stands.record()
    times, results = [], []
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    for _ in range(1000):
        for submit, ids in ((context.submit_store, [0, 1]), (context.submit_retrieve, [2, 3])):
            start = time.perf_counter()
            results.append(submit(digests, [ids]))
            times.append(time.perf_counter() - start)
    assert not stands.query()
    assert sorted(times)[int(0.99 * len(times))] < 1e-3
    assert results[-1].result(60) == 1
    assert results[-2].result.result(60) == 0


def test_mp_d16_recoveries_leave_no_thread_mapping_or_registration_behind(
    context_of, port, device, monkeypatch
):
    from engine_suite import CHUNK_TOKENS, EmbeddedCache

    alive = []
    made, closed = PinnedRegion.__init__, PinnedRegion.close

    def init(region, *arguments, **options):
        alive.append(region)
        made(region, *arguments, **options)

    def close(region, *then):
        closed(region, *then)
        alive.remove(region)

    monkeypatch.setattr(PinnedRegion, "__init__", init)
    monkeypatch.setattr(PinnedRegion, "close", close)
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    context = context_of(cache)
    counts = []
    for _ in range(4):
        digests = names(1)
        assert store(context, digests, [0, 1]) == 1
        assert load(context, digests, [2, 3]) == 1
        counts.append((len(alive), arenas_mapped(), transfer_threads()))
        port.inner.close()
        port.inner = EmbeddedCache(1 << 18, chunk_tokens=CHUNK_TOKENS)
    port.inner.close()
    assert counts == [counts[0]] * 4
    assert counts[0][0] == 1
    context.close()
    assert alive == []


def arenas_mapped():
    with open("/proc/self/maps") as maps:
        return sum("lmcache_kernels_" in line for line in maps)


def transfer_threads():
    """Registration in the background ends by itself at some time."""
    names = (thread.name for thread in threading.enumerate())
    return sum(name.startswith("lmcache-kernels") and "pin" not in name for name in names)


def followed_content(context, cache):
    """What is stored of each layer of blocks that hold 1, when layer n is queued to hold n and 2."""
    cache.fill(1)
    torch.cuda.current_stream().synchronize()
    digests = names(2)
    layers = range(len(cache.tensors))
    store = context.submit_layered_store(digests, [[0, 1, 2, 3]], [list(layers)])
    for layer in layers:
        torch.cuda._sleep(SPIN // 5)
        cache.tensors[layer].fill_(layer + 2)
        store.saved(layer)
    assert store.result.result(30) == 2
    cache.fill(9)
    assert load(context, digests, [4, 5, 6, 7]) == 2
    return [set(tensor[:, 4:8].unique().tolist()) for tensor in cache.tensors]


def test_a_layered_store_reads_what_the_engine_has_queued_for_each_layer(context_of, device):
    cache = make_cache(BY_NAME["kv_first_nhd"], layers=5, blocks=8, device=device)
    context = context_of(cache)
    for turn in range(20):
        with torch.cuda.stream(torch.cuda.Stream() if turn % 2 else torch.cuda.default_stream()):
            assert followed_content(context, cache) == [{layer + 2} for layer in range(5)]


def test_a_layered_store_that_does_not_wait_for_layers_would_be_seen(context_of, device):
    class Hasty(GpuMover):
        def ready(self):
            return None

    cache = make_cache(BY_NAME["kv_first_nhd"], layers=5, blocks=8, device=device)
    context = context_of(cache, mover=Hasty)
    store(context, names(1), [0, 1])  # so that nothing is compiled in the meantime
    found = [followed_content(context, cache) for _ in range(5)]
    assert any(content != [{layer + 2} for layer in range(5)] for content in found)


def test_a_flush_in_the_middle_of_a_layered_store_waits_for_the_device_only(context_of, device):
    """Not for the layers that the thread which flushes owes."""
    cache = make_cache(BY_NAME["kv_first_nhd"], layers=5, blocks=8, device=device)
    context = context_of(cache)
    store(context, names(1), [0, 1])
    for saved in range(5):
        cache.fill(1)
        digests = names(1)
        begun = context.submit_layered_store(digests, [[0, 1]], [list(range(5))])
        torch.cuda._sleep(SPIN)
        for place in range(saved):
            begun.saved(place)
        start = time.perf_counter()
        context.flush([begun], 30)
        assert time.perf_counter() - start < 10
        cache.fill(2)
        assert begun.result.exception(30) is not None
        assert load(context, digests, [2, 3]) == 0
