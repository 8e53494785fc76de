"""Long transfers, of which the device is given a few chunks at a time."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import pytest
from arena_tools import damage
from cachekit import BY_NAME, make_cache
from engine_rig import Rig
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.errors import Closed, TransferFailed
from lmcache_kernels.transfer.engine_driven import worker
from lmcache_kernels.transfer.messages import AbortStore, CommitRetrieve
from lmcache_kernels.transfer.moving import batches as module
from lmcache_kernels.transfer.moving.batches import FIRST_CHUNKS, LEAST_BYTES, batches

WAIT = 30.0
CHUNKS = 7
SOURCE, TARGET = list(range(14)), list(range(14, 28))


@given(count=st.integers(0, 2000))
def test_each_batch_has_twice_as_many_as_the_one_before(count):
    found = [list(batch) for batch in batches(range(count), LEAST_BYTES)]
    assert [one for batch in found for one in batch] == list(range(count))
    sizes = [len(batch) for batch in found]
    assert all(sizes)
    assert sizes[:-1] == [FIRST_CHUNKS << index for index in range(len(sizes) - 1)]
    assert not sizes or sizes[-1] <= FIRST_CHUNKS << (len(sizes) - 1)


@given(count=st.integers(0, 2000))
def test_small_chunks_go_all_at_once(count):
    found = list(batches(range(count), LEAST_BYTES - 1))
    assert found == ([range(count)] if count else [])


@pytest.fixture
def rig(monkeypatch):
    """Whose transfers of seven chunks are batches of one, two and four."""
    monkeypatch.setattr(module, "LEAST_BYTES", 1)
    monkeypatch.setattr(module, "FIRST_CHUNKS", 1)
    with ExitStack() as closing:
        yield Rig(closing, cache=make_cache(BY_NAME["kv_first_nhd"], blocks=32))


def names():
    return [secrets.token_bytes(32) for _ in range(CHUNKS)]


def sizes(rig, direction):
    return [len(moves) for way, moves in rig.mover.moves if way == direction]


def test_batches_are_one_store_and_one_load(rig):
    digests = names()
    assert rig.store(digests, SOURCE).result.result(WAIT) == CHUNKS
    assert rig.load(digests, TARGET).result(WAIT) == CHUNKS
    assert sizes(rig, "store") == sizes(rig, "load") == [1, 2, 4]
    assert rig.same(SOURCE, TARGET)


def test_a_store_with_chunks_that_are_there_stores_the_others(rig):
    digests = names()
    some = [digests[1], digests[4]]
    assert rig.store(some, [2, 3, 8, 9]).result.result(WAIT) == 2
    assert rig.store(digests, SOURCE).result.result(WAIT) == CHUNKS - 2
    assert rig.load(digests, TARGET).result(WAIT) == CHUNKS
    assert rig.same(SOURCE, TARGET)


@pytest.mark.parametrize("bad", range(CHUNKS))
@pytest.mark.parametrize("where", ["header", "payload"])
def test_a_load_ends_before_the_chunk_that_is_damaged(rig, bad, where):
    digests = names()
    assert rig.store(digests, SOURCE).result.result(WAIT) == CHUNKS
    damage(rig.port.inner._arena, digests[bad], where)
    assert rig.load(digests, TARGET).result(WAIT) == bad
    assert not bad or rig.same(SOURCE[: 2 * bad], TARGET[: 2 * bad])
    (message,) = rig.port.of(CommitRetrieve)
    assert message.damaged == [bad]
    assert rig.stats()["reads"] == 0


@pytest.mark.parametrize("bad", range(CHUNKS))
def test_a_load_that_found_damage_is_over_when_nothing_is_written_any_more(rig, bad):
    digests = names()
    assert rig.store(digests, SOURCE).result.result(WAIT) == CHUNKS
    damage(rig.port.inner._arena, digests[bad], "payload")
    before = len(rig.mover.moves)
    rig.mover.hold()
    load = rig.load(digests, TARGET)
    rig.mover.wait_queued(before + 3)
    *others, last = rig.mover.queued
    for work in others:
        work.finish()
    assert not load.done()
    last.finish()
    assert load.result(WAIT) == bad


class Luck:
    """Lets so many calls of a mover pass, and no more."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, direction):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no such luck")


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_what_the_device_had_is_over_when_a_later_batch_fails(rig, direction, calls):
    digests = names()
    if direction == "load":
        assert rig.store(digests, SOURCE).result.result(WAIT) == CHUNKS
    rig.mover.before = Luck(calls)
    before = len(rig.mover.moves)
    rig.mover.hold()
    submit = rig.store if direction == "store" else rig.load
    transfer = submit(digests, SOURCE if direction == "store" else TARGET)
    result = transfer.result if direction == "store" else transfer
    rig.mover.wait_queued(before + calls)
    queued = list(rig.mover.queued)
    if calls:
        assert not result.done()
        assert rig.port.of(AbortStore) == []
    for work in queued:
        work.finish()
    with pytest.raises(RuntimeError, match="luck"):
        result.result(WAIT)
    rig.mover.before = lambda direction: None
    rig.mover.let_go()
    assert rig.stats()["writing"] == rig.stats()["reads"] == 0
    if direction == "store":
        assert len(rig.port.of(AbortStore)) == 1
        assert rig.store(digests, SOURCE).result.result(WAIT) == CHUNKS
    assert rig.load(digests, TARGET).result(WAIT) == CHUNKS
    assert rig.same(SOURCE, TARGET)


def test_a_store_whose_first_batch_is_not_over_in_time_keeps_its_slots(rig, monkeypatch):
    monkeypatch.setattr(worker, "DEVICE_TIMEOUT", 0.05)
    rig.mover.before = Luck(1)
    rig.mover.hold()
    with pytest.raises(TransferFailed, match="luck"):
        rig.store(names(), SOURCE).result.result(WAIT)
    assert rig.port.of(AbortStore) == []
    assert rig.stats()["writing"] == CHUNKS
    rig.mover.let_go()


def test_a_flush_between_two_batches_stops_the_others_and_waits_for_the_first(rig):
    """Blocks that were flushed are read by nobody any more."""
    rig.mover.hold()
    original = rig.mover.gather

    def gather(moves, after, layers=None):
        moved = original(moves, after, layers)
        (transfer,) = rig.context._stores.transfers()
        assert not transfer.stop(), "the device has some of it"
        return moved

    rig.mover.gather = gather
    store = rig.store(names(), SOURCE)
    rig.mover.wait_queued(1)
    rig.mover.let_go()
    with pytest.raises(Closed):
        store.result.result(WAIT)
    assert sizes(rig, "store") == [1]
    assert rig.stats()["writing"] == 0
