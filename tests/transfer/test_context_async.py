"""Transfers that go on beside the engine: in which order, until when, and how they end."""

from __future__ import annotations

import random
import secrets
import threading
import time
from concurrent.futures import wait
from contextlib import ExitStack

import pytest
import torch
from cachekit import BY_NAME, make_cache, untouched_outside
from engine_rig import CHUNK, Rig
from gate_port import GatePort

from lmcache_kernels.errors import (
    Closed,
    KVTransferError,
    LayoutError,
    LocalProtocolError,
    PeerGone,
    RemoteError,
    TransferFailed,
    TransferTimeout,
)
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven import attachment, worker
from lmcache_kernels.transfer.engine_driven.registration import Registration
from lmcache_kernels.transfer.messages import (
    AbortStore,
    Clear,
    CommitRetrieve,
    CommitStore,
    PrepareRetrieve,
    PrepareStore,
    Register,
    Unregister,
)
from lmcache_kernels.transfer.moving.moves import Over
from lmcache_kernels.transfer.store_transfer import StoreTransfer

WAIT = 30.0


@pytest.fixture
def make():
    with ExitStack() as closing:
        yield lambda **options: Rig(closing, **options)


@pytest.fixture
def rig(make):
    return make()


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


# --- submitting -----------------------------------------------------------------------------------


def test_mp_080_a_submit_returns_before_prepare_was_answered(rig):
    """The result of a store is there after its commit, that of a load after the device is done."""
    rig.port.hold(PrepareStore, PrepareRetrieve)
    digests = names(2)
    stored = rig.store(digests, [0, 1, 2, 3])
    loaded = rig.load(digests, [8, 9, 10, 11])
    rig.port.wait_sent(PrepareStore)
    rig.port.wait_sent(PrepareRetrieve)
    assert not stored.result.done()
    assert not loaded.done()
    rig.port.hold(CommitStore)
    rig.port.let_go()
    rig.port.hold(CommitStore)
    rig.port.wait_sent(CommitStore, timeout=WAIT)
    rig.port.let_go()
    assert stored.result.result(WAIT) == 2
    assert loaded.result(WAIT) == 0  # it was asked before the commit
    assert rig.load(digests, [8, 9, 10, 11]).result(WAIT) == 2
    assert rig.same([0, 1, 2, 3], [8, 9, 10, 11])


def test_mp_080_a_result_comes_only_after_the_commit(rig):
    rig.port.hold(CommitStore)
    transfer = rig.store(names(1), [0, 1])
    rig.port.wait_sent(CommitStore)
    assert not transfer.result.done()
    rig.port.let_go()
    assert transfer.result.result(WAIT) == 1


def test_mp_080_a_refused_commit_counts_no_chunk(rig):
    """The future says why, and the chunks can be stored again."""
    digests = names(2)
    rig.port.refuse(CommitStore, RemoteError("unknown_ticket", "cleared meanwhile"))
    with pytest.raises(RemoteError, match="cleared meanwhile"):
        rig.store(digests, [0, 1, 2, 3]).result.result(WAIT)
    rig.port.refuse(CommitStore, None)
    assert rig.load(digests, [8, 9, 10, 11]).result(WAIT) == 0
    assert rig.store(digests, [0, 1, 2, 3]).result.result(WAIT) == 2


def test_mp_080_chunks_cleared_while_they_were_written_are_not_published(rig):
    rig.mover.hold()
    digests = names(1)
    transfer = rig.store(digests, [0, 1])
    rig.mover.wait_queued(1)
    rig.port.inner.request(Clear(), 1.0).result()
    rig.mover.let_go()
    with pytest.raises(RemoteError, match="unknown_ticket"):
        transfer.result.result(WAIT)
    assert rig.load(digests, [8, 9]).result(WAIT) == 0
    assert rig.stats()["used_bytes"] == 0


@pytest.mark.parametrize("where", ["before the gather", "in the gather", "behind it"])
def test_mp_d29_a_store_that_fails_gives_its_slots_back_at_once(rig, where, monkeypatch):
    """Not only after the 600 seconds that a writer has: the server is told."""

    def fail(*_):
        raise RuntimeError("no such luck")

    rig.context.register()
    with monkeypatch.context() as patch:
        if where == "in the gather":
            patch.setattr(rig.mover, "before", fail)
        else:
            name = "erase_header" if where == "before the gather" else "write_header"
            patch.setattr(attachment.Attachment, name, fail)
        digests = names(2)
        with pytest.raises(RuntimeError, match="luck"):
            rig.store(digests, [0, 1, 2, 3]).result.result(WAIT)
    assert len(rig.port.of(AbortStore)) == 1
    assert rig.stats()["used_bytes"] == 0
    assert rig.store(digests, [0, 1, 2, 3]).result.result(WAIT) == 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 2, 32], "got 32"),
        ([0, 1, 2, -5], "got -5"),
        ([0, 1, 2, "3"], "expected integers"),
        ([0, 1, 2, 2.5], "expected integers"),
        ([0, 1, 2, 1 << 40], "expected ids below 32"),
    ],
)
def test_a_bad_id_fails_the_future_and_nothing_was_reserved(rig, ids, message):
    before = rig.cache.snapshot()
    for submit in (lambda: rig.store(names(2), ids).result, lambda: rig.load(names(2), ids)):
        with pytest.raises(LayoutError, match=message):
            submit().result(WAIT)
    assert rig.port.sent == []
    assert untouched_outside(rig.cache, before, [])


def test_repeated_destinations_and_bad_digests_fail_the_future(rig):
    with pytest.raises(LayoutError, match="named twice"):
        rig.load(names(2), [0, 1, 1, 2]).result(WAIT)
    with pytest.raises(LocalProtocolError, match=r"digests\[1\]: expected 32 bytes"):
        rig.store([*names(1), b"short"], [0, 1, 2, 3]).result.result(WAIT)
    with pytest.raises(LocalProtocolError, match=r"digests\[0\]: expected 32 bytes"):
        rig.load([7], [0, 1]).result(WAIT)
    assert rig.port.sent == []


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1, 2]], "2 chunks need 4 blocks, got 3"),
        ([[0, 1], [2, 3]], "one list for each of 1 groups, got 2"),
        ([7], "2 chunks need 4 blocks, got int"),
    ],
)
def test_lists_of_the_wrong_shape_are_refused_by_the_submit(rig, ids, message):
    for submit in (rig.context.submit_store, rig.context.submit_retrieve):
        with pytest.raises(LayoutError, match=message):
            submit(names(2), ids)
    assert rig.port.sent == []


@pytest.mark.parametrize("kind", [list, tuple, range, torch.tensor])
def test_the_callers_lists_are_its_own_after_the_submit(rig, kind):
    rig.port.hold(PrepareStore)
    ids = kind(range(8, 12)) if kind is not range else range(8, 12)
    digests = names(2)
    asked = list(digests)
    transfer = rig.store(asked, ids)
    asked.clear()
    if kind is list:
        ids[:] = [0, 0, 0, 0]
    elif kind is torch.tensor:
        ids.zero_()
    rig.port.let_go()
    assert transfer.result.result(WAIT) == 2
    assert rig.load(digests, [20, 21, 22, 23]).result(WAIT) == 2
    assert rig.same([8, 9, 10, 11], [20, 21, 22, 23])


def test_a_submit_of_many_chunks_costs_its_thread_next_to_nothing(make):
    """512 chunks of 16 blocks: their ids are not even looked at one by one."""
    rig = make(
        cache=make_cache(BY_NAME["latent"], layers=1, blocks=8192, tokens=1, dim=1), chunk=16
    )
    rig.port.hold(PrepareStore, PrepareRetrieve)
    ids = random.Random(5).sample(range(8192), 8192)
    digests = names(512)
    times = []
    for _ in range(20):
        for submit in (rig.store, rig.load):
            start = time.perf_counter()
            submit(digests, ids)
            times.append(time.perf_counter() - start)
    assert min(times) < 150e-6  # some 15, of which half for the copy of the list


def test_fault_j03_submits_do_not_wait_for_a_device_that_stands_still(rig):
    """2000 of them; the blocks are those of one chunk."""
    rig.mover.hold()
    digests = names(1)
    times = []
    for _ in range(1000):
        for submit in (rig.store, rig.load):
            start = time.perf_counter()
            submit(digests, [0, 1])
            times.append(time.perf_counter() - start)
    assert sorted(times)[int(0.99 * len(times))] < 1e-3


# --- order ----------------------------------------------------------------------------------------


def test_mp_d17_several_stores_of_a_request_each_count_and_end_in_order(rig):
    """A prompt of four chunks in four steps: no later store takes the place of an earlier one."""
    digests = names(4)
    ended = []
    rig.mover.hold()
    transfers = []
    for step in range(4):
        transfers.append(rig.store(digests[step : step + 1], [2 * step, 2 * step + 1]))
        transfers[-1].result.add_done_callback(lambda _, step=step: ended.append(step))
    rig.mover.wait_queued(4)  # the device has the next ones before the first is done
    rig.mover.let_go()
    assert [transfer.result.result(WAIT) for transfer in transfers] == [1, 1, 1, 1]
    assert ended == [0, 1, 2, 3]
    assert len(rig.port.of(CommitStore)) == 4
    assert rig.load(digests, list(range(16, 24))).result(WAIT) == 4
    assert rig.same(list(range(8)), list(range(16, 24)))


def test_a_load_does_not_wait_behind_stores(rig):
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    rig.port.hold(PrepareStore)
    slow = [rig.store(names(1), [2, 3]) for _ in range(3)]
    assert rig.load(digests, [8, 9]).result(WAIT) == 1
    rig.port.let_go()
    assert [one.result.result(WAIT) for one in slow] == [1, 1, 1]


# --- flush ----------------------------------------------------------------------------------------


def test_mp_081_after_a_flush_no_store_reads_the_cache(rig):
    """Eight stores at once; until the next submit no gather begins."""
    rig.mover.hold()
    transfers = [rig.store(names(1), [2 * i, 2 * i + 1]) for i in range(8)]
    rig.mover.wait_queued(3)
    flushing = threading.Thread(target=rig.context.flush_inflight_stores)
    flushing.start()
    rig.mover.let_go()
    flushing.join(WAIT)
    calls = len(rig.mover.moves)
    rig.cache.fill(0x77)
    outcomes = [transfer.result.exception(WAIT) for transfer in transfers]
    assert len(rig.mover.moves) == calls
    assert all(error is None or isinstance(error, Closed) for error in outcomes)
    assert outcomes[:3] == [None] * 3
    assert sum(error is None for error in outcomes) == calls
    assert rig.store(names(1), [0, 1]).result.result(WAIT) == 1


def test_mp_081_a_flush_waits_for_gathers_and_not_for_commits(rig):
    rig.port.hold(CommitStore)
    rig.mover.hold()
    transfer = rig.store(names(1), [0, 1])
    rig.mover.wait_queued(1)
    rig.mover.queued[0].touch_cache()
    rig.context.flush([transfer], 0.0)
    assert transfer.wanted
    rig.mover.let_go()
    rig.port.wait_sent(CommitStore)
    rig.context.flush_inflight_stores(0.0)
    assert not transfer.result.done()
    rig.port.let_go()
    assert transfer.result.result(WAIT) == 1


def test_mp_d28_a_flush_stops_what_still_waits_for_the_server(rig):
    """It takes no time, and what comes late is given back and reads nothing."""
    rig.port.hold(PrepareStore)
    digests = names(1)
    transfers = [rig.store(digests, [0, 1]), rig.store(names(1), [2, 3])]
    rig.port.wait_sent(PrepareStore)
    rig.context.flush_inflight_stores(0.0)
    rig.port.let_go()
    for transfer in transfers:
        with pytest.raises(Closed, match="stopped before"):
            transfer.result.result(WAIT)
    assert rig.mover.moves == []
    assert len(rig.port.of(PrepareStore)) == len(rig.port.of(AbortStore)) == 1
    assert rig.stats()["used_bytes"] == 0


def test_mp_d28_a_flush_is_bounded_and_what_it_gave_up_is_not_published(rig, caplog):
    """However many stores there are, the time is for all of them together."""
    rig.mover.hold()
    digests = names(4)
    transfers = [rig.store([digest], [0, 1]) for digest in digests]
    rig.mover.wait_queued(4)
    start = time.monotonic()
    rig.context.flush_inflight_stores(0.1)
    assert time.monotonic() - start < 0.3
    assert caplog.text.count("still read the cache") == 4
    rig.fill_blocks([0, 1], 9)
    rig.mover.let_go()
    for transfer in transfers:
        with pytest.raises(Closed, match="reused"):
            transfer.result.result(WAIT)
    assert rig.load(digests[:1], [8, 9]).result(WAIT) == 0
    assert rig.stats()["used_bytes"] == 0


@pytest.mark.parametrize("gone", ["before", "while it reads"])
def test_mp_d24_a_flush_waits_for_gathers_also_without_a_server(rig, gone):
    rig.mover.hold()
    transfer = rig.store(names(1), [0, 1])
    rig.mover.wait_queued(1)
    if gone == "before":
        rig.port.inner.close()
    over = threading.Event()
    flushing = threading.Thread(
        target=lambda: (rig.context.flush_inflight_stores(WAIT), over.set())
    )
    flushing.start()
    assert not over.is_set()  # nothing but the device lets it return
    rig.port.inner.close()
    rig.mover.let_go()
    assert over.wait(WAIT)
    flushing.join()
    assert isinstance(transfer.result.exception(WAIT), KVTransferError)


@pytest.mark.parametrize("held", ["server", "device", "nothing"])
def test_fault_b06_blocks_of_a_preempted_request_are_not_stored_with_new_content(rig, held):
    """The store was queued, the blocks are another request's now; whichever happens, a later load
    finds the old content or nothing."""
    digests = names(1)
    rig.fill_blocks([3, 4], 1)
    if held == "server":
        rig.port.hold(PrepareStore)
    elif held == "device":
        rig.mover.hold()
    transfer = rig.store(digests, [3, 4])
    if held == "device":
        rig.mover.wait_queued(1)
    rig.context.flush([transfer], 0.05)
    rig.fill_blocks([3, 4], 2)
    rig.port.let_go()
    rig.mover.let_go()
    wait([transfer.result], WAIT)
    loaded = rig.load(digests, [8, 9]).result(WAIT)
    assert loaded == 0 or held == "nothing"
    if loaded:
        assert all((tensor[:, [8, 9]] == 1).all() for tensor in rig.cache.tensors)


# --- loads that are late --------------------------------------------------------------------------


def test_mp_d23_a_load_that_is_late_never_touches_its_blocks(make):
    """The server answers after its deadline; its blocks may be another request's already."""
    rig = make(load_patience=0.05)
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    before = rig.cache.snapshot()
    rig.port.hold(PrepareRetrieve)
    late, behind = rig.load(digests, [8, 9]), rig.load(digests, [10, 11])
    submitted = time.monotonic()
    rig.port.wait_sent(PrepareRetrieve)
    assert not late.done()
    while time.monotonic() < submitted + 0.05:
        wait([late], 0.01)
    rig.port.let_go()
    for load in (late, behind):
        with pytest.raises(TransferTimeout, match="it has written nothing"):
            load.result(WAIT)
    assert untouched_outside(rig.cache, before, [])
    assert len(rig.port.of(PrepareRetrieve)) == 1  # the one behind did not even ask
    rig.context._load_patience = WAIT
    assert rig.load(digests, [8, 9]).result(WAIT) == 1
    assert rig.stats()["reads"] == 0


def test_mp_d23_once_the_device_has_a_load_its_result_comes_when_it_is_done(
    make, monkeypatch, caplog
):
    """Also after its deadline, and after any time that a device may take."""
    monkeypatch.setattr(worker, "DEVICE_TIMEOUT", 0.01)
    rig = make(load_patience=1.0)
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    rig.mover.hold()
    load = rig.load(digests, [8, 9])
    rig.mover.wait_queued(2)
    assert not wait([load], 1.0).done
    assert "has not finished a scatter" in caplog.text
    rig.mover.let_go()
    assert load.result(WAIT) == 1
    assert rig.same([0, 1], [8, 9])


def test_fault_c13_a_server_that_never_answers_costs_one_deadline(make):
    rig = make(timeout=0.1, load_patience=0.2)
    rig.context.register()
    rig.port.hold(PrepareRetrieve)
    start = time.monotonic()
    loads = [rig.load(names(1), [8, 9]) for _ in range(50)]
    for load in loads:
        with pytest.raises(TransferTimeout):
            load.result(WAIT)
    assert time.monotonic() - start < 5.0


# --- the end --------------------------------------------------------------------------------------


def arenas_mapped():
    with open("/proc/self/maps") as maps:
        return sum("lmcache_kernels_" in line for line in maps)


def test_mp_082_closing_ends_every_transfer_and_then_lets_go_of_the_arena(rig):
    """What the device has is finished, the rest is dropped; the arena is mapped until then."""
    mapped = arenas_mapped()
    rig.mover.hold()
    digests = names(1)
    first = rig.store(digests, [0, 1])
    rig.mover.wait_queued(1)
    rig.port.hold(PrepareStore, PrepareRetrieve)
    store, *stores = [rig.store(names(1), [2, 3]).result for _ in range(3)]
    load, *loads = [rig.load(names(1), [8, 9]) for _ in range(3)]
    rig.port.wait_sent(PrepareStore, 2)
    rig.port.wait_sent(PrepareRetrieve)
    closing = threading.Thread(target=rig.context.close)
    closing.start()
    for dropped in (*stores, *loads):
        assert isinstance(dropped.exception(WAIT), Closed)
    rig.port.let_go()
    assert isinstance(store.exception(WAIT), Closed)
    assert load.result(WAIT) == 0
    assert arenas_mapped() == mapped + 1
    rig.mover.let_go()
    closing.join(WAIT)
    assert first.result.result(0) == 1
    assert arenas_mapped() == mapped
    assert rig.mover.closed
    assert len(rig.port.of(Unregister)) == 1


def test_mp_082_closing_is_bounded_and_leaves_the_device_its_memory(rig, caplog):
    """A device that stands still: nothing is unmapped under it, and the server keeps its slots."""
    rig.mover.hold()
    transfer, load = rig.store(names(1), [0, 1]), rig.load(names(1), [8, 9])
    rig.mover.wait_queued(1)
    load.result(WAIT)
    mapped = arenas_mapped()
    start = time.monotonic()
    rig.context.close(0.1)
    assert time.monotonic() - start < 1.0
    assert "still run" in caplog.text
    assert arenas_mapped() == mapped
    assert not transfer.result.done()
    assert rig.port.of(Unregister) == []
    assert not rig.mover.closed
    rig.mover.let_go()
    assert isinstance(transfer.result.exception(WAIT), KVTransferError)  # it is not published


def test_a_gather_that_the_device_does_not_finish_is_given_up_and_keeps_its_memory(
    rig, monkeypatch
):
    monkeypatch.setattr(worker, "DEVICE_TIMEOUT", 0.05)
    rig.mover.hold()
    transfers = [rig.store(names(1), [0, 1]) for _ in range(5)]
    for transfer in transfers:
        with pytest.raises(TransferFailed, match="did not finish"):
            transfer.result.result(WAIT)
    assert rig.port.of(AbortStore) == []  # others must not get the slots yet
    assert rig.stats()["writing"] == 5
    mapped = arenas_mapped()
    rig.context.close(0.1)
    assert arenas_mapped() == mapped
    assert rig.stats()["writing"] == 5
    rig.mover.let_go()


def test_a_gather_that_was_given_up_and_is_over_holds_nothing_up(rig, monkeypatch):
    mapped = arenas_mapped()
    monkeypatch.setattr(worker, "DEVICE_TIMEOUT", 0.01)
    rig.mover.hold()
    with pytest.raises(TransferFailed):
        rig.store(names(1), [0, 1]).result.result(WAIT)
    rig.mover.let_go()
    rig.context.close()
    assert arenas_mapped() == mapped
    assert rig.stats()["writing"] == 0
    assert rig.mover.closed


def test_a_load_whose_server_answers_after_close_writes_nothing(rig):
    """The engine may have freed its cache by then."""
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    before = rig.cache.snapshot()
    rig.port.hold(PrepareRetrieve)
    load = rig.load(digests, [8, 9])
    rig.port.wait_sent(PrepareRetrieve)
    rig.context.close(0.05)
    rig.port.let_go()
    with pytest.raises(KVTransferError):
        load.result(WAIT)
    assert untouched_outside(rig.cache, before, [])


def test_fault_b04_closing_under_a_transfer_waits_and_later_submits_are_refused(rig, make):
    rig.mover.hold()
    digests = names(1)
    transfer = rig.store(digests, [0, 1])
    rig.mover.wait_queued(1)
    closing = threading.Thread(target=rig.context.close)
    closing.start()
    rig.mover.let_go()
    closing.join(WAIT)
    assert transfer.result.result(0) == 1
    for submit in (lambda: rig.store(digests, [0, 1]).result, lambda: rig.load(digests, [8, 9])):
        with pytest.raises(Closed):
            submit().result(WAIT)
    again = make()
    assert again.store(digests, [0, 1]).result.result(WAIT) == 1


@pytest.mark.parametrize("direction", ["store", "load"])
def test_fault_b04_a_new_server_takes_no_memory_from_under_a_transfer(rig, direction):
    """The old arena stays while the device is at it, and its ticket is not shown to the new server,
    whose tickets have the same numbers."""
    digests = names(1)
    mapped = arenas_mapped()
    if direction == "load":
        assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    rig.mover.hold()
    if direction == "store":
        transfer = rig.store(digests, [2, 3]).result
    else:
        transfer = rig.load(digests, [8, 9])
    count = 1 if direction == "store" else 2
    rig.mover.wait_queued(count)
    rig.restart_server()
    other = rig.store(names(1), [4, 5])
    rig.mover.wait_queued(count + 1)
    assert arenas_mapped() == mapped + 2  # the server's own was replaced, the attached ones are two
    rig.mover.queued[0].finish()
    if direction == "store":
        with pytest.raises(PeerGone):
            transfer.result(WAIT)
    else:
        assert transfer.result(WAIT) == 1
        assert rig.same([0, 1], [8, 9])
    assert rig.stats()["stored"] == 0
    rig.mover.let_go()
    assert other.result.result(WAIT) == 1
    assert rig.load(digests, [10, 11]).result(WAIT) == 0
    assert rig.stats()["stored"] == 1


def test_mp_d16_three_recoveries_leave_nothing_behind(rig):
    """Mappings and threads are as many as after the first registration."""
    rig.context.register()
    mapped, threads = arenas_mapped(), threading.active_count()
    for _ in range(3):
        rig.restart_server()
        digests = names(1)
        assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
        assert rig.load(digests, [8, 9]).result(WAIT) == 1
        assert (arenas_mapped(), threading.active_count()) == (mapped, threads)
    assert len(rig.port.of(Register)) == 4


def test_mp_d16_recoveries_leave_no_registered_memory_behind(monkeypatch):
    """One region at a time, given back when the arena it is of is not used any more."""
    alive = []

    class Region:
        pinned = True

        def __init__(self, address, nbytes, *, when_unused):
            alive.append(self)

        def close(self, then):
            alive.remove(self)
            then()

    monkeypatch.setattr(attachment, "PinnedRegion", Region)
    with EmbeddedCache(1 << 16, chunk_tokens=CHUNK) as first:
        port = GatePort(first)
        server = Registration(
            port,
            instance=1,
            shard=bytes(32),
            chunk_tokens=CHUNK,
            payload_bytes=100,
            pin=True,
            timeout=WAIT,
        )
        for _ in range(3):
            with server.attached():
                assert len(alive) == 1
                port.inner.close()
                port.inner = EmbeddedCache(1 << 16, chunk_tokens=CHUNK)
                with server.attached():
                    assert len(alive) == 2
            assert len(alive) == 1
        server.close(1.0, unregister=True)
        assert alive == []
        port.inner.close()


def test_closing_leaves_no_thread(make):
    before = set(threading.enumerate())
    rig = make()
    assert rig.store(names(1), [0, 1]).result.result(WAIT) == 1
    assert len(set(threading.enumerate()) - before) == 4
    rig.context.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("seed", range(12))
def test_every_future_finishes_exactly_once_whatever_happens(make, seed):
    """Failures, flushes, a restarted server, and a close in the midst of it."""
    chance = random.Random(seed)
    rig = make(timeout=5.0)
    finished = []

    def sometimes(direction):
        if chance.random() < 0.2:
            raise RuntimeError("no such luck")

    rig.mover.before = sometimes
    close_at = chance.randrange(5, 60)
    digests = names(8)
    futures = []
    for turn in range(60):
        action = chance.random()
        some = chance.sample(digests, 2)
        if action < 0.45:
            futures.append(rig.store(some, [0, 1, 2, 3]).result)
        elif action < 0.9:
            futures.append(rig.load(some, [8, 9, 10, 11]))
        elif action < 0.97:
            rig.context.flush_inflight_stores(WAIT)
        else:
            rig.restart_server()
        if futures:
            number = len(futures) - 1
            if action < 0.9:
                futures[-1].add_done_callback(lambda _, number=number: finished.append(number))
        if turn == close_at:
            closing = threading.Thread(target=rig.context.close)
            closing.start()
    closing.join(WAIT)
    assert not wait(futures, WAIT).not_done
    assert sorted(finished) == list(range(len(futures)))
    for future in futures:
        error = future.exception()
        assert error is None or isinstance(error, KVTransferError) or "luck" in str(error)
    assert rig.stats()["writing"] == rig.stats()["reads"] == 0


def test_a_read_is_ended_however_the_load_went(rig):
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1

    def fail(direction):
        raise RuntimeError("no such luck")

    rig.mover.before = fail
    with pytest.raises(RuntimeError):
        rig.load(digests, [8, 9]).result(WAIT)
    assert len(rig.port.of(CommitRetrieve)) == 1
    stats = rig.stats()
    assert (stats["reads"], stats["loads"], stats["loads_failed"]) == (0, 0, 1)


def test_a_flush_may_meet_a_store_that_goes_on_to_its_next_chunks():
    """What the gather reads is looked at once: the other thread takes it away at any time."""

    class Vanishing(StoreTransfer):
        looked = 0

        @property
        def _read(self):
            self.looked += 1
            return Over() if self.looked == 1 else None

        @_read.setter
        def _read(self, value):
            pass

    transfer = Vanishing()
    assert transfer.begin()
    transfer.launched(Over())
    assert transfer.wait_read(1.0)
