"""What an observer hears of transfers, and that it cannot harm them."""

from __future__ import annotations

import secrets
import sys
import threading
from contextlib import ExitStack, contextmanager
from types import ModuleType

import pytest
from arena_tools import damage_headers
from cachekit import BY_NAME, make_cache
from gate_port import GatePort
from held_mover import HeldMover

from lmcache_kernels.adapters.messaging import connect as connecting
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.errors import KVTransferError
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.messages import PrepareStore, Register
from lmcache_kernels.transfer.moving.nvtx import SWITCH, nvtx_ranges
from lmcache_kernels.transfer.observer import Guarded, NullObserver, Sum, Totals, TransferEvent
from lmcache_kernels.views import group_of

CHUNK = 8
WAIT = 30.0


class Collected:
    def __init__(self):
        self.events = []

    def transfer_over(self, event):
        self.events.append(event)


@pytest.fixture
def make():
    """A context of an asynchronous mover, its gate and its mover, told of an observer."""
    with ExitStack() as closing:

        def build(observer):
            cache = make_cache(BY_NAME["kv_first_nhd"], blocks=32)
            port = GatePort(closing.enter_context(EmbeddedCache(1 << 20, chunk_tokens=CHUNK)))
            movers = []

            def mover(groups, layout):
                movers.append(HeldMover(groups, layout))
                return movers[0]

            context = EngineDrivenContext(
                [group_of(cache.tensors, cache.axes)],
                chunk_tokens=CHUNK,
                shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
                instance=secrets.randbits(63),
                port=port,
                mover=mover,
                observer=observer,
            )
            closing.callback(context.close)
            closing.callback(lambda: (port.let_go(), movers[0].let_go()))
            return context, port, movers[0]

        yield build


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


def store(context, digests, ids):
    return context.submit_store(digests, [ids]).result.result(WAIT)


def load(context, digests, ids):
    return context.submit_retrieve(digests, [ids]).result(WAIT)


def test_bytes_are_those_that_moved(make):
    """A chunk that a load leaves out counts as loaded, and not as moved."""
    seen = Collected()
    context, _, _ = make(seen)
    digests = names(3)
    assert store(context, digests, [0, 1, 2, 3, 4, 5]) == 3
    ids = [[8, 9, 10, 11, 12, 13]]
    assert context.submit_retrieve(digests, ids, skip_first_n_tokens=CHUNK).result(WAIT) == 3
    (size,) = context.layout.group_bytes
    assert [(event.chunks, event.nbytes) for event in seen.events] == [(3, 3 * size), (3, 2 * size)]


def test_fault_j01_totals_are_exact(make):
    """Stores of 2 and 1 chunks, one of which was there, one failed; loads of 3, 2 of 4 and none, one
    failed. Bytes are those of the payload."""
    totals = Totals()
    context, _, mover = make(totals)
    chunk = context.layout.nbytes
    digests = names(4)
    assert store(context, digests[:2], [0, 1, 2, 3]) == 2
    assert store(context, digests[:3], [0, 1, 2, 3, 4, 5]) == 1

    def fail(direction):
        raise RuntimeError("no such luck")

    mover.before = fail
    with pytest.raises(RuntimeError):
        store(context, digests[3:], [6, 7])
    with pytest.raises(RuntimeError):
        load(context, digests[:1], [10, 11])
    mover.before = lambda direction: None
    assert load(context, digests[:3], list(range(10, 16))) == 3
    assert load(context, [*digests[:2], *names(2)], list(range(10, 18))) == 2
    assert load(context, names(1), [10, 11]) == 0

    def counts(direction, outcome):
        found = totals.of(direction, outcome)
        return found.transfers, found.asked, found.chunks, found.nbytes

    assert counts("store", "stored") == (2, 5, 3, 3 * chunk)
    assert counts("store", "failed") == (1, 1, 0, 0)
    assert counts("load", "loaded") == (3, 8, 5, 5 * chunk)
    assert counts("load", "failed") == (1, 1, 0, 0)
    assert totals.of("load", "damaged") == Sum()
    assert len(totals.all()) == 4


def test_an_event_says_how_long_it_waited_how_fast_it_was_and_on_which_way(make):
    seen = Collected()
    context, port, _ = make(seen)
    port.hold(PrepareStore)
    first, second = (context.submit_store(names(1), [[0, 1]]) for _ in range(2))
    port.wait_sent(PrepareStore)
    port.let_go()
    assert [one.result.result(WAIT) for one in (first, second)] == [1, 1]
    one, two = seen.events
    assert (one.direction, one.outcome, one.asked, one.chunks) == ("store", "stored", 1, 1)
    assert one.nbytes == context.layout.nbytes
    assert one.note == "on the host: a test"
    assert one.seconds > 0
    assert one.gb_per_second == pytest.approx(one.nbytes / one.seconds / 1e9)
    assert two.wait_seconds > one.wait_seconds >= 0
    assert TransferEvent("load", "loaded", 1, 1, 5, 0.0, 0.0).gb_per_second == 0.0


def test_damaged_stopped_and_failed_transfers_are_told_apart(make):
    seen = Collected()
    context, port, _ = make(seen)
    digests = names(2)
    assert store(context, digests, [0, 1, 2, 3]) == 2
    (registered,) = [reply for request, reply in port.replies if isinstance(request, Register)]
    assert damage_headers(registered, keep=1) == 1
    assert load(context, digests, [8, 9, 10, 11]) == 1
    port.hold(PrepareStore)
    stopped = context.submit_store(names(1), [[0, 1]])
    port.wait_sent(PrepareStore, 2)
    context.flush([stopped])
    port.let_go()
    assert isinstance(stopped.result.exception(WAIT), KVTransferError)
    with pytest.raises(KVTransferError):
        load(context, names(1), [0, 99])
    assert [(e.direction, e.outcome, e.chunks) for e in seen.events] == [
        ("store", "stored", 2),
        ("load", "damaged", 1),
        ("store", "stopped", 0),
        ("load", "failed", 0),
    ]
    assert seen.events[3].note.startswith("LayoutError: block_ids[0][1]")


class Harmful:
    def __init__(self, error):
        self.error = error

    def transfer_over(self, event):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_an_observer_that_raises_harms_no_transfer(make, error, caplog):
    context, _, _ = make(Harmful(error))
    digests = names(1)
    for _ in range(3):
        store(context, digests, [0, 1])
        assert load(context, digests, [8, 9]) == 1
    assert caplog.text.count("the observer failed") == 3  # of six: the 1st, 2nd, 4th


def test_totals_add_up_from_many_threads():
    totals = Totals()
    event = TransferEvent("load", "loaded", 2, 1, 10, 0.5, 0.25)

    def report():
        for _ in range(500):
            totals.transfer_over(event)

    threads = [threading.Thread(target=report) for _ in range(8)]
    switch, _ = sys.getswitchinterval(), sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert totals.of("load", "loaded") == Sum(4000, 8000, 4000, 40000, 2000.0, 1000.0)


def test_the_default_observer_looks_away():
    event = TransferEvent("load", "loaded", 1, 1, 1, 0.0, 0.0)
    NullObserver().transfer_over(event)
    Guarded(NullObserver()).transfer_over(event)


def test_connect_takes_an_observer():
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8)
    totals = Totals()
    with (
        spawn_server(size_gb=0.01, chunk_size=CHUNK) as server,
        connect(
            server.url,
            [group_of(cache.tensors, cache.axes)],
            chunk_tokens=CHUNK,
            observer=totals,
        ) as context,
    ):
        assert store(context, names(1), [0, 1]) == 1
    assert totals.of("store", "stored").transfers == 1


def test_connect_has_its_pings_keep_the_worker_registered(monkeypatch):
    clients = []

    def client(*arguments, **options):
        clients.append(CacheClient(*arguments, **options))
        return clients[-1]

    monkeypatch.setattr(connecting, "CacheClient", client)
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8)
    with (
        spawn_server(size_gb=0.01, chunk_size=CHUNK) as server,
        connect(server.url, [group_of(cache.tensors, cache.axes)], chunk_tokens=CHUNK) as context,
    ):
        assert [one.instance_id for one in clients] == [context.instance]


def test_ranges_for_profilers_are_there_where_they_are_switched_on(monkeypatch):
    opened = []

    @contextmanager
    def range_(name):
        opened.append(name)
        yield

    import torch

    fake = ModuleType("torch.cuda.nvtx")
    fake.range = range_
    monkeypatch.setattr(torch.cuda, "nvtx", fake)
    for device, switch, count in (("cpu", "1", 0), ("cuda:0", "0", 0), ("cuda:0", "1", 1)):
        monkeypatch.setenv(SWITCH, switch)
        with nvtx_ranges(device)("gather 3 chunks"):
            pass
        assert len(opened) == count
    monkeypatch.delenv(SWITCH)
    with nvtx_ranges("cuda:0")("gather 3 chunks"):
        pass
    assert opened == ["gather 3 chunks"]
