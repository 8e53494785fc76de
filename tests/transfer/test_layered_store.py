"""Stores that begin while the engine computes: how they end, whatever happens meanwhile."""

from __future__ import annotations

import random
import secrets
import threading
import time
from concurrent.futures import wait
from contextlib import ExitStack

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk
from engine_rig import Rig
from held_mover import HeldMover

from lmcache_kernels.errors import (
    CapacityError,
    Closed,
    KVTransferError,
    LayoutError,
    PeerGone,
    TransferTimeout,
)
from lmcache_kernels.transfer.engine_driven import layered_store, registration
from lmcache_kernels.transfer.engine_driven.layered_store import LayeredStore
from lmcache_kernels.transfer.messages import AbortStore, CommitStore, PrepareStore
from lmcache_kernels.transfer.moving.host_mover import HostMover

LAYERS = 4
WAIT = 30.0


class LayeredRig(Rig):
    """Whose engine computes layer by layer."""

    def __init__(self, closing, mover=HeldMover, **options):
        cache = make_cache(BY_NAME["kv_first_nhd"], layers=LAYERS, blocks=32)
        super().__init__(closing, cache=cache, mover=mover, **options)

    def store(self, digests, ids):
        return self.context.submit_layered_store(digests, [ids], [list(range(LAYERS))])

    def begun(self, digests, ids):
        """A store whose gather waits for the first layer."""
        store = self.store(digests, ids)
        assert self.mover.following.acquire(timeout=WAIT)
        return store

    def compute(self, store, ids, value, layers=range(LAYERS)):
        """The engine computes these layers and says so."""
        for layer in layers:
            self.cache.tensors[layer][:, ids] = value
            store.saved(layer)

    def load(self, digests, ids):
        return self.context.submit_retrieve(digests, [ids]).result(WAIT)

    def holds(self, ids, value):
        return all((tensor[:, ids] == value).all() for tensor in self.cache.tensors)


@pytest.fixture
def make():
    with ExitStack() as closing:
        yield lambda *arguments, **options: LayeredRig(closing, *arguments, **options)


@pytest.fixture
def rig(make):
    return make()


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


def assert_nothing_of(rig, digests):
    """Nothing of the store is found, or kept for it."""
    assert rig.load(digests, list(range(16, 16 + 2 * len(digests)))) == 0
    assert rig.stats()["writing"] == rig.stats()["used_bytes"] == 0


# --- how it goes ----------------------------------------------------------------------------------


def test_a_store_asks_for_room_before_the_engine_computes_and_ends_with_the_last_layer(rig):
    digests = names(2)
    store = rig.begun(digests, [0, 1, 2, 3])
    assert len(rig.port.of(PrepareStore)) == 1
    rig.compute(store, [0, 1, 2, 3], 5, range(LAYERS - 1))
    assert rig.mover.moves == []
    assert not store.result.done()
    rig.compute(store, [0, 1, 2, 3], 5, [LAYERS - 1])
    assert store.result.result(WAIT) == 2
    assert rig.load(digests, [8, 9, 10, 11]) == 2
    assert rig.holds([8, 9, 10, 11], 5)


@pytest.mark.parametrize("marks", [[3], [0, 3], [1, 0, 0, 3, 2, 3], [0, 1, 2, 99]])
def test_layers_may_be_left_out_repeated_and_overdone(make, marks):
    """One call covers all before; also a mover that copies at once needs no more than the last."""
    for mover in (HeldMover, HostMover):
        rig = make(mover)
        digests = names(1)
        store = rig.store(digests, [0, 1])
        rig.cache.tensors[2].fill_(7)
        for place in marks:
            store.saved(place)
        assert store.result.result(WAIT) == 1
        assert rig.load(digests, [8, 9]) == 1
        assert torch.equal(oracle_chunk(rig.cache, [8, 9]), oracle_chunk(rig.cache, [0, 1]))


def test_what_is_there_already_needs_no_layer(rig):
    digests = names(1)
    rig.store(digests, [0, 1]).saved(LAYERS)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 0
    assert rig.store([], []).result.result(WAIT) == 0


def test_layers_that_are_not_those_of_the_cache_are_refused_by_the_submit(rig):
    for layers in ([], [[0, 1, 2, 3], [0]], [[]], [[0, 1, 2]]):
        with pytest.raises(LayoutError, match="layers"):
            rig.context.submit_layered_store(names(1), [[0, 1]], layers)
    assert rig.port.sent == []


def test_stores_behind_it_keep_their_order(rig):
    ended = []
    first = rig.begun(names(1), [0, 1])
    second = rig.context.submit_store(names(1), [[2, 3]])
    third = rig.store(names(1), [4, 5])
    for number, store in enumerate((first, second, third)):
        store.result.add_done_callback(lambda _, number=number: ended.append(number))
    third.saved(LAYERS - 1)
    assert rig.load(names(1), [8, 9]) == 0  # loads wait for nobody
    assert ended == []
    first.saved(LAYERS - 1)
    assert [one.result.result(WAIT) for one in (first, second, third)] == [1, 1, 1]
    assert ended == [0, 1, 2]


def test_saying_that_a_layer_is_saved_waits_for_nobody(rig):
    """Neither a server nor a device that stands still."""
    rig.port.hold(PrepareStore)
    times = []
    for _ in range(50):
        store = rig.store(names(1), [0, 1])
        for layer in range(LAYERS):
            start = time.perf_counter()
            store.saved(layer)
            times.append(time.perf_counter() - start)
    assert sorted(times)[int(0.9 * len(times))] < 1e-3


def test_without_the_arena_chunks_follow_one_after_the_other(rig, monkeypatch):
    def refuse(*_, **__):
        raise CapacityError("not in this container")

    monkeypatch.setattr(registration, "Attachment", refuse)
    digests = names(3)
    store = rig.begun(digests, [0, 1, 2, 3, 4, 5])
    rig.compute(store, [0, 1, 2, 3, 4, 5], 5)
    assert store.result.result(WAIT) == 3
    assert rig.load(digests, [8, 9, 10, 11, 12, 13]) == 3
    assert rig.holds([8, 9, 10, 11, 12, 13], 5)
    digests = names(2)
    store = rig.begun(digests, [0, 1, 2, 3])
    store.saved(1)
    rig.context.flush([store], WAIT)
    assert isinstance(store.result.exception(WAIT), Closed)
    assert rig.load(digests, [8, 9, 10, 11]) == 0
    assert rig.stats()["writing"] == 0


# --- in the middle --------------------------------------------------------------------------------


@pytest.mark.parametrize("computed", range(LAYERS))
@pytest.mark.parametrize("mover", [HeldMover, HostMover])
def test_a_flush_by_the_thread_that_owes_layers_ends_the_store(make, mover, computed):
    """A request that is preempted or aborted in the middle of a forward pass: no deadlock, its blocks
    are free, and what the engine says later does not bring the store back."""
    rig = make(mover)
    digests = names(2)
    ids = [0, 1, 2, 3]
    store = rig.begun(digests, ids) if mover is HeldMover else rig.store(digests, ids)
    rig.compute(store, ids, 5, range(computed))
    start = time.monotonic()
    rig.context.flush([store], WAIT)
    assert time.monotonic() - start < WAIT / 2
    rig.compute(store, ids, 6, range(computed, LAYERS))
    with pytest.raises(Closed, match="stopped before"):
        store.result.result(WAIT)
    assert mover is not HeldMover or rig.mover.moves == []
    assert_nothing_of(rig, digests)
    again = rig.store(digests, ids)
    rig.compute(again, ids, 7)
    assert again.result.result(WAIT) == 2


def test_a_flush_before_the_server_has_answered_ends_the_store(rig):
    rig.port.hold(PrepareStore)
    digests = names(1)
    store = rig.store(digests, [0, 1])
    rig.port.wait_sent(PrepareStore)
    store.saved(1)
    rig.context.flush_inflight_stores(0.0)
    rig.port.let_go()
    with pytest.raises(Closed, match="stopped before"):
        store.result.result(WAIT)
    assert_nothing_of(rig, digests)


def test_a_flush_needs_no_server_in_the_middle_of_a_store(rig):
    rig.port.hold(AbortStore)
    store = rig.begun(names(1), [0, 1])
    rig.port.inner.close()
    rig.context.flush_inflight_stores(WAIT)
    assert isinstance(store.result.exception(WAIT), Closed)


def test_a_flush_of_a_store_whose_layers_are_all_saved_waits_for_the_gather(rig):
    """And the store goes on to its end, as any store does that has begun."""
    rig.mover.hold()
    digests = names(1)
    store = rig.begun(digests, [0, 1])
    rig.compute(store, [0, 1], 5)
    rig.mover.wait_queued(1)
    over = threading.Event()
    flushing = threading.Thread(target=lambda: (rig.context.flush([store], WAIT), over.set()))
    flushing.start()
    assert not over.is_set()
    rig.mover.let_go()
    flushing.join(WAIT)
    rig.cache.fill(9)
    assert store.result.result(WAIT) == 1
    assert rig.load(digests, [8, 9]) == 1
    assert rig.holds([8, 9], 5)


@pytest.mark.parametrize("mover", [HeldMover, HostMover])
def test_closing_in_the_middle_of_a_store_gives_its_room_back(make, mover):
    threads = set(threading.enumerate())
    rig = make(mover)
    store = rig.begun(names(1), [0, 1]) if mover is HeldMover else rig.store(names(1), [0, 1])
    behind = rig.store(names(1), [2, 3])
    store.saved(1)
    start = time.monotonic()
    rig.context.close()
    assert time.monotonic() - start < 3.0
    for one in (store, behind):
        assert isinstance(one.result.exception(WAIT), Closed)
        one.saved(LAYERS - 1)
    assert rig.stats()["used_bytes"] == 0
    assert set(threading.enumerate()) <= threads
    with pytest.raises(Closed):
        rig.store(names(1), [0, 1]).result.result(WAIT)


def test_layers_that_are_never_saved_are_waited_for_so_long_and_no_longer(make, monkeypatch):
    """Who comes behind is stored, and the room is given back."""
    rig = make()
    with monkeypatch.context() as patch:
        patch.setattr(layered_store, "MARKS_TIMEOUT", 0.05)
        digests = names(1)
        store = rig.store(digests, [0, 1])
        store.saved(LAYERS - 2)
        other = rig.context.submit_store(names(1), [[2, 3]])
        with pytest.raises(TransferTimeout, match="layer 3 of 3"):
            store.result.result(WAIT)
    assert other.result.result(WAIT) == 1
    assert len(rig.port.of(AbortStore)) == 1
    assert rig.stats()["writing"] == 0
    store.saved(LAYERS - 1)
    assert rig.load(digests, [8, 9]) == 0


@pytest.mark.parametrize("restarts", [True, False])
def test_a_server_that_dies_in_the_middle_costs_the_store_and_hangs_nobody(rig, restarts):
    digests = names(1)
    store = rig.begun(digests, [0, 1])
    store.saved(1)
    if restarts:
        rig.restart_server()
    else:
        rig.port.inner.close()
    store.saved(LAYERS - 1)
    with pytest.raises(KVTransferError):
        store.result.result(WAIT)
    if not restarts:
        rig.restart_server()
    assert_nothing_of(rig, digests)
    again = rig.store(digests, [0, 1])
    again.saved(LAYERS - 1)
    assert again.result.result(WAIT) == 1


def test_a_new_server_never_hears_of_the_old_ones_ticket(rig):
    """It gives out one of the same number, which must not be ended or published."""
    store = rig.begun(names(1), [0, 1])
    rig.restart_server()
    assert rig.load(names(1), [8, 9]) == 0  # which registers with it
    store.saved(LAYERS - 1)
    with pytest.raises(PeerGone):
        store.result.result(WAIT)
    assert rig.port.of(CommitStore) == rig.port.of(AbortStore) == []


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_every_store_ends_and_what_is_found_is_what_was_computed(make, seed):
    """Flushes, restarts, lost layers and ordinary stores in between, then a close."""
    chance = random.Random(seed)
    rig = make(HostMover if seed % 4 == 0 else HeldMover, timeout=5.0)
    stores, wanted, complete = [], {}, False
    for turn in range(40):
        block = 2 * chance.randrange(4)
        ids = [block, block + 1]
        if complete and chance.random() < 0.6:
            wait([stores[-1].result], WAIT)
        rig.context.flush_inflight_stores(WAIT)  # before blocks are used again
        digests = names(1)
        action = chance.random()
        if action < 0.8:
            store = rig.store(digests, ids)
            stores.append(store)
            wanted[digests[0]] = turn
            end = chance.randrange(LAYERS + 3)
            rig.compute(store, ids, turn, range(min(end, LAYERS)))
            complete = end >= LAYERS
            if end < LAYERS and chance.random() < 0.5:
                rig.context.flush([store], WAIT)
        elif action < 0.95:
            rig.cache.tensors[0][:, ids] = 99
            stores.append(rig.context.submit_store(digests, [ids]))
        else:
            rig.restart_server()
    rig.context.flush_inflight_stores(WAIT)
    assert not wait([store.result for store in stores], WAIT).not_done
    for store in stores:
        error = store.result.exception()
        assert error is None or isinstance(error, KVTransferError)
    assert any(store.result.exception() is None for store in stores)
    for digest, value in wanted.items():
        if rig.load([digest], [20, 21]):
            assert rig.holds([20, 21], value)
    assert rig.stats()["writing"] == rig.stats()["reads"] == 0


def test_what_is_said_after_a_stop_is_not_heard(rig):
    """Also by a gather that has not noticed: the blocks are another's. What was said before counts."""
    store = LayeredStore(rig.mover, [[0, 1, 2]], 2)
    store.saved(1)
    assert store.begin()
    assert not store.stop()
    store.saved(2)
    assert store.wait(1) is None
    with pytest.raises(Closed, match="layer 2"):
        store.wait(2)
