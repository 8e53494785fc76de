"""Stores that follow an engine layer by layer, on a device that does what is queued in any order that
events allow."""

from __future__ import annotations

import os

import pytest
import torch
from cachekit import BY_NAME, make_cache
from chunkkit import examples
from hybridkit import BLOCKS, gemma
from hypothesis import given
from hypothesis import strategies as st
from lazy_device import LazyDevice

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.errors import Closed, LayoutError
from lmcache_kernels.transfer.moving.device import EventCompletion
from lmcache_kernels.transfer.moving.gpu_mover import GpuMover
from lmcache_kernels.transfer.moving.moves import ChunkMove, StillMovingError
from lmcache_kernels.views import group_of

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

CHUNK_TOKENS = 16
POISON = 0xA5


def plain(name, layers):
    """Views of each layer, the groups, when the engine computes which layer, blocks."""
    cache = make_cache(BY_NAME[name], layers=layers, blocks=BLOCKS)
    axes = cache.axes.split()
    views = cache.tensors
    if "layer" in axes:
        views = [cache.tensors[0].select(axes.index("layer"), layer) for layer in range(layers)]
    return [views], [group_of(cache.tensors, cache.axes)], [list(range(layers))]


def hybrid(model=gemma):
    caches, groups, order = model()
    return caches, [group.read() for group in groups], order


class Marks:
    """An engine that queues the next layers when the store waits for them, the last one elsewhere."""

    def __init__(self, rig, *, step=1, fails_at=None, ignored=False, idle=False):
        self.order = rig.order
        self._rig, self._step, self._fails_at, self._ignored = rig, step, fails_at, ignored
        self.computed = -1
        self._idle = idle
        self._stream, self.last_stream = rig.device.stream("engine"), rig.device.stream("engine")
        self.asked = []
        self.events = {}

    def wait(self, place):
        self.asked.append(place)
        device = self._rig.device
        while self.computed < place:
            first, self.computed = (
                self.computed + 1,
                min(self.computed + self._step, self._rig.last),
            )
            if self._fails_at is not None and self.computed >= self._fails_at:
                raise Closed("the engine computes no more")
            at = self._stream
            if self.computed == self._rig.last:
                at = self.last_stream
                device.wait(at, self._point(self._stream))
            for layer in range(first, self.computed + 1):
                device.run(at, self._rig.compute, layer)
            self.events[self.computed] = self._point(at)
            if not self._idle:
                device.settle_some()
        if self._ignored:
            return None
        return EventCompletion(next(e for at, e in self.events.items() if at >= place))

    def _point(self, stream):
        event = self._rig.device.event()
        self._rig.device.record(event, stream)
        return event


class Rig:
    """A cache whose layers hold something old, what an engine will make of them, and host slots."""

    def __init__(self, model, *, chunks=2, seed=0, **options):
        self.views, groups, self.order = model
        self.last = max(max(places) for places in self.order)
        self.device = LazyDevice(seed)
        self.layout = ChunkLayout.of(groups, CHUNK_TOKENS)
        self.mover = GpuMover(groups, self.layout, device=self.device, **options)
        blocks = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
        counts = self.layout.blocks_per_chunk
        self.ids = [
            tuple(tuple(blocks[c * n : (c + 1) * n]) for n in counts) for c in range(chunks)
        ]
        step = -(-self.layout.nbytes // 512) * 512 + 512
        self.host = torch.full((chunks * step + 512,), POISON, dtype=torch.uint8)
        self.at = [
            self.host.data_ptr() + -self.host.data_ptr() % 512 + chunk * step
            for chunk in range(chunks)
        ]
        generator = torch.Generator().manual_seed(seed)
        self._new = [
            [torch.randn(view.shape, generator=generator).to(view.dtype) for view in views]
            for views in self.views
        ]
        # What a plain store of the finished layers writes.
        for place in range(self.last + 1):
            self.compute(place)
        moved = self.mover.gather(self.moves(), None)
        self.device.settle()
        self.sums, self.wanted = moved.fingerprints(), self.host.clone()
        self.forget()

    def forget(self):
        """The layers hold something old, and the slots nothing."""
        for view in (view for views in self.views for view in views):
            view.fill_(1)
        self.host.fill_(POISON)

    def compute(self, place):
        for views, new, places in zip(self.views, self._new, self.order, strict=True):
            for view, content, at in zip(views, new, places, strict=True):
                if at == place:
                    view.copy_(content)

    def moves(self):
        return [
            ChunkMove(at, blocks, reachable=True)
            for at, blocks in zip(self.at, self.ids, strict=True)
        ]

    def payload(self, chunk, nbytes=None):
        start = self.at[chunk] - self.host.data_ptr()
        return slice(start, start + (nbytes or self.layout.nbytes))


models = st.one_of(
    st.tuples(st.sampled_from(sorted(BY_NAME)), st.integers(1, 6)).map(lambda one: plain(*one)),
    st.just(None).map(lambda _: hybrid()),
)


@examples(25, 1000)
@given(
    model=models,
    seed=st.integers(0, 1 << 30),
    step=st.integers(1, 7),
    slices=st.integers(1, 4),
    slice_bytes=st.sampled_from([64, 300, 1024, 5000, 1 << 20]),
)
def test_any_order_that_events_allow_stores_what_the_engine_computed(
    model, seed, step, slices, slice_bytes
):
    """And not what it writes once the blocks are free; engines may tell of several layers at once."""
    rig = Rig(model, seed=seed, slices=slices, slice_bytes=slice_bytes)
    marks = Marks(rig, step=step)
    moved = rig.mover.gather(rig.moves(), None, marks)
    rig.device.wait(marks.last_stream, moved.cache_free.event)
    for views in rig.views:
        for view in views:
            rig.device.run(marks.last_stream, view.fill_, 3)
    rig.device.settle()
    assert torch.equal(rig.host, rig.wanted)
    assert moved.fingerprints() == rig.sums
    assert marks.asked == sorted(set(marks.asked))
    assert marks.asked[-1] == rig.last


def test_a_store_that_does_not_wait_for_layers_would_be_seen():
    wrong = 0
    for seed in range(10):
        rig = Rig(plain("kv_first_nhd", 6), seed=seed)
        rig.mover.gather(rig.moves(), None, Marks(rig, ignored=True))
        rig.device.settle()
        wrong += not torch.equal(rig.host, rig.wanted)
    assert wrong


@pytest.mark.parametrize("layers", [2, 3, 8])
def test_all_but_the_last_layer_are_in_host_memory_before_it_is_computed(layers):
    """The device has not begun with it."""
    rig = Rig(plain("kv_first_nhd", layers))
    marks = Marks(rig, idle=True)
    moved = rig.mover.gather(rig.moves(), None, marks)
    rig.device.settle(held=[marks.last_stream])
    done = rig.layout.nbytes // layers * (layers - 1)
    for chunk in range(2):
        there = rig.payload(chunk, done)
        assert torch.equal(rig.host[there], rig.wanted[there])
    assert not moved.cache_free.done()
    rig.device.settle()
    assert torch.equal(rig.host, rig.wanted)


def test_a_layer_is_read_in_few_parts():
    """One layer is left for the end, two before that, then four: every part costs a launch a chunk."""
    rig = Rig(plain("kv_first_nhd", 20))
    marks = Marks(rig)
    rig.mover.gather(rig.moves(), None, marks)
    assert marks.asked == [4, 12, 16, 18, 19]
    rig.device.settle()


def test_layers_are_read_in_the_order_in_which_they_are_computed():
    """Whatever order they lie in."""
    views, groups, _ = plain("kv_first_nhd", 4)
    rig = Rig((views, groups, [[30, 10, 0, 20]]))
    marks = Marks(rig, step=10)
    moved = rig.mover.gather(rig.moves(), None, marks)
    assert marks.asked == [0, 10, 20, 30]
    rig.device.settle()
    assert torch.equal(rig.host, rig.wanted)
    assert moved.fingerprints() == rig.sums


@pytest.mark.parametrize("fails_at", [0, 1, 3, 5])
def test_an_engine_that_computes_no_more_ends_the_store_and_the_next_one_is_whole(fails_at):
    """What was queued before is over when the error comes, and its fingerprints are forgotten."""
    rig = Rig(plain("block_first_hnd", 6), slice_bytes=512)
    with pytest.raises(Closed, match="computes no more"):
        rig.mover.gather(rig.moves(), None, Marks(rig, fails_at=fails_at))
    assert not any(stream.work for stream in rig.device.streams[:2])
    rig.device.settle()
    rig.forget()
    moved = rig.mover.gather(rig.moves(), None, Marks(rig))
    rig.device.settle()
    assert torch.equal(rig.host, rig.wanted)
    assert moved.fingerprints() == rig.sums


def test_a_device_that_has_stopped_says_what_it_may_still_write():
    rig = Rig(plain("kv_first_nhd", 6))
    rig.device.stopped = True
    with pytest.raises(StillMovingError, match="computes no more") as caught:
        rig.mover.gather(rig.moves(), None, Marks(rig, fails_at=5))
    assert not caught.value.done.done()
    rig.device.stopped = False
    rig.device.settle()
    assert caught.value.done.done()


@pytest.mark.parametrize("order", [[], [[0, 1], [2]], [[]], [[0, 1, 2, 3, 4]]])
def test_layers_that_are_not_those_of_the_cache_are_refused(order):
    rig = Rig(plain("kv_first_nhd", 3))
    marks = Marks(rig)
    marks.order = order
    with pytest.raises(LayoutError, match="layers"):
        rig.mover.gather(rig.moves(), None, marks)
    assert marks.asked == []
