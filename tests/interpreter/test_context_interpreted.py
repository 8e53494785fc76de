"""The engine-driven context over the GPU's mover, on a device that does what is queued in any order
that events allow."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import ExitStack

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk
from lazy_device import LazyDevice

from lmcache_kernels.errors import Closed
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.moving.device import EventCompletion
from lmcache_kernels.transfer.moving.gpu_mover import GpuMover
from lmcache_kernels.views import group_of

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

CHUNK_TOKENS = 8
WAIT = 30.0


class LazyEngine:
    """An engine whose work is a stream of the device; the context has what it queues there before a
    submit as what the submit comes after, unless it ignores that."""

    def __init__(
        self, closing, seed, *, ignores_the_engine=False, slices=2, slice_bytes=512, layers=2
    ):
        self.device = LazyDevice(seed)
        self.stream = self.device.stream("engine")
        self.cache = make_cache(BY_NAME["kv_first_nhd"], layers=layers, blocks=12)
        self._queued = threading.Semaphore(0)
        engine = self

        class Mover(GpuMover):
            def ready(self):
                event = engine.device.event()
                engine.device.record(event, engine.stream)
                return EventCompletion(event)

            def gather(self, moves, after, layers=None):
                moved = super().gather(moves, None if ignores_the_engine else after, layers)
                engine._queued.release()
                return moved

            def join(self, point):
                engine.device.wait(engine.stream, point.event)

            def scatter(self, moves, after, layers=None):
                moved = super().scatter(moves, after, layers)
                engine._queued.release()
                return moved

        server = closing.enter_context(EmbeddedCache(1 << 17, chunk_tokens=CHUNK_TOKENS))
        self.context = EngineDrivenContext(
            [group_of(self.cache.tensors, self.cache.axes)],
            chunk_tokens=CHUNK_TOKENS,
            shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
            instance=secrets.randbits(63),
            port=server,
            mover=lambda groups, layout: Mover(
                groups, layout, device=self.device, slice_bytes=slice_bytes, slices=slices
            ),
        )
        closing.callback(self.context.close)

    def computes(self, value):
        """Queue work, the end of which fills the whole cache."""
        for _ in range(50):
            self.device.run(self.stream, lambda: None)
        self.device.run(self.stream, self.cache.fill, value)

    def store(self, digests, ids):
        transfer = self.context.submit_store(digests, [ids])
        assert self._queued.acquire(timeout=WAIT)
        return transfer

    def load(self, digests, ids):
        result = self.context.submit_retrieve(digests, [ids])
        assert self._queued.acquire(timeout=WAIT)
        self.device.settle()
        return result.result(WAIT)


@pytest.fixture
def make():
    with ExitStack() as closing:
        yield lambda seed, **options: LazyEngine(closing, seed, **options)


def stored_content(engine):
    """The bytes that are stored of blocks that hold 1, and for which the engine has computed 2."""
    engine.cache.fill(1)
    engine.computes(2)
    digests = [secrets.token_bytes(32)]
    transfer = engine.store(digests, [3, 4])
    engine.device.settle()
    assert transfer.result.result(WAIT) == 1
    assert engine.load(digests, [8, 9]) == 1
    return set(oracle_chunk(engine.cache, [8, 9]).tolist())


def test_fault_b01_a_store_reads_what_the_engine_has_queued_and_not_computed(make):
    """The host knows the blocks as computed; the device has not done it yet."""
    for seed in range(15):
        assert stored_content(make(seed)) == {2}


def test_fault_b01_without_the_wait_for_the_engine_it_would_be_seen(make):
    found = [stored_content(make(seed, ignores_the_engine=True)) for seed in range(15)]
    assert {1} in found


@pytest.mark.parametrize("seed", range(4))
def test_fault_b06_blocks_are_free_after_a_flush_while_the_link_is_still_busy(make, seed):
    """The engine's next work overwrites them before the copy to host memory is over."""
    engine = make(seed, slice_bytes=1 << 20)
    engine.cache.fill(1)
    digests = [secrets.token_bytes(32) for _ in range(2)]
    transfer = engine.store(digests, [3, 4, 6, 7])
    _engine, _kernels, link, _aside = engine.device.streams
    flushing = threading.Thread(target=engine.context.flush, args=([transfer], WAIT))
    flushing.start()
    engine.device.settle(held=[link])
    flushing.join(WAIT)
    assert not flushing.is_alive()
    assert link.work
    engine.computes(2)
    engine.device.settle(held=[link])
    assert not transfer.result.done()
    engine.device.settle()
    assert transfer.result.result(WAIT) == 2
    assert engine.load(digests, [8, 9, 10, 11]) == 2
    assert set(oracle_chunk(engine.cache, [8, 9, 10, 11]).tolist()) == {1}


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_uses_each_layer_of_a_layered_load_when_it_is_there(make, seed):
    """What it queues after waiting for a layer finds that layer's content, whatever else is late."""
    engine = make(seed, layers=4)
    engine.cache.fill_random(seed)
    digests = [secrets.token_bytes(32) for _ in range(2)]
    transfer = engine.store(digests, [0, 1, 2, 3])
    engine.device.settle()
    assert transfer.result.result(WAIT) == 2
    order = [2, 0, 3, 1]
    load = engine.context.submit_layered_retrieve(digests, [[8, 9, 10, 11]], [order])
    seen = {}
    for place in range(4):
        layer = order.index(place)
        assert load.wait_layer(place, WAIT)
        tensor = engine.cache.tensors[layer].view(torch.int16)

        def forward(layer=layer, tensor=tensor):
            seen[layer] = torch.equal(tensor[:, 8:12], tensor[:, 0:4])

        engine.device.run(engine.stream, forward)
    engine.device.settle()
    assert load.result.result(WAIT) == 2
    assert seen == dict.fromkeys(range(4), True)


def followed(engine, digests, ids):
    """A layered store and what queues the next layer, the content of which is its number and 2."""
    layers = range(len(engine.cache.tensors))
    store = engine.context.submit_layered_store(digests, [ids], [list(layers)])

    def compute(layer):
        engine.device.run(engine.stream, engine.cache.tensors[layer].fill_, layer + 2)
        store.saved(layer)

    return store, compute


@pytest.mark.parametrize("seed", range(8))
def test_a_layered_store_reads_what_the_engine_has_queued_for_each_layer(make, seed):
    """And blocks are free after a flush, though the link is still busy."""
    engine = make(seed, layers=5, slices=4, slice_bytes=1 << 20)
    engine.cache.fill(1)
    digests = [secrets.token_bytes(32) for _ in range(2)]
    store, compute = followed(engine, digests, [0, 1, 2, 3])
    for layer in range(5):
        compute(layer)
    assert engine._queued.acquire(timeout=WAIT)
    flushing = threading.Thread(target=engine.context.flush, args=([store], WAIT))
    flushing.start()
    link = engine.device.streams[2]
    engine.device.settle(held=[link])
    flushing.join(WAIT)
    assert not flushing.is_alive()
    engine.device.run(engine.stream, engine.cache.fill, 9)
    engine.device.settle(held=[link])
    assert not store.result.done()
    engine.device.settle()
    assert store.result.result(WAIT) == 2
    assert engine.load(digests, [8, 9, 10, 11]) == 2
    for layer, tensor in enumerate(engine.cache.tensors):
        assert (tensor[:, 8:12] == layer + 2).all()


@pytest.mark.parametrize("computed", range(5))
def test_a_flush_in_the_middle_of_a_layered_store_waits_for_what_reads_the_cache(make, computed):
    """By the engine's thread, which owes the other layers; the next store is whole."""
    engine = make(computed, layers=5)
    digests = [secrets.token_bytes(32)]
    store, compute = followed(engine, digests, [0, 1])
    for layer in range(computed):
        compute(layer)
    engine.context.flush([store], WAIT)
    movers = engine.device.streams[1:]
    assert not any(stream.work for stream in movers)
    for layer in range(computed, 5):
        compute(layer)
    with pytest.raises(Closed, match="stopped before"):
        store.result.result(WAIT)
    engine.device.settle()
    store, compute = followed(engine, digests, [0, 1])
    for layer in range(5):
        compute(layer)
    assert engine._queued.acquire(timeout=WAIT)
    engine.device.settle()
    assert store.result.result(WAIT) == 1
    assert engine.load(digests, [8, 9]) == 1
    for layer, tensor in enumerate(engine.cache.tensors):
        assert (tensor[:, 8:10] == layer + 2).all()
