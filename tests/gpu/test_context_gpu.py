"""The engine-driven context of a GPU engine: staged, asynchronous, ordered by events."""

from __future__ import annotations

import pytest
from transfer_suite import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return "cuda:0"


def test_a_store_reads_what_the_engine_had_queued_and_not_yet_computed(connected, device):
    """Submitting returns while the device still computes; the gather waits for that work."""
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)  # noqa: F405
    context = connected([group_of(cache.tensors, cache.axes)])  # noqa: F405
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


def test_after_a_flush_the_blocks_may_be_overwritten(connected, device):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)  # noqa: F405
    context = connected([group_of(cache.tensors, cache.axes)])  # noqa: F405
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


def test_chunks_across_the_borders_of_pinned_pieces_move_whole(monkeypatch, device):
    """Memory is pinned in pieces, and no single copy may span two of them."""
    from lmcache_kernels.transfer.memory import pinning

    monkeypatch.setattr(pinning, "PIECE_BYTES", 1 << 16)
    cache = make_cache(  # noqa: F405
        BY_NAME["latent"],  # noqa: F405
        layers=4,
        blocks=40,
        dim=2048,
        device=device,
    )
    cache.fill_random(14)
    with spawn_server(size_gb=0.02, chunk_size=CHUNK_TOKENS) as server:  # noqa: F405
        client = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)  # noqa: F405
        client.wait_ready(WAIT)  # noqa: F405
        context = plain_context(cache, client)  # noqa: F405
        assert context.layout.nbytes > 1 << 16
        digests = names(10)  # noqa: F405
        ids, to = list(range(20)), list(range(20, 40))
        assert store(context, digests, ids) == 10  # noqa: F405
        assert load(context, digests, to) == 10  # noqa: F405
        assert torch.equal(oracle_chunk(cache, to), oracle_chunk(cache, ids))  # noqa: F405
        context.close()
        client.close()


def test_a_copy_that_fails_half_way_waits_for_what_was_queued(monkeypatch, connected, device):
    """The error comes when nothing touches the blocks or the slots any more, and work goes on."""
    from lmcache_kernels.transfer.moving.device import CudaDevice

    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=12, device=device)  # noqa: F405
    cache.fill_random(15)
    context = connected([group_of(cache.tensors, cache.axes)])  # noqa: F405

    def unlucky(*arguments, **named):
        raise RuntimeError("no such luck")

    digests = names(3)  # noqa: F405
    with monkeypatch.context() as patched:  # kernels are queued before
        patched.setattr(CudaDevice, "copy", unlucky)
        patched.setattr(CudaDevice, "copy_rows", unlucky)
        patched.setattr(CudaDevice, "copy_batch", unlucky)
        with pytest.raises(RuntimeError, match="luck"):
            store(context, digests, [0, 1, 2, 3, 4, 5])  # noqa: F405
    assert load(context, digests, [6, 7, 8, 9, 10, 11]) == 0  # noqa: F405
    assert store(context, digests, [0, 1, 2, 3, 4, 5]) == 3  # noqa: F405
    assert load(context, digests, [6, 7, 8, 9, 10, 11]) == 3  # noqa: F405


def test_closing_drops_what_has_not_begun_and_waits_for_what_has(connected, device):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)  # noqa: F405
    context = connected([group_of(cache.tensors, cache.axes)])  # noqa: F405
    torch.cuda._sleep(200_000_000)  # noqa: F405  # some 100 ms that every gather waits for
    transfers = [context.submit_store(names(1), [[0, 1]]) for _ in range(20)]  # noqa: F405
    context.close()
    outcomes = [transfer.result.exception(WAIT) for transfer in transfers]  # noqa: F405
    assert all(error is None or isinstance(error, Closed) for error in outcomes)  # noqa: F405
    assert any(isinstance(error, Closed) for error in outcomes)  # noqa: F405
    late = context.submit_store(names(1), [[0, 1]])  # noqa: F405
    assert isinstance(late.result.exception(WAIT), Closed)  # noqa: F405
    context.flush_inflight_stores(1.0)
