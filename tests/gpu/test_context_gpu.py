"""The engine-driven context of a GPU engine: staged, asynchronous, ordered by events."""

from __future__ import annotations

import pytest
from transfer_suite import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return "cuda:0"


def test_a_store_reads_what_the_engine_had_queued_and_not_yet_computed(connect, device):
    """Submitting returns while the device still computes; the gather waits for that work."""
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)  # noqa: F405
    context = connect([group_of(cache.tensors, cache.axes)])  # noqa: F405
    for _ in range(20):
        cache.fill(1)
        torch.cuda.current_stream().synchronize()  # noqa: F405
        torch.cuda._sleep(50_000_000)  # noqa: F405  # some 25 ms
        cache.fill(2)
        digests = names(1)  # noqa: F405
        transfer = context.submit_store(digests, [[0, 1]])
        assert transfer.result.result(WAIT) == 1  # noqa: F405
        assert load(context, digests, [4, 5]) == 1  # noqa: F405
        assert set(oracle_chunk(cache, [4, 5]).tolist()) == {2}  # noqa: F405


def test_after_a_flush_the_blocks_may_be_overwritten(connect, device):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)  # noqa: F405
    context = connect([group_of(cache.tensors, cache.axes)])  # noqa: F405
    stored = 0
    for _ in range(20):
        cache.fill(3)
        digests = names(1)  # noqa: F405
        transfer = context.submit_store(digests, [[0, 1]])
        context.flush([transfer])
        cache.fill(4)
        try:
            stored += transfer.result.result(WAIT)  # noqa: F405
        except Closed:  # noqa: F405
            continue  # stopped before it read anything
        assert load(context, digests, [4, 5]) == 1  # noqa: F405
        assert set(oracle_chunk(cache, [4, 5]).tolist()) == {3}  # noqa: F405
    assert context.submit_store(names(1), [[0, 1]]).result.result(WAIT) == 1  # noqa: F405
