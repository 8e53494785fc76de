"""A worker's half against a real cache in this process, on a small CPU cache."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside
from held_mover import HeldMover

from lmcache_kernels.adapters.vllm import worker as worker_module
from lmcache_kernels.adapters.vllm.jobs import LoadJob, StepJobs, StoreJob
from lmcache_kernels.adapters.vllm.worker import WorkerSide, places_of
from lmcache_kernels.errors import TransferFailed
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.messages import Clear, Unregister
from lmcache_kernels.views import group_of

CHUNK = 8  # two blocks of four tokens


@pytest.fixture
def cache():
    with EmbeddedCache(1 << 20, chunk_tokens=CHUNK) as running:
        yield running


@pytest.fixture
def pages():
    made = make_cache(BY_NAME["kv_first_nhd"], blocks=24)
    made.fill_random(1)
    return made


@pytest.fixture
def make(cache, pages):
    contexts = []

    def build(*, writer=True, per_block=1, mover=None, layers=None, **options):
        context = EngineDrivenContext(
            [group_of(pages.tensors, pages.axes)],
            chunk_tokens=CHUNK,
            shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
            instance=secrets.randbits(63),
            port=cache,
            mover=mover,
        )
        contexts.append(context)
        return WorkerSide(context, writer=writer, pages=[per_block], layers=layers, **options)

    yield build
    for context in contexts:
        context.close()


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


def stores(*jobs):
    return StepJobs(stores=[StoreJob(*job) for job in jobs])


def run_stores(worker, step):
    worker.begin_step(step)
    worker.start_loads(step)
    worker.start_stores()


def test_the_context_hears_whether_the_engine_decodes(make):
    worker = make()
    for decoding in (True, False, True):
        worker.begin_step(StepJobs(decoding=decoding))
        assert worker._context.decoding is decoding


def loads(*jobs, synchronous=False):
    return StepJobs(loads=[LoadJob(*job, synchronous) for job in jobs])


def test_a_stored_chunk_comes_back_and_both_jobs_are_reported_once(make, pages):
    worker = make()
    digests = names(2)
    run_stores(worker, stores((1, digests, [[0, 1, 2, 3]])))
    assert worker.poll() == (set(), set())
    assert worker.take_report().over == {1: 1}
    worker.start_loads(loads((2, "a", digests, [[8, 9, 10, 11]], 0)))
    assert worker.poll() == ({"a"}, set())
    assert worker.poll() == (set(), set())
    report = worker.take_report()
    assert (report.over, report.failed) == ({2: 1}, set())
    assert not worker.take_report()
    assert worker.take_bad_blocks() == set()
    assert torch.equal(oracle_chunk(pages, [8, 9, 10, 11]), oracle_chunk(pages, [0, 1, 2, 3]))


@pytest.mark.parametrize("synchronous", [False, True])
def test_fault_c01_a_load_that_ends_early_names_the_blocks_from_there_on(make, pages, synchronous):
    """Chunk 2 of 4 is missing: its blocks and all later ones are bad, and they are named in the
    pass that says the load is over, once."""
    worker = make()
    digests = names(4)
    run_stores(worker, stores((1, digests[:2], [[0, 1, 2, 3]])))
    worker.poll()
    worker.take_report()
    to = [8, 9, 10, 11, 12, 13, 14, 15]
    before = pages.snapshot()
    worker.start_loads(loads((2, "a", digests, [to], 0), synchronous=synchronous))
    expected = (set(), set()) if synchronous else ({"a"}, {"a"})
    assert worker.poll() == expected
    assert worker.take_bad_blocks() == {12, 13, 14, 15}
    assert worker.take_bad_blocks() == set()
    report = worker.take_report()
    assert (report.over, report.failed) == ({2: 1}, {2})
    assert untouched_outside(pages, before, to[:4])


def test_fault_c01_every_way_to_fail_flags_every_block_it_should_have_filled(make, cache, pages):
    """Nothing stored, a server that lost the worker, a closed cache, ids that cannot be."""
    worker = make()
    bad = {"nothing stored": {6, 7}, "closed": {6, 7}}
    for number, (what, blocks) in enumerate(bad.items()):
        if what == "closed":
            cache.close()
        worker.start_loads(loads((number, what, names(1), [[6, 7]], 0)))
        assert worker.poll() == ({what}, {what})
        assert worker.take_bad_blocks() == blocks
        assert worker.take_report().failed == {number}
    worker.start_loads(loads((9, "no such block", names(1), [[6, 99]], 0)))
    assert worker.poll() == ({"no such block"}, {"no such block"})
    assert worker.take_bad_blocks() == {6, 99}


def test_blocks_that_were_skipped_or_absent_are_never_bad(make):
    worker = make()
    worker.start_loads(loads((1, "a", names(2), [[4, 5, -1, 7]], 5)))
    worker.poll()
    assert worker.take_bad_blocks() == {5, 7}


def test_a_load_without_chunks_has_failed(make):
    worker = make()
    worker.start_loads(loads((1, "a", [], [[4, 5]], 0)))
    assert worker.poll() == ({"a"}, {"a"})
    assert worker.take_bad_blocks() == {4, 5}


def test_a_rank_that_holds_copies_reports_stores_and_writes_nothing(make, cache, pages):
    digests = names(1)
    reader = make(writer=False)
    run_stores(reader, stores((1, digests, [[0, 1]])))
    assert reader.take_report().over == {1: 1}
    reader.start_loads(loads((2, "a", digests, [[4, 5]], 0)))
    assert reader.poll() == ({"a"}, {"a"})
    run_stores(make(), stores((3, digests, [[0, 1]])))
    reader.start_loads(loads((4, "a", digests, [[4, 5]], 0)))
    assert reader.poll() == ({"a"}, set())


def test_a_store_that_cannot_be_is_over_at_once(make):
    worker = make()
    run_stores(worker, stores((1, names(1), [[0, 99]])))
    worker.poll()
    assert worker.take_report().over == {1: 1}


def test_a_store_of_what_is_there_or_does_not_fit_is_over_and_harmless(make, cache, pages):
    worker = make()
    digests = names(1)
    for job in (1, 2):
        run_stores(worker, stores((job, digests, [[0, 1]])))
    worker.poll()
    assert worker.take_report().over == {1: 1, 2: 1}
    cache.request(Clear(), 1.0).result()
    worker.start_loads(loads((3, "a", digests, [[4, 5]], 0)))
    assert worker.poll() == ({"a"}, {"a"})


def test_stores_of_a_step_whose_end_was_left_out_start_before_the_next_or_are_given_up(make):
    worker = make()
    worker.begin_step(stores((1, names(1), [[0, 1]]), (2, names(1), [[2, 3]])))
    assert worker.poll() == (set(), set())
    assert not worker.take_report()
    worker.fence(StepJobs(fence=[2]))
    worker.poll()
    assert worker.take_report().over == {1: 1, 2: 1}
    digests = names(1)
    run_stores(worker, stores((3, digests, [[2, 3]])))
    worker.poll()
    assert worker.take_report().over == {3: 1}


def test_a_worker_the_server_forgot_registers_again(make, cache, pages):
    worker = make()
    digests = names(1)
    run_stores(worker, stores((1, digests, [[0, 1]])))
    cache.request(Unregister(instance=worker._context.instance), 1.0).result()
    worker.start_loads(loads((2, "a", digests, [[4, 5]], 0)))
    assert worker.poll() == ({"a"}, {"a"})
    worker.start_loads(loads((3, "a", digests, [[4, 5]], 0)))
    assert worker.poll() == ({"a"}, set())
    assert torch.equal(oracle_chunk(pages, [4, 5]), oracle_chunk(pages, [0, 1]))


def test_closing_twice_is_fine_and_fencing_unknown_jobs_too(make):
    worker = make()
    worker.fence(StepJobs(fence=[1, 77]))
    worker.close()
    worker.close()


def test_fault_a05_blocks_that_the_attention_kernel_cuts_into_pages(make, pages):
    """The scheduler counts blocks of two pages; loads fill and failures name whole blocks."""
    worker = make(per_block=2)
    digests = names(2)
    run_stores(worker, stores((1, digests, [[3, 0]])))
    worker.start_loads(loads((2, "r", digests, [[10, 6]], 0)))
    worker.poll()
    assert torch.equal(oracle_chunk(pages, [20, 21, 12, 13]), oracle_chunk(pages, [6, 7, 0, 1]))
    assert worker.take_bad_blocks() == set()
    worker.start_loads(loads((3, "r", [digests[0], *names(1)], [[9, 8]], 0)))
    worker.poll()
    assert torch.equal(oracle_chunk(pages, [18, 19]), oracle_chunk(pages, [6, 7]))
    assert worker.take_bad_blocks() == {8}
    worker.start_loads(loads((4, "r", names(2), [[ABSENT, 5]], 0)))
    worker.poll()
    assert worker.take_bad_blocks() == {5}


LAYERS = [["model.layers.0.attn", "model.layers.1.attn"]]
WAIT = 30.0


class LayerByLayer(HeldMover):
    """Holds what is queued; a load's layers are there when the test says so."""

    def __init__(self, groups, layout):
        super().__init__(groups, layout)
        self.joined = []
        self.orders = []

    def scatter(self, moves, after, layers=None):
        self.orders.append(layers)
        moved = super().scatter(moves, after)
        if layers is None:
            return moved
        return replace(moved, layers=[(0, "layer 0"), (1, "layer 1")])

    def join(self, point):
        self.joined.append(point)


@pytest.fixture
def layered(make):
    """A worker whose synchronous loads come by layers, and its mover."""
    movers = []

    def mover(groups, layout):
        movers.append(LayerByLayer(groups, layout))
        return movers[-1]

    worker = make(mover=mover, layers=LAYERS)
    return worker, movers[0]


def stored(worker, digests, ids):
    run_stores(worker, stores((1, digests, [ids])))
    worker._stores[1].result.result(WAIT)
    worker.poll()
    worker.take_report()


def test_a_step_begins_with_the_first_layers_of_a_synchronous_load(layered, pages):
    worker, mover = layered
    digests = names(2)
    stored(worker, digests, [0, 1, 2, 3])
    mover.hold()
    worker.start_loads(loads((2, "a", digests, [[8, 9, 10, 11]], 0), synchronous=True))
    worker.wait_layer(LAYERS[0][0])
    assert mover.joined == ["layer 0"]
    worker.wait_layer(LAYERS[0][1])
    assert mover.joined == ["layer 0", "layer 1"]
    assert mover.orders == [[[0, 1]]]
    assert not worker.take_report()
    mover.let_go()
    worker.start_stores()
    assert worker.take_report().over == {2: 1}
    assert worker.take_bad_blocks() == set()
    assert torch.equal(oracle_chunk(pages, [8, 9, 10, 11]), oracle_chunk(pages, [0, 1, 2, 3]))


def test_a_layered_load_that_ends_early_names_the_blocks_when_the_step_is_over(layered):
    worker, _ = layered
    digests = names(2)
    stored(worker, digests[:1], [0, 1])
    worker.start_loads(loads((2, "a", digests, [[8, 9, 10, 11]], 0), synchronous=True))
    worker.wait_layer(LAYERS[0][0])
    assert worker.poll() == (set(), set())
    assert worker.take_bad_blocks() == {10, 11}
    assert worker.take_report().failed == {2}


def test_layers_that_no_load_is_about_and_steps_without_loads_wait_for_nothing(layered):
    worker, mover = layered
    worker.wait_layer(LAYERS[0][0])
    worker.start_loads(StepJobs())
    worker.wait_layer("another.layer.7")
    worker.start_stores()
    assert mover.joined == []


def test_asynchronous_loads_do_not_come_by_layers(layered):
    worker, mover = layered
    digests = names(1)
    stored(worker, digests, [0, 1])
    worker.start_loads(loads((2, "a", digests, [[8, 9]], 0)))
    worker.wait_layer(LAYERS[0][0])
    mover.wait_queued(2)
    assert mover.orders == [None]
    assert mover.joined == []


def test_layers_are_needed_in_the_order_of_the_numbers_in_their_names():
    groups = [["m.layers.10.attn", "m.layers.2.attn"], ["m.layers.9.attn"]]
    assert places_of(groups) == {
        "m.layers.2.attn": 0,
        "m.layers.9.attn": 1,
        "m.layers.10.attn": 2,
    }


@pytest.fixture
def late(layered, monkeypatch):
    """A worker inside a step, whose layered load the device gets only when the test says so."""
    worker, mover = layered
    digests = names(2)
    stored(worker, digests, [0, 1, 2, 3])
    monkeypatch.setattr(worker_module, "LAYER_TIMEOUT", 0.01)
    go = threading.Event()
    mover.before = lambda direction: go.wait(WAIT)
    worker.start_loads(loads((2, "a", digests, [[8, 9, 10, 11]], 0), synchronous=True))
    yield worker, mover, go
    go.set()


def test_a_load_with_a_layer_that_came_too_late_has_failed(late):
    """The step has used what was in its blocks before, whatever comes later."""
    worker, mover, go = late
    worker.wait_layer(LAYERS[0][0])
    go.set()
    worker.wait_layer(LAYERS[0][1])
    assert mover.joined == []
    worker.start_stores()
    assert worker.take_report().failed == {2}
    assert worker.take_bad_blocks() == {8, 9, 10, 11}


def test_only_one_layer_of_a_late_load_is_waited_for(late, caplog):
    worker, _, go = late
    for _ in range(100):
        worker.wait_layer(LAYERS[0][0])
    assert caplog.text.count("is not there") == 1
    go.set()
    worker.start_stores()


# --- stores that follow a step --------------------------------------------------------------------


@pytest.fixture
def followed(make):
    """A worker whose stores go along with a step, and its mover."""
    movers = []

    def mover(groups, layout):
        movers.append(HeldMover(groups, layout))
        return movers[-1]

    worker = make(mover=mover, layers=LAYERS, stores_by_layer=True)
    return worker, movers[0]


def ended(worker, *jobs):
    for job in jobs:
        error = worker._stores[job].result.exception(WAIT)
        assert error is None, error
    worker.poll()
    assert worker.take_report().over == dict.fromkeys(jobs, 1)


def assert_stored(worker, pages, digests, ids):
    to = list(range(12, 12 + len(ids)))
    worker.start_loads(loads((77, "r", digests, [to], 0), synchronous=True))
    worker.start_stores()
    assert not worker.take_report().failed
    assert torch.equal(oracle_chunk(pages, to), oracle_chunk(pages, ids))


def test_the_stores_of_a_step_begin_with_it_and_end_with_its_last_layer(followed, pages):
    """Several requests' are one, so that none of them waits for another."""
    worker, mover = followed
    digests = names(3)
    step = stores((1, digests[:1], [[0, 1]]), (2, digests[1:], [[4, 5, 2, 3]]))
    worker.begin_step(step)
    assert mover.following.acquire(timeout=WAIT)
    pages.fill_random(2)
    worker.layer_computed(LAYERS[0][0])
    assert mover.moves == []
    worker.layer_computed(LAYERS[0][1])
    mover.wait_queued(1)
    worker.start_loads(step)
    worker.start_stores()
    ended(worker, 1, 2)
    assert len(mover.moves) == 1
    assert_stored(worker, pages, digests, [0, 1, 4, 5, 2, 3])


@pytest.mark.parametrize("told", [[], [0], [1], [1, 1]])
def test_layers_that_nobody_tells_of_are_computed_when_the_step_is_over(followed, pages, told):
    """As in a whole graph of the step. A later layer says nothing of an earlier one."""
    worker, mover = followed
    digests = names(1)
    worker.begin_step(stores((1, digests, [[0, 1]])))
    assert mover.following.acquire(timeout=WAIT)
    for layer in told:
        worker.layer_computed(LAYERS[0][layer])
    worker.layer_computed("model.layers.9.shares.the.cache.of.another")
    assert mover.moves == []
    pages.fill_random(3)
    worker.start_stores()
    ended(worker, 1)
    assert_stored(worker, pages, digests, [0, 1])


def test_layers_may_be_computed_in_another_order_than_that_of_their_names(followed, pages):
    worker, mover = followed
    digests = names(1)
    worker.begin_step(stores((1, digests, [[0, 1]])))
    assert mover.following.acquire(timeout=WAIT)
    worker.layer_computed(LAYERS[0][1])
    pages.fill_random(4)
    assert mover.moves == []
    worker.layer_computed(LAYERS[0][0])
    mover.wait_queued(1)
    worker.start_stores()
    ended(worker, 1)
    assert_stored(worker, pages, digests, [0, 1])


@pytest.mark.parametrize("next_hook", ["fence", "fence of it", "begin_step"])
def test_a_step_whose_end_was_left_out_ends_its_stores_before_the_next(followed, pages, next_hook):
    """Its work is queued by then; what a fence names is over, or stopped."""
    worker, mover = followed
    digests = names(1)
    worker.begin_step(stores((1, digests, [[0, 1]])))
    assert mover.following.acquire(timeout=WAIT)
    worker.layer_computed(LAYERS[0][0])
    content = oracle_chunk(pages, [0, 1])
    if next_hook == "begin_step":
        worker.begin_step(StepJobs())
    else:
        worker.fence(StepJobs(fence=[1] if next_hook == "fence of it" else []))
    if next_hook == "fence of it":
        pages.fill(7)
    ended(worker, 1)
    worker.start_loads(loads((2, "r", digests, [[12, 13]], 0), synchronous=True))
    worker.start_stores()
    assert torch.equal(oracle_chunk(pages, [12, 13]), content)


def test_steps_without_stores_and_ranks_that_hold_copies_begin_nothing(followed, make):
    worker, mover = followed
    worker.begin_step(StepJobs())
    worker.layer_computed(LAYERS[0][0])
    worker.start_stores()
    reader = make(writer=False, layers=LAYERS, stores_by_layer=True)
    run_stores(reader, stores((1, names(1), [[0, 1]])))
    assert reader.take_report().over == {1: 1}
    assert mover.moves == []
    assert not worker.take_report()


def test_a_store_with_other_blocks_than_its_chunks_have_shifts_no_other(followed, pages):
    """They are stored one by one then."""
    worker, _ = followed
    digests = names(2)
    run_stores(
        worker,
        stores((1, digests[:1], [[0, 1, 9]]), (2, digests[1:], [[4, 5]]), (3, names(1), [[6]])),
    )
    assert worker.take_report().over == {3: 1}
    ended(worker, 1, 2)
    assert_stored(worker, pages, digests, [0, 1, 4, 5])


def test_a_store_that_followed_a_step_and_failed_is_over_and_the_next_one_is_whole(
    followed, cache, pages
):
    worker, mover = followed
    worker.begin_step(stores((1, names(1), [[0, 1]])))
    assert mover.following.acquire(timeout=WAIT)
    cache.request(Clear(), 1.0).result()
    worker.start_stores()
    assert worker._stores[1].result.exception(WAIT) is not None
    worker.poll()
    assert worker.take_report().over == {1: 1}
    digests = names(1)
    run_stores(worker, stores((2, digests, [[0, 1]])))
    ended(worker, 2)
    assert_stored(worker, pages, digests, [0, 1])


def test_stores_that_follow_a_step_are_for_one_tenant_and_others_wait_for_its_end(
    followed, cache, pages
):
    worker, mover = followed
    digests = names(3)
    step = stores(
        (1, digests[:1], [[0, 1]], "a"),
        (2, digests[1:2], [[4, 5]], "b"),
        (3, digests[2:], [[6, 7]], "a"),
    )
    cache._service.set_quota("a", 1 << 20)
    cache._service.set_quota("b", 1 << 20)
    worker.begin_step(step)
    assert mover.following.acquire(timeout=WAIT)
    worker.start_loads(step)
    worker.start_stores()
    ended(worker, 1, 2, 3)
    assert [len(moves) for _, moves in mover.moves] == [2, 1]
    used = {tenant: quota.used_bytes for tenant, quota in cache._service.quotas().items()}
    assert used["a"] == 2 * used["b"] > 0
    assert_stored(worker, pages, digests, [0, 1, 4, 5, 6, 7])


def test_a_cpu_engine_stores_with_the_last_layer(make, pages):
    worker = make(layers=LAYERS, stores_by_layer=True)
    digests = names(1)
    worker.begin_step(stores((1, digests, [[0, 1]])))
    pages.fill_random(6)
    for layer in LAYERS[0]:
        assert not worker._stores[1].result.done()
        worker.layer_computed(layer)
    assert worker._stores[1].result.result(0) == 1
    worker.start_stores()
    ended(worker, 1)
    assert_stored(worker, pages, digests, [0, 1])


class OutOfMemory(RuntimeError):
    """What a step may end with."""


@pytest.mark.parametrize("by_layer", [False, True])
def test_nothing_is_stored_of_a_step_that_failed(make, pages, by_layer):
    """Its hooks are called while the error is on its way; the blocks hold what they held before."""
    worker = make(layers=LAYERS if by_layer else None, stores_by_layer=by_layer)
    digests = names(1)

    def step():
        worker.begin_step(stores((1, digests, [[0, 1]])))
        try:
            worker.layer_computed(LAYERS[0][0])
            raise OutOfMemory
        finally:
            worker.start_loads(StepJobs())
            worker.start_stores()

    with pytest.raises(OutOfMemory):
        step()
    for transfer in worker._stores.values():
        transfer.result.exception(WAIT)
    worker.poll()
    assert worker.take_report().over == {1: 1}
    worker.start_loads(loads((2, "a", digests, [[8, 9]], 0)))
    assert worker.poll() == ({"a"}, {"a"})
    assert worker.take_report().failed == {2}
    run_stores(worker, stores((3, digests, [[0, 1]])))
    ended(worker, 3)
    assert_stored(worker, pages, digests, [0, 1])


def test_a_device_that_takes_no_event_costs_the_stores_and_not_the_step(followed, pages):
    worker, mover = followed
    digests = names(1)
    worker.begin_step(stores((1, digests, [[0, 1]])))
    assert mover.following.acquire(timeout=WAIT)

    def refused():
        raise TransferFailed("no event")

    mover.ready, ready = refused, mover.ready
    worker.layer_computed(LAYERS[0][0])
    worker.layer_computed(LAYERS[0][1])
    worker.start_stores()
    mover.ready = ready
    assert worker._stores[1].result.exception(WAIT) is not None
    worker.poll()
    assert worker.take_report().over == {1: 1}
    run_stores(worker, stores((2, digests, [[0, 1]])))
    ended(worker, 2)
    assert_stored(worker, pages, digests, [0, 1])
