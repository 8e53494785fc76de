"""Every path of the GPU mover, both ways, on a GPU: bytes, fingerprints, order."""

from __future__ import annotations

import time

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.fingerprint import fingerprint
from lmcache_kernels.transfer.moving.gpu_mover import GpuMover
from lmcache_kernels.transfer.moving.moves import ChunkMove
from lmcache_kernels.transfer.moving.planner import PATHS
from lmcache_kernels.views import group_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
WAIT = 30.0
CHUNKS = 5
POISON = 0xA5


class Rig:
    def __init__(self, name, path, *, tokens=32, blocks=96, **options):
        self.cache = make_cache(BY_NAME[name], blocks=blocks, device=DEVICE, **options)
        self.cache.fill_random(7)
        group = group_of(self.cache.tensors, self.cache.axes)
        self.layout = ChunkLayout.of([group], tokens)
        self.mover = GpuMover([group], self.layout, path=path, slice_bytes=4096)
        per_chunk = self.layout.blocks_per_chunk[0]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2)).tolist()
        self.ids = [order[c * per_chunk : (c + 1) * per_chunk] for c in range(2 * CHUNKS)]
        step = -(-self.layout.nbytes // 512) * 512 + 512
        self.host = torch.full((CHUNKS, step), POISON, dtype=torch.uint8, pin_memory=True)

    def moves(self, ids):
        return [
            ChunkMove(host.data_ptr(), (tuple(blocks),), (self.layout.nbytes // 3,), True)
            for host, blocks in zip(self.host, ids, strict=True)
        ]

    def payload(self, chunk):
        return self.host[chunk, : self.layout.nbytes]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_chunks_go_out_and_come_back(name, path):
    rig = Rig(name, path)
    here, there = rig.ids[:CHUNKS], rig.ids[CHUNKS:]
    stored = rig.mover.gather(rig.moves(here), rig.mover.ready())
    assert stored.done.wait(WAIT)
    for chunk, ids in enumerate(here):
        assert torch.equal(rig.payload(chunk), oracle_chunk(rig.cache, ids).cpu())
        assert (rig.host[chunk, rig.layout.nbytes :] == POISON).all()
    sums = [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(CHUNKS)]
    assert stored.fingerprints() == sums
    before = rig.cache.snapshot()
    loaded = rig.mover.scatter(rig.moves(there), rig.mover.ready())
    assert loaded.done.wait(WAIT)
    assert loaded.fingerprints() == sums
    for chunk, ids in enumerate(there):
        assert torch.equal(oracle_chunk(rig.cache, ids).cpu(), rig.payload(chunk))
    assert untouched_outside(rig.cache, before, [block for ids in there for block in ids])
    rig.mover.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_store_reads_what_was_queued_before_it(path):
    rig = Rig("kv_first_nhd", path)
    for value in range(1, 6):
        torch.cuda._sleep(20_000_000)
        rig.cache.fill(value)
        stored = rig.mover.gather(rig.moves(rig.ids[:CHUNKS]), rig.mover.ready())
        assert stored.done.wait(WAIT)
        assert (rig.host[:, : rig.layout.nbytes] == value).all()
    rig.mover.close()


@pytest.mark.parametrize("decoding", [False, True])
def test_more_ids_than_a_launch_brings_along(decoding):
    """They are uploaded in one stream, and the first part of a store is moved in another."""
    rig = Rig("kv_first_nhd", "staged", tokens=128, blocks=400)
    assert rig.layout.blocks_per_chunk[0] > 16
    rig.mover.decoding = decoding
    for turn in range(10):
        here = rig.ids[turn % 2 :: 2]
        torch.cuda._sleep(5_000_000)
        rig.cache.fill_random(turn)
        stored = rig.mover.gather(rig.moves(here), rig.mover.ready())
        assert stored.done.wait(WAIT)
        for chunk, ids in enumerate(here):
            assert torch.equal(rig.payload(chunk), oracle_chunk(rig.cache, ids).cpu())
        assert stored.fingerprints() == [
            (fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(CHUNKS)
        ]
    rig.mover.close()


def test_submits_in_a_row_use_events_of_their_own():
    """Those that were made ahead, and more than these; none is handed out again."""
    rig = Rig("kv_first_nhd", "staged")
    assert rig.mover.gather(rig.moves(rig.ids[:CHUNKS]), None).done.wait(WAIT)
    points = []
    for _ in range(100):
        torch.cuda._sleep(1_000_000)
        points.append(rig.mover.ready())
    assert not points[-1].done()
    assert len({point.event.cuda_event for point in points}) == 100
    torch.cuda.current_stream().synchronize()
    assert all(point.done() for point in points)
    rig.mover.close()


def test_several_movers_share_the_streams_that_were_given_back():
    for _ in range(3):
        rig = Rig("latent", "staged")
        assert rig.mover.gather(rig.moves(rig.ids[:CHUNKS]), None).done.wait(WAIT)
        rig.mover.close()


class Marks:
    """Of an engine that has queued everything, with a pause of so many cycles before the last layer."""

    def __init__(self, rig, content, pause):
        self.order = [list(range(len(content)))]
        self._points = []
        for tensor, new in zip(rig.cache.tensors, content, strict=True):
            if tensor is rig.cache.tensors[-1]:
                torch.cuda._sleep(pause)
            tensor.copy_(new)
            self._points.append(rig.mover.ready())

    def wait(self, place):
        return self._points[place]


def test_all_but_the_last_layer_are_in_host_memory_before_it_is_computed():
    rig = Rig("kv_first_nhd", "staged", layers=4)
    here = rig.ids[:CHUNKS]
    content = [tensor.clone() for tensor in rig.cache.tensors]
    moved = rig.mover.gather(rig.moves(here), None, Marks(rig, content, 1))  # compiles
    assert moved.done.wait(WAIT)
    wanted = rig.host.clone()
    for chunk, ids in enumerate(here):
        assert torch.equal(rig.payload(chunk), oracle_chunk(rig.cache, ids).cpu())
    rig.cache.fill(1)
    rig.host.fill_(POISON)
    torch.cuda.current_stream().synchronize()
    moved = rig.mover.gather(rig.moves(here), None, Marks(rig, content, 2_000_000_000))
    early = slice(0, rig.layout.nbytes // 4 * 3)
    end = time.monotonic() + WAIT
    while not torch.equal(rig.host[:, early], wanted[:, early]):
        assert time.monotonic() < end
    assert not moved.cache_free.done()
    assert moved.done.wait(WAIT)
    assert torch.equal(rig.host, wanted)
    sums = [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(CHUNKS)]
    assert moved.fingerprints() == sums
    rig.mover.close()
