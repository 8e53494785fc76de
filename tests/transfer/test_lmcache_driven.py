"""The context in which the server copies, its copies held and let go by the test."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from arena_tools import damage
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside
from gate_port import GatePort
from held_mover import HeldMover, Point

from lmcache_kernels.errors import (
    Closed,
    LayoutError,
    LocalProtocolError,
    PeerGone,
    RemoteError,
    TransferTimeout,
)
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.kv_groups import KVGroup
from lmcache_kernels.transfer.lmcache_driven import context as lmcache_driven
from lmcache_kernels.transfer.lmcache_driven.context import LmcacheDrivenContext
from lmcache_kernels.transfer.messages import (
    AbortStore,
    CommitStore,
    Done,
    EndSession,
    Found,
    LoadBlocks,
    Loaded,
    Lookup,
    PrepareStore,
    Register,
    RegisterCache,
    Settle,
    StoreBlocks,
    Unregister,
)
from lmcache_kernels.transfer.moving import batches as batches_module
from lmcache_kernels.transfer.moving.moves import StillMovingError
from lmcache_kernels.transfer.observer import Totals
from lmcache_kernels.transfer.serving import cache_copies, served_cache, served_caches
from lmcache_kernels.transfer.sharing.wrapping import wrap_one_kv_cache

CHUNK = 8  # two blocks of four tokens
WAIT = 30.0


class Rig:
    """A cache in shared memory, a server behind a gate, and a context between them."""

    def __init__(self, closing, movers, **options):
        self.movers = movers
        self.cache = make_cache(BY_NAME["kv_first_nhd"], blocks=40)
        for tensor in (*self.cache.storages, *self.cache.tensors):
            wrap_one_kv_cache(tensor)
        self.cache.fill_random(1)
        self.server = closing.enter_context(EmbeddedCache(1 << 20, chunk_tokens=CHUNK))
        self.port = GatePort(self.server)
        self.options = {"instance": secrets.randbits(63), **options}
        self.context = self.another()
        closing.callback(self.context.close)
        closing.callback(self.let_go)
        self.context.register()

    def another(self, **options):
        return LmcacheDrivenContext(
            [KVGroup.of(self.cache.tensors, self.cache.axes)],
            chunk_tokens=CHUNK,
            part=ShardPart(),
            port=self.port,
            **{**self.options, **options},
        )

    @property
    def instance(self):
        return self.options["instance"]

    @property
    def mover(self):
        return self.movers[-1]

    def let_go(self):
        for mover in self.movers:
            mover.let_go()

    def store(self, digests, ids):
        return self.context.submit_store(digests, [ids])

    def load(self, digests, ids, **options):
        return self.context.submit_retrieve(digests, [ids], **options)

    def found(self, digests):
        request = Lookup(request="probe", shards=[self.context.shard], digests=b"".join(digests))
        reply = self.server.request(request, WAIT).result(WAIT)
        assert isinstance(reply, Found)
        self.server.request(EndSession(request="probe"), WAIT)
        return reply.chunks

    def ask(self, message):
        """Straight to the server: a reply, or the code of an error."""
        try:
            return self.server.request(message, WAIT).result(WAIT)
        except RemoteError as error:
            return error.code


@pytest.fixture
def movers(monkeypatch):
    made = []

    def mover_for(groups, layout, max_programs):
        made.append(HeldMover(groups, layout))
        return made[-1]

    monkeypatch.setattr(cache_copies, "mover_for", mover_for)
    return made


@pytest.fixture
def make_rig(movers):
    with ExitStack() as closing:
        yield lambda **options: Rig(closing, movers, **options)


@pytest.fixture
def rig(make_rig):
    return make_rig()


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


def eventually(condition):
    give_up_at = time.monotonic() + WAIT
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < give_up_at, "it did not become true"
        pause.wait(0.002)


# --- stores ---------------------------------------------------------------------------------------


def test_a_store_is_found_once_the_worker_has_committed_it(rig):
    digests = names(2)
    rig.port.hold(CommitStore)
    transfer = rig.store(digests, [0, 1, 2, 3])
    rig.port.wait_sent(CommitStore)
    assert transfer.wait_read(0), "the blocks are free before the commit"
    assert not transfer.result.done()
    assert rig.found(digests) == 0
    rig.port.let_go()
    assert transfer.result.result(WAIT) == 2
    assert rig.found(digests) == 2


def test_mp_017_without_an_event_a_transfer_is_over_with_the_reply(rig):
    """Also one that moved nothing. A reply carries a number and no event that somebody could wait
    for: it comes when the copy is over."""
    missing = rig.load(names(2), [0, 1, 2, 3])
    assert missing.result(WAIT) == 0
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    again = rig.store(digests, [0, 1]).result
    assert again.result(WAIT) == 0
    assert {message.event for message in rig.port.of((LoadBlocks, StoreBlocks))} == {b""}
    replies = [reply for message, reply in rig.port.replies if isinstance(message, LoadBlocks)]
    assert replies == [Loaded(chunks=0)]


def test_submitting_does_not_wait_and_other_requests_are_served_meanwhile(rig):
    rig.mover.hold()
    transfers = [rig.store(names(1), [0, 1]) for _ in range(10)]
    rig.mover.wait_queued(1)
    assert rig.found(names(1)) == 0
    assert not any(transfer.result.done() for transfer in transfers)
    rig.let_go()
    assert [transfer.result.result(WAIT) for transfer in transfers] == [1] * 10


def test_a_load_does_not_wait_for_stores(rig):
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    expected = oracle_chunk(rig.cache, [0, 1])
    stored = threading.Event()
    rig.mover.before = lambda direction: direction == "load" or stored.wait(WAIT)
    late = rig.store(names(1), [2, 3])
    assert rig.load(digests, [6, 7]).result(WAIT) == 1
    assert torch.equal(oracle_chunk(rig.cache, [6, 7]), expected)
    stored.set()
    assert late.result.result(WAIT) == 1


def test_flush_waits_for_a_copy_and_not_for_its_commit(rig):
    rig.mover.hold()
    rig.port.hold(CommitStore)
    transfer = rig.store(names(1), [0, 1])
    rig.mover.wait_queued(1)
    flushed = threading.Event()
    waiting = threading.Thread(target=lambda: (rig.context.flush([transfer]), flushed.set()))
    waiting.start()
    rig.port.wait_sent(Settle)
    assert not flushed.is_set()
    rig.let_go()
    assert flushed.wait(WAIT)
    waiting.join()
    assert not transfer.result.done()
    rig.port.let_go()
    assert transfer.result.result(WAIT) == 1


def test_flush_stops_stores_that_wait_at_the_server(rig):
    rig.mover.hold()
    first, second = (rig.store(names(1), ids) for ids in ([0, 1], [2, 3]))
    rig.mover.wait_queued(1)
    rig.port.wait_sent(StoreBlocks, 2)
    rig.context.flush([second])
    assert isinstance(second.result.exception(WAIT), Closed)
    assert not first.result.done()
    rig.let_go()
    assert first.result.result(WAIT) == 1
    assert len(rig.mover.moves) == 1
    assert rig.server.stats()["writing"] == 0


def test_flush_stops_stores_that_were_not_sent(rig):
    rig.port.hold(RegisterCache)
    rig.context.unregister()
    transfer = rig.store(names(1), [0, 1])
    rig.port.wait_sent(RegisterCache, 2)
    rig.context.flush_inflight_stores()
    rig.port.let_go()
    assert isinstance(transfer.result.exception(WAIT), Closed)
    assert len(rig.port.of(StoreBlocks)) == 0


def test_a_store_that_is_still_read_when_the_flush_gives_up_is_not_published(rig):
    """Its blocks are overwritten while the server reads them: nobody may find that."""
    rig.mover.hold()
    digests = names(1)
    transfer = rig.store(digests, [0, 1])
    rig.mover.wait_queued(1)
    rig.context.flush([transfer], timeout=0.01)
    rig.cache.fill(9)
    rig.let_go()
    assert isinstance(transfer.result.exception(WAIT), Closed)
    rig.port.wait_sent(AbortStore)
    assert rig.found(digests) == 0
    assert rig.server.stats()["used_bytes"] == 0
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1


def test_a_store_that_ends_after_its_deadline_is_discarded(make_rig):
    rig = make_rig(copy_timeout=0.1)
    rig.mover.hold()
    digests = names(1)
    transfer = rig.store(digests, [0, 1])
    assert isinstance(transfer.result.exception(WAIT), TransferTimeout)
    rig.let_go()
    eventually(lambda: rig.server.stats()["writing"] == 0)
    assert rig.found(digests) == 0
    assert not rig.port.of(CommitStore)


def test_a_copy_that_fails_leaves_nothing(rig):
    def unlucky(direction):
        raise ZeroDivisionError("no such luck")

    digests = names(2)
    assert rig.store(digests[:1], [0, 1]).result.result(WAIT) == 1
    rig.mover.before = unlucky
    error = rig.store(digests[1:], [2, 3]).result.exception(WAIT)
    assert isinstance(error, RemoteError)
    assert error.code == "failed"
    assert "no such luck" in str(error)
    error = rig.load(digests[:1], [4, 5]).exception(WAIT)
    assert (type(error), error.code) == (RemoteError, "failed")
    stats = rig.server.stats()
    assert (stats["writing"], stats["reads"], stats["resident"], stats["idle"]) == (0, 0, 1, 1)
    assert (stats["stores_aborted"], stats["loads_failed"], stats["loads"]) == (1, 1, 0)
    rig.mover.before = lambda direction: None
    assert rig.store(digests[1:], [2, 3]).result.result(WAIT) == 1
    assert rig.load(digests, [4, 5, 6, 7]).result(WAIT) == 2


@pytest.fixture
def batches(monkeypatch):
    """Of one chunk, two and four."""
    monkeypatch.setattr(batches_module, "LEAST_BYTES", 1)
    monkeypatch.setattr(batches_module, "FIRST_CHUNKS", 1)


SOURCE, TARGET = list(range(14)), list(range(14, 28))  # of seven chunks


def test_long_transfers_are_copied_in_batches(rig, batches):
    digests = names(7)
    assert rig.store(digests, SOURCE).result.result(WAIT) == 7
    assert rig.load(digests, TARGET).result(WAIT) == 7
    assert [len(moves) for _, moves in rig.mover.moves] == [1, 2, 4, 1, 2, 4]
    assert torch.equal(oracle_chunk(rig.cache, SOURCE), oracle_chunk(rig.cache, TARGET))


@pytest.mark.parametrize("where", ["header", "payload"])
@pytest.mark.parametrize("bad", [0, 1, 2, 6])
def test_a_load_in_batches_ends_before_the_chunk_that_is_damaged(rig, batches, bad, where):
    digests = names(7)
    assert rig.store(digests, SOURCE).result.result(WAIT) == 7
    damage(rig.server._arena, digests[bad], where)
    assert rig.load(digests, TARGET).result(WAIT) == bad
    assert rig.found(digests) == bad


@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("still", [False, True])
def test_a_batch_that_fails_ends_the_copy_when_the_others_are_over(rig, batches, way, still):
    digests = names(7)
    if way == "load":
        assert rig.store(digests, SOURCE).result.result(WAIT) == 7
    before, last, asked = len(rig.mover.moves), Point(), threading.Event()
    reached = last.wait
    last.wait = lambda timeout: asked.set() or reached(timeout)

    def fail_at_the_third(direction):
        if len(rig.mover.moves) == before + 2:
            raise StillMovingError("no luck", last) if still else RuntimeError("no luck")

    rig.mover.before = fail_at_the_third
    rig.mover.hold()
    result = rig.store(digests, SOURCE).result if way == "store" else rig.load(digests, TARGET)
    rig.mover.wait_queued(before + 2)
    for work in rig.mover.queued:
        assert not result.done()
        work.finish()
    if still:
        assert asked.wait(WAIT), "what failed is waited for too"
        assert not result.done()
        last.reach()
    with pytest.raises(RemoteError, match="no luck"):
        result.result(WAIT)
    rig.mover.before = lambda direction: None
    rig.let_go()
    assert rig.found(digests) == (7 if way == "load" else 0)


def test_a_successor_is_not_told_of_an_old_ticket(rig):
    """It counts tickets from the start, so an old one can be one of its own."""
    rig.mover.hold()
    transfer = rig.store(names(1), [0, 1])
    rig.mover.wait_queued(1)
    with EmbeddedCache(1 << 16, chunk_tokens=CHUNK) as successor:
        rig.port.inner = successor
        rig.let_go()
        assert isinstance(transfer.result.exception(WAIT), PeerGone)
        assert not rig.port.of(CommitStore)
        assert rig.store(names(1), [0, 1]).result.result(WAIT) == 1
        rig.port.inner = rig.server


def test_what_is_still_copied_can_neither_be_published_nor_given_to_others(rig):
    """Tickets are easily guessed."""
    digests = names(2)
    rig.mover.hold()
    transfer = rig.store(digests, [0, 1, 2, 3])
    rig.mover.wait_queued(1)
    for ticket in range(20):
        for message in (CommitStore, AbortStore):
            assert rig.ask(message(instance=rig.instance, ticket=ticket)) == "unknown_ticket"
    assert rig.found(digests) == 0
    assert rig.server.stats()["writing"] == 2
    rig.let_go()
    assert transfer.result.result(WAIT) == 2


# --- loads ----------------------------------------------------------------------------------------


def test_defect_d23_a_load_that_is_given_up_ends_when_the_server_has_stopped_writing(make_rig):
    """D-23: until then its blocks are nobody else's."""
    rig = make_rig(copy_timeout=0.2, timeout=WAIT)
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    rig.mover.hold()
    future = rig.load(digests, [6, 7])
    rig.port.wait_sent(Settle)
    assert not future.done()
    rig.let_go()
    assert isinstance(future.exception(WAIT), TransferTimeout)
    assert torch.equal(oracle_chunk(rig.cache, [6, 7]), oracle_chunk(rig.cache, [0, 1]))
    assert rig.server.stats()["reads"] == 0


def test_defect_d23_a_load_that_has_not_begun_by_its_deadline_never_does(make_rig):
    """D-23: it waits behind another one, and both are given up."""
    rig = make_rig(copy_timeout=0.2, timeout=WAIT)
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    before = rig.cache.snapshot()
    rig.mover.hold()
    first, second = rig.load(digests, [6, 7]), rig.load(digests, [8, 9])
    rig.port.wait_sent(Settle)
    assert not first.done()
    rig.let_go()
    assert isinstance(first.exception(WAIT), TransferTimeout)
    assert isinstance(second.exception(WAIT), TransferTimeout)
    eventually(lambda: rig.server.stats()["reads"] == 0)
    assert len(rig.mover.moves) == 2
    assert untouched_outside(rig.cache, before, [6, 7])


def test_a_server_that_never_answers_costs_bounded_time(make_rig):
    """However much it was asked for: not so long for each."""
    rig = make_rig(copy_timeout=0.1, timeout=0.5)
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    rig.port.hold(Settle)
    rig.mover.hold()
    began = time.monotonic()
    futures = [rig.load(digests, [6, 7]) for _ in range(40)]
    assert all(isinstance(one.exception(WAIT), TransferTimeout) for one in futures)
    assert time.monotonic() - began < 40 * 0.5 / 2


def test_a_transfer_that_could_not_be_asked_for_in_time_is_not(make_rig):
    """While a registration is awaited the deadlines of others pass."""
    rig = make_rig(copy_timeout=0.2)
    rig.context.unregister()
    rig.port.hold(RegisterCache)
    futures = [rig.load(names(1), [6, 7]) for _ in range(10)]
    assert all(isinstance(one.exception(WAIT), TransferTimeout) for one in futures)
    assert len(rig.port.of(RegisterCache)) == 2
    assert not rig.port.of(LoadBlocks)
    rig.port.let_go()


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_transfer_that_comes_after_its_end_was_asked_for_does_not_begin(rig, kind):
    """Requests of a lost connection can still be read after those of its successor."""
    digests = b"".join(names(1))
    ids = b"\0\0\0\0\1\0\0\0"
    message = StoreBlocks if kind == "store" else LoadBlocks
    assert rig.ask(Settle(instance=rig.instance, transfers=[77])) == Done()
    late = message(instance=rig.instance, transfer=77, digests=digests, blocks=[ids])
    assert rig.ask(late) == "stopped"
    assert not rig.mover.moves
    assert rig.server.stats()["used_bytes"] == 0


def test_what_is_settled_of_a_worker_that_was_forgotten_is_over(rig):
    """Also what goes on for a cache that is being closed is waited for."""
    rig.mover.hold()
    transfer = rig.store(names(1), [0, 1])
    rig.mover.wait_queued(1)
    gone = rig.server.request(Unregister(instance=rig.instance), WAIT)
    settled = rig.server.request(Settle(instance=rig.instance, transfers=[1]), WAIT)
    assert rig.ask(Settle(instance=5, transfers=[1])) == Done()
    assert not gone.done()
    assert not settled.done()
    rig.let_go()
    assert gone.result(WAIT) == settled.result(WAIT) == Done()
    assert isinstance(transfer.result.exception(WAIT), Closed)


# --- registration ---------------------------------------------------------------------------------


def test_a_worker_that_was_forgotten_registers_again(rig):
    assert rig.ask(Unregister(instance=rig.instance)) == Done()
    error = rig.store(names(1), [0, 1]).result.exception(WAIT)
    assert (type(error), error.code) == (RemoteError, "unknown_instance")
    assert rig.store(names(1), [0, 1]).result.result(WAIT) == 1


def test_a_new_registration_replaces_the_old_one_once_its_copies_are_over(rig):
    digests = names(1)
    old = rig.mover
    old.hold()
    transfer = rig.store(digests, [0, 1])
    old.wait_queued(1)
    again = rig.another()
    again.register()
    assert rig.mover is not old
    assert not old.closed
    assert rig.server.stats()["caches"] == 2
    assert rig.server.stats()["writing"] == 1, "slots that are written are nobody else's"
    rig.let_go()
    assert isinstance(transfer.result.exception(WAIT), Closed)
    eventually(lambda: rig.server.stats()["caches"] == 1)
    assert old.closed
    assert rig.found(digests) == 0
    assert rig.server.stats()["used_bytes"] == 0
    assert again.submit_store(digests, [[0, 1]]).result.result(WAIT) == 1
    again.close()


def test_registering_again_and_again_leaves_one_cache_and_no_threads(rig):
    threads = threading.active_count()
    for _ in range(20):
        again = rig.another()
        again.register()
        assert again.submit_store(names(1), [[0, 1]]).result.result(WAIT) == 1
        again.close()
    rig.context.unregister()
    eventually(lambda: rig.server.stats()["caches"] == 0)
    rig.context.register()
    assert rig.store(names(1), [0, 1]).result.result(WAIT) == 1
    eventually(lambda: threading.active_count() <= threads + 4)


def test_only_the_last_of_several_registrations_counts(rig, monkeypatch):
    real, entered, gate = cache_copies.CacheCopies, threading.Event(), threading.Event()

    def slowly(*arguments):
        entered.set()
        assert gate.wait(WAIT)
        return real(*arguments)

    monkeypatch.setattr(cache_copies, "CacheCopies", slowly)
    (message,) = rig.port.of(RegisterCache)
    first = rig.server.request(message, WAIT)
    assert entered.wait(WAIT)
    second = rig.server.request(message, WAIT)
    gate.set()
    assert first.exception(WAIT).code == "stopped"
    assert second.exception(WAIT) is None
    eventually(lambda: rig.server.stats()["caches"] == 1)
    third = rig.server.request(message, WAIT)
    assert rig.ask(Unregister(instance=rig.instance)) == Done()
    assert third.exception(WAIT) is None or third.exception(WAIT).code == "stopped"
    eventually(lambda: rig.server.stats()["caches"] == 0)


def test_unregistering_waits_until_the_server_has_let_go(rig):
    rig.mover.hold()
    transfer = rig.store(names(1), [0, 1])
    rig.mover.wait_queued(1)
    gone = rig.server.request(Unregister(instance=rig.instance), WAIT)
    assert rig.found(names(1)) == 0
    assert not gone.done()
    assert not rig.mover.closed
    rig.let_go()
    assert gone.result(WAIT) == Done()
    assert rig.mover.closed
    assert isinstance(transfer.result.exception(WAIT), Closed)
    assert rig.server.stats()["used_bytes"] == 0


def test_closing_stops_what_waits_and_waits_for_what_runs(rig):
    rig.mover.hold()
    transfers = [rig.store(names(1), [0, 1]) for _ in range(5)]
    rig.mover.wait_queued(1)
    rig.port.wait_sent(StoreBlocks, 5)
    closing = threading.Thread(target=rig.context.close)
    closing.start()
    rig.port.wait_sent(Unregister)
    assert closing.is_alive()
    rig.let_go()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert all(isinstance(one.result.exception(0), Closed) for one in transfers)
    assert len(rig.mover.moves) == 1
    assert rig.server.stats()["caches"] == 0
    late = rig.load(names(1), [0, 1])
    assert isinstance(late.exception(0), Closed)
    rig.context.close()


def test_a_server_that_closes_ends_everything(rig):
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    rig.mover.hold()
    futures = [rig.store(names(1), [0, 1]).result, rig.load(digests, [2, 3])]
    rig.mover.wait_queued(3)
    closing = threading.Thread(target=rig.server.close)
    closing.start()
    rig.let_go()
    closing.join(WAIT)
    assert all(isinstance(one.exception(WAIT), (Closed, PeerGone)) for one in futures)
    assert rig.mover.closed


@pytest.mark.parametrize("limit", [1, 3])
def test_how_much_a_worker_may_have_under_way_is_bounded(rig, monkeypatch, limit):
    monkeypatch.setattr(served_cache, "MAX_UNDER_WAY", limit)
    rig.mover.hold()
    transfers = [rig.store(names(1), [0, 1]) for _ in range(limit)]
    rig.port.wait_sent(StoreBlocks, limit)
    error = rig.store(names(1), [0, 1]).result.exception(WAIT)
    assert (type(error), error.code) == (RemoteError, "busy")
    rig.let_go()
    assert [one.result.result(WAIT) for one in transfers] == [1] * limit


def test_how_many_caches_are_registered_is_bounded(rig, monkeypatch):
    monkeypatch.setattr(served_caches, "MAX_CACHES", 1)
    other = rig.another(instance=1)
    with pytest.raises(RemoteError, match="busy"):
        other.register()
    rig.context.unregister()
    other.register()
    other.close()


# --- what only the worker sees --------------------------------------------------------------------


class Events:
    def __init__(self):
        self.recorded, self.acknowledged = 0, 0

    def record(self):
        self.recorded += 1
        return b""

    def acknowledge(self, handle):
        self.acknowledged += 1


def test_every_event_is_acknowledged_once_however_a_transfer_ends(movers, make_rig, monkeypatch):
    events = Events()
    monkeypatch.setattr(lmcache_driven, "recorded_events", lambda device: events)
    rig = make_rig(copy_timeout=0.3)
    digests = names(1)
    assert rig.store(digests, [0, 1]).result.result(WAIT) == 1
    assert rig.load(digests, [2, 3]).result(WAIT) == 1
    assert rig.load(names(1), [2, 3]).result(WAIT) == 0
    assert rig.store([], []).result.result(WAIT) == 0
    assert rig.store(names(1), [0, 400]).result.exception(WAIT)
    rig.mover.hold()
    late = [rig.store(names(1), [0, 1]).result, rig.load(digests, [2, 3])]
    assert isinstance(late[0].exception(WAIT), TransferTimeout)
    rig.port.wait_sent(Settle)
    rig.let_go()
    assert isinstance(late[1].exception(WAIT), TransferTimeout)
    rig.context.close()
    assert rig.load(digests, [2, 3]).exception(WAIT)
    assert events.recorded == events.acknowledged == 8


def test_what_cannot_be_right_is_refused_before_it_is_sent(rig):
    digests = names(2)
    with pytest.raises(LayoutError, match="2 chunks need 4 blocks, got 3"):
        rig.store(digests, [0, 1, 2])
    with pytest.raises(LayoutError, match="skip_first_n_tokens: expected an integer >= 0, got -1"):
        rig.load(digests, [0, 1, 2, 3], skip_first_n_tokens=-1)
    for future, kind in (
        (rig.store(digests, [0, 1, 2, 40]).result, LayoutError),
        (rig.load(digests, [0, 1, 1, 2]), LayoutError),
        (rig.load([b"short", b"er"], [0, 1, 2, 3]), LocalProtocolError),
    ):
        assert isinstance(future.exception(WAIT), kind)
    assert not rig.port.of(StoreBlocks)
    assert not rig.port.of(LoadBlocks)


def test_transfers_are_observed(movers, make_rig):
    totals = Totals()
    rig = make_rig(observer=totals)
    digests = names(2)
    rig.store(digests, [0, 1, 2, 3]).result.result(WAIT)
    rig.load(digests, [4, 5, 6, 7]).result(WAIT)
    rig.load(digests, [4, 5, 6, 99]).exception(WAIT)
    stored, loaded = totals.of("store", "stored"), totals.of("load", "loaded")
    assert (stored.transfers, stored.asked, stored.chunks) == (1, 2, 2)
    assert stored.nbytes == loaded.nbytes == 2 * rig.context.layout.nbytes
    assert totals.of("load", "failed").transfers == 1


def test_no_server_is_an_error_of_each_transfer(movers, make_rig):
    rig = make_rig()
    rig.server.close()
    assert isinstance(rig.store(names(1), [0, 1]).result.exception(WAIT), (PeerGone, Closed))
    assert isinstance(rig.load(names(1), [0, 1]).exception(WAIT), (PeerGone, Closed))
    with pytest.raises(PeerGone):
        rig.context.register()


def test_a_worker_is_one_or_the_other(rig):
    """Which requests a worker may make follows from how it has registered."""
    digests = b"".join(names(1))
    assert rig.ask(PrepareStore(instance=rig.instance, digests=digests)) == "bad_request"
    rig.server.request(Register(instance=3, shard=bytes(32), chunk_bytes=512), WAIT).result(WAIT)
    asked = StoreBlocks(instance=3, transfer=1, digests=digests, blocks=[bytes(8)])
    assert rig.ask(asked) == "bad_request"
