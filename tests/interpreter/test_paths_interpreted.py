"""The paths of the GPU mover on a device that does what is queued in any order that events allow."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk, row_count, run_bytes
from chunkkit import examples
from hypothesis import given
from hypothesis import strategies as st
from lazy_device import LazyDevice

from lmcache_kernels.chunk_copy import ChunkCopy
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.errors import ConfigError, LayoutError, TransferFailed
from lmcache_kernels.fingerprint import fingerprint
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.transfer.moving import path as path_module
from lmcache_kernels.transfer.moving import slice_plan, staged_path, tally
from lmcache_kernels.transfer.moving.device import EventCompletion
from lmcache_kernels.transfer.moving.gpu_mover import GpuMover
from lmcache_kernels.transfer.moving.moves import ChunkMove, StillMovingError
from lmcache_kernels.transfer.moving.planner import PATHS
from lmcache_kernels.views import group_of

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

CHUNK_TOKENS = 32
POISON = 0xA5


class Rig:
    """A cache, a mover and host slots with poison around them."""

    def __init__(
        self,
        name="kv_first_nhd",
        *,
        chunks=3,
        seed=0,
        blocks=40,
        layers=2,
        path="staged",
        even=True,
        **options,
    ):
        self.device = LazyDevice(seed)
        self.cache = make_cache(BY_NAME[name], layers=layers, blocks=blocks, device="cpu")
        self.cache.fill_random(seed)
        group = group_of(self.cache.tensors, self.cache.axes)
        self.layout = ChunkLayout.of([group], CHUNK_TOKENS)
        self.per_chunk = self.layout.blocks_per_chunk[0]
        self.mover = GpuMover([group], self.layout, device=self.device, path=path, **options)
        self.step = -(-self.layout.nbytes // 512) * 512 + 512
        self.starts = [c * self.step + (0 if even else 512 * c * c) for c in range(chunks)]
        size = self.starts[-1] + self.step + 512
        self.host = torch.full((size,), POISON, dtype=torch.uint8)
        self.first = -self.host.data_ptr() % 512
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.ids = [order[c * self.per_chunk : (c + 1) * self.per_chunk] for c in range(chunks)]
        self.free = order[chunks * self.per_chunk :]

    def moves(self, ids=None, cuts=()):
        at = self.host.data_ptr() + self.first
        return [
            ChunkMove(at + self.starts[number], (tuple(blocks),), cuts, reachable=True)
            for number, blocks in enumerate(ids or self.ids)
        ]

    def payload(self, chunk):
        start = self.first + self.starts[chunk]
        return self.host[start : start + self.layout.nbytes]

    def between(self, chunk):
        start = self.first + self.starts[chunk] + self.layout.nbytes
        return self.host[start : start + self.step - self.layout.nbytes]

    def store(self, **options):
        moved = self.mover.gather(self.moves(**options), None)
        self.device.settle()
        assert moved.done.done()
        assert moved.cache_free.done()
        return moved.fingerprints()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_what_is_stored_is_whole_and_loads_into_other_blocks(name, path):
    rig = Rig(name, chunks=2, slice_bytes=1024, max_programs=4, path=path)
    sums = rig.store()
    for chunk, ids in enumerate(rig.ids):
        assert torch.equal(rig.payload(chunk), oracle_chunk(rig.cache, ids))
        assert (rig.between(chunk) == POISON).all()
        assert sums[chunk] == (fingerprint(bytes(rig.payload(chunk).numpy())),)
    to = [rig.free[: rig.per_chunk], rig.free[rig.per_chunk : 2 * rig.per_chunk]]
    moved = rig.mover.scatter(rig.moves(to), None)
    rig.device.settle()
    assert moved.fingerprints() == sums
    for chunk, ids in enumerate(to):
        assert torch.equal(oracle_chunk(rig.cache, ids), rig.payload(chunk))


@examples(40, 1000)
@given(
    seed=st.integers(0, 1 << 30),
    slices=st.integers(1, 4),
    slice_bytes=st.sampled_from([64, 300, 1024, 5000, 1 << 20]),
    cuts=st.lists(st.integers(1, 3000), max_size=3, unique=True).map(sorted),
    both=st.booleans(),
    path=st.sampled_from(PATHS),
)
def test_any_order_that_events_allow_gives_the_same_bytes(
    seed, slices, slice_bytes, cuts, both, path
):
    """Slices are few, cuts anywhere, and a load of other chunks may run at the same time."""
    rig = Rig(seed=seed, chunks=4, slices=slices, slice_bytes=slice_bytes, path=path)
    cuts = tuple(cut for cut in cuts if cut < rig.layout.nbytes)
    rig.store()
    stored, ids = rig.host.clone(), rig.ids
    rig.host.fill_(POISON)
    first = rig.mover.gather(rig.moves(ids[:2], cuts), None)
    if both:
        other = Rig(seed=seed, chunks=4)
        other.host.copy_(stored)
        to = rig.free[: rig.per_chunk]
        move = ChunkMove(other.moves()[3].address, (tuple(to),), cuts, reachable=True)
        loading = rig.mover.scatter([move], None)
    second = rig.mover.gather(rig.moves(cuts=cuts)[2:], None)
    rig.device.settle()
    assert torch.equal(rig.host, stored)
    assert len(first.fingerprints()) == len(second.fingerprints()) == 2
    if both:
        assert torch.equal(oracle_chunk(rig.cache, to), other.payload(3))
        assert loading.fingerprints() == [(fingerprint(bytes(other.payload(3).numpy())),)]


@pytest.mark.parametrize("path", PATHS)
def test_blocks_that_are_left_out_keep_what_they_hold(path):
    rig = Rig(slice_bytes=256, path=path)
    sums = rig.store()
    to = rig.free[: rig.per_chunk]
    before = oracle_chunk(rig.cache, to[:1])
    moved = rig.mover.scatter(rig.moves([[ABSENT, *to[1:]]]), None)
    rig.device.settle()
    assert torch.equal(oracle_chunk(rig.cache, to[:1]), before)
    assert torch.equal(oracle_chunk(rig.cache, to[1:]), oracle_chunk(rig.cache, rig.ids[0][1:]))
    assert moved.fingerprints() == sums[:1]


@pytest.mark.parametrize("path", ["staged", "batch"])
@pytest.mark.parametrize("fail_at", [1, 2, 7])
def test_a_refused_copy_ends_the_run_and_the_next_one_is_whole(fail_at, path):
    """What was queued before is over when the error comes, and its fingerprints are forgotten."""
    rig = Rig(slice_bytes=512, path=path)
    rig.device.fail_at = fail_at
    with pytest.raises(RuntimeError, match="luck"):
        rig.mover.gather(rig.moves(), None)
    assert not any(stream.work for stream in rig.device.streams)
    sums = rig.store()
    assert sums == [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(3)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("storing", [True, False])
@pytest.mark.parametrize("slice_bytes", [None, 512])
def test_nothing_touches_the_cache_before_what_it_comes_after(path, storing, slice_bytes):
    rig = Rig(path=path, chunks=1, slices=1, slice_bytes=slice_bytes)
    rig.store()
    engine, event = rig.device.stream("engine"), rig.device.event()
    before = [storage.clone() for storage in rig.cache.storages]
    to = rig.free[: rig.per_chunk]
    rig.device.record(event, engine)
    after = EventCompletion(event)
    if storing:
        rig.host.fill_(POISON)
        moved = rig.mover.gather(rig.moves(), after)
    else:
        moved = rig.mover.scatter(rig.moves([to]), after)
    rig.device.settle(held=[engine])
    assert not moved.cache_free.done()
    if storing:
        assert (rig.host == POISON).all()
        rig.cache.fill(9)  # what the engine computes last
    else:
        assert all(
            torch.equal(old, new) for old, new in zip(before, rig.cache.storages, strict=True)
        )
    rig.device.settle()
    if storing:
        assert (rig.payload(0) == 9).all()
    else:
        assert torch.equal(oracle_chunk(rig.cache, to), rig.payload(0))


def test_memory_that_kernels_do_not_reach_goes_through_slices():
    rig = Rig(path="direct")
    moves = [ChunkMove(move.address, move.blocks) for move in rig.moves()]
    assert rig.mover.choose(moves, storing=True).path == "staged"
    assert rig.mover.choose(rig.moves(), storing=True).path == "direct"


def test_a_store_beside_decoding_has_no_head():
    """A kernel that writes to the host itself would be in the way for as long as the link takes."""
    rig = Rig(chunks=1, slices=8, slice_bytes=512)
    rig.mover.decoding = True
    sums = rig.store()
    assert len(rig.device.streams) == 2
    assert sums == [(fingerprint(bytes(rig.payload(0).numpy())),)]


@pytest.mark.parametrize(("storing", "head"), [(True, 512), (True, 1 << 20), (False, 0)])
def test_slices_grow_from_the_end_at_which_one_engine_waits(storing, head, monkeypatch):
    monkeypatch.setattr(staged_path, "_RAMP", (256, 1024))
    monkeypatch.setattr(staged_path, "WHOLE_BYTES", 0)
    monkeypatch.setattr(staged_path, "head_bytes", lambda nbytes: head)
    rig = Rig(chunks=8, blocks=80, slices=2, slice_bytes=8192, layers=1)
    sizes, copy, batch = [], rig.device.copy, rig.device.copy_batch
    rows = rig.device.copy_rows

    def watched(stream, to, origin, nbytes, *, pinned):
        sizes.append(nbytes)
        copy(stream, to, origin, nbytes, pinned=pinned)

    def watched_rows(stream, to, origin, nbytes, count):
        sizes.append(nbytes * count)
        rows(stream, to, origin, nbytes, count)

    def watched_batch(stream, to, origin, some):
        sizes.append(int(some.sum()))
        batch(stream, to, origin, some)

    rig.store()
    monkeypatch.setattr(rig.device, "copy", watched)
    monkeypatch.setattr(rig.device, "copy_rows", watched_rows)
    monkeypatch.setattr(rig.device, "copy_batch", watched_batch)
    if storing:
        rig.store()
    else:
        rig.mover.scatter(rig.moves(), None)
        rig.device.settle()
    largest = max(rig.layout.nbytes, 1024)  # a part that is larger is alone
    near = sizes if storing else sizes[::-1]
    assert len(near) > 2
    assert near[0] <= largest
    assert max(near) > largest


@pytest.mark.parametrize(("alone", "batched", "copies"), [(1, 0, 2), (1 << 20, 1, 3)])
def test_large_copies_of_a_slice_are_not_batched(alone, batched, copies, monkeypatch):
    """Of the three the first two are rows of one: any two are evenly spaced."""
    monkeypatch.setattr(staged_path, "ALONE_BYTES", alone)
    rig = Rig(chunks=3, slice_bytes=1 << 20, even=False)
    rig.store()
    assert rig.device.batch_calls == batched
    assert rig.device.copies == copies


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_the_copies_of_a_load_that_have_slices_begin_before_its_ids_are_made_ready(slices):
    rig = Rig(chunks=1, slices=slices, slice_bytes=512)
    rig.store()
    path = rig.mover._at("staged", storing=False)
    path.open()
    queued, copied = path._copy.queued, []
    before = rig.device.copies

    @contextmanager
    def watched(*arguments):
        copied.append(rig.device.copies - before)
        with queued(*arguments) as launch:
            yield launch

    path._copy.queued = watched
    to = rig.free[: rig.per_chunk]
    rig.mover.scatter(rig.moves([to]), None)
    rig.device.settle()
    assert copied == [slices]
    assert torch.equal(oracle_chunk(rig.cache, to), rig.payload(0))


@pytest.mark.parametrize("path", PATHS)
def test_ids_that_are_no_blocks_leave_nothing_under_way_and_the_next_load_is_whole(path):
    rig = Rig(chunks=1, slices=2, slice_bytes=512, path=path)
    sums = rig.store()
    before = [storage.clone() for storage in rig.cache.storages]
    to = rig.free[: rig.per_chunk]
    with pytest.raises(LayoutError, match="ids"):
        rig.mover.scatter(rig.moves([[40, *to[1:]]]), None)
    assert not any(stream.work for stream in rig.device.streams)
    assert all(torch.equal(old, new) for old, new in zip(before, rig.cache.storages, strict=True))
    moved = rig.mover.scatter(rig.moves([to]), None)
    rig.device.settle()
    assert moved.fingerprints() == sums
    assert torch.equal(oracle_chunk(rig.cache, to), rig.payload(0))


def test_a_path_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="staged, direct, batch"):
        Rig(path="scenic")


def test_the_cache_is_free_before_the_link_is_done():
    """Blocks of a store can be overwritten once they were gathered."""
    rig = Rig(chunks=1, slices=8, slice_bytes=512)
    moved = rig.mover.gather(rig.moves(), None)
    rig.device.settle(held=[rig.device.streams[1]])
    assert (rig.payload(0)[:512] != POISON).any(), "a kernel has written the first part"
    assert moved.cache_free.done()
    assert not moved.done.done()
    want = oracle_chunk(rig.cache, rig.ids[0])
    rig.cache.fill(7)
    rig.device.settle()
    assert moved.done.done()
    assert torch.equal(rig.payload(0), want)


def test_a_store_is_done_when_its_first_part_is_there_too():
    """Which a kernel writes to host memory, in a stream of its own."""
    rig = Rig(chunks=2, slices=8, slice_bytes=512)
    moved = rig.mover.gather(rig.moves(), None)
    _, _, aside = rig.device.streams
    rig.device.settle(held=[aside])
    assert not moved.cache_free.done()
    assert not moved.done.done()
    assert (rig.payload(0)[:512] == POISON).all()
    late = (rig.payload(0) != oracle_chunk(rig.cache, rig.ids[0])).nonzero()
    assert late.max() < rig.layout.nbytes // 2
    rig.device.settle()
    assert moved.cache_free.done()
    assert moved.done.done()
    sums = [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(2)]
    assert moved.fingerprints() == sums


@pytest.mark.parametrize("lengths", [(1, 4), (4, 1), (3, 4, 2)], ids=str)
def test_runs_that_follow_each_other_share_no_sum(lengths):
    """The first part of a run may be moved before the last run is over, or long after it began."""
    for seed in range(30):
        rig = Rig(chunks=4, slices=2, slice_bytes=512, blocks=60, seed=seed)
        runs = [rig.mover.gather(rig.moves()[:chunks], None) for chunks in lengths]
        rig.device.settle()
        sums = [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(4)]
        for chunks, moved in zip(lengths, runs, strict=True):
            assert moved.fingerprints() == sums[:chunks]


def test_memory_that_no_kernel_reaches_gets_its_first_part_by_a_copy_too():
    rig = Rig(chunks=1, slice_bytes=512)
    moves = [replace(move, reachable=False) for move in rig.moves()]
    moved = rig.mover.gather(moves, None)
    rig.device.settle()
    assert rig.device.copies == 4
    assert moved.fingerprints() == [(fingerprint(bytes(rig.payload(0).numpy())),)]


@pytest.mark.parametrize(
    ("regions", "cuts", "copies"),
    [
        ((0, 0, 0, 0), {}, 1),
        ((0, 0, 1, 1), {}, 2),
        ((0, 1, 1, 1), {0: (700,)}, 3),
        ((0, 0, 1, 1), {1: (700,)}, 4),
        ((0, 1, 2, 3), {}, 4),
        ((0, 1, 2, 3), {0: (512,), 1: (512,)}, 6),
    ],
)
def test_neighbouring_slots_are_rows_of_one_copy(regions, cuts, copies, monkeypatch):
    """But no copy goes on from one registration of host memory into the next."""
    monkeypatch.setattr(staged_path, "ALONE_BYTES", 1)
    rig = Rig(chunks=4, blocks=60, slice_bytes=1 << 20)
    to = [rig.free[n * rig.per_chunk : (n + 1) * rig.per_chunk] for n in range(2)]

    def moves(blocks):
        return [
            replace(move, region=region, cuts=cuts.get(number, ()))
            for number, (move, region) in enumerate(zip(rig.moves(blocks), regions, strict=True))
        ]

    counts, sums = [], []
    for blocks in (None, [*to, *rig.ids[2:]]):
        before = rig.device.copies
        moved = (rig.mover.gather if blocks is None else rig.mover.scatter)(moves(blocks), None)
        counts.append(rig.device.copies - before)
        rig.device.settle()
        sums.append(moved.fingerprints())
    assert counts == [copies, copies]
    assert sums == [[(fingerprint(bytes(rig.payload(c).numpy())),) for c in range(4)]] * 2
    for chunk, ids in enumerate(rig.ids):
        assert torch.equal(oracle_chunk(rig.cache, ids), rig.payload(chunk))
        assert (rig.between(chunk) == POISON).all()
    for chunk, ids in enumerate(to):
        assert torch.equal(oracle_chunk(rig.cache, ids), rig.payload(chunk))


def test_fingerprints_stay_what_they_were_while_others_are_made():
    """The memory they come in is used again, but not before it was read."""
    rig = Rig()
    first = rig.mover.gather(rig.moves(), None)
    rig.device.settle()
    second = rig.mover.gather(rig.moves()[::-1], None)
    rig.device.settle()
    sums = first.fingerprints()
    third = rig.mover.gather(rig.moves()[1:], None)
    rig.device.settle()
    assert second.fingerprints() == sums[::-1]
    assert third.fingerprints() == sums[1:]
    assert first.fingerprints() == sums


def test_runs_whose_fingerprints_nobody_reads_give_their_memory_back():
    """Given up, or let go of; one that somebody may still read keeps what it has."""
    rig = Rig(chunks=1, slice_bytes=512)
    kept = rig.mover.gather(rig.moves(), None)
    rig.device.settle()
    spare = rig.mover._at("staged", storing=True)._tally._spare
    for turn in range(3 * tally.RUNS):
        if turn % 2:
            rig.device.fail_at = rig.device.copies + 1
            with pytest.raises(RuntimeError, match="luck"):
                rig.mover.gather(rig.moves(), None)
        else:
            rig.mover.gather(rig.moves(), None)
        rig.device.settle()
    rig.store()
    assert len(spare) == tally.RUNS - 1
    assert kept.fingerprints() == rig.store()
    assert len(spare) == tally.RUNS


def test_no_moves_are_no_error():
    rig = Rig()
    assert rig.mover.gather([], None).fingerprints() == []
    assert rig.mover.scatter([], None).fingerprints() == []


def test_a_run_of_more_chunks_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(tally, "ENTRIES", 2)
    rig = Rig(chunks=5)
    few = rig.mover.gather(rig.moves()[:2], None)
    sums = rig.store()
    assert sums == [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(5)]
    assert few.fingerprints() == sums[:2]


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_layers_come_in_the_order_in_which_they_are_needed(name, order):
    rig = Rig(name, chunks=2, layers=3, slice_bytes=700, slices=2)
    sums = rig.store()
    to = [rig.free[: rig.per_chunk], rig.free[rig.per_chunk : 2 * rig.per_chunk]]
    moved = rig.mover.scatter(rig.moves(to), None, layers=[order])
    places = [place for place, _ in moved.layers]
    assert places[-1] == 2
    assert places == sorted(set(places))
    for place, there in moved.layers:
        rig.device.settle_until(there.event)
        for layer, needed in enumerate(order):
            if needed <= place:
                for new, old in zip(to, rig.ids, strict=False):
                    assert layer_bytes(rig.cache, layer, new) == layer_bytes(rig.cache, layer, old)
    rig.device.settle()
    assert moved.fingerprints() == sums


def test_stores_beside_decoding_go_through_small_slices():
    rig = Rig(chunks=2, slices=None)
    sums = rig.store()
    whole = bytes(rig.host.numpy())
    rig.host.fill_(POISON)
    rig.mover.decoding = True
    rig.mover.prepare()
    assert rig.store() == sums
    assert bytes(rig.host.numpy()) == whole
    usual, gentle = (rig.mover._at(name, storing=True) for name in ("staged", "gentle"))
    assert usual._memory.shape == (slice_plan.SLICES, slice_plan.SLICE_BYTES)
    assert gentle._memory.shape == (slice_plan.GENTLE_SLICES, slice_plan.GENTLE_BYTES)
    assert gentle._queued > 0
    before = usual._queued
    rig.store()
    assert usual._queued == before, "and through none else"


def test_a_chunk_is_cut_by_layers_once_for_an_order(monkeypatch):
    rig = Rig(chunks=1, layers=3)
    rig.store()
    cuts, cut = [], ChunkCopy.cut
    monkeypatch.setattr(ChunkCopy, "cut", lambda self, *how: cuts.append(how) or cut(self, *how))
    for order in ([0, 1, 2], [0, 1, 2], [2, 1, 0], [2, 1, 0]):
        moved = rig.mover.scatter(rig.moves([rig.free[: rig.per_chunk]]), None, layers=[order])
        rig.device.settle()
        assert moved.layers[-1][0] == 2
    assert len([how for how in cuts if how[1:2] != ()]) == 2


@pytest.mark.parametrize("slice_bytes", range(1024, 24_000, 2560))
def test_parts_of_layers_stay_within_their_slice(slice_bytes):
    """Cut by layers or not, with steps that do not divide the slice."""
    for seed in range(3):
        rig = Rig("kv_first_nhd", chunks=2, layers=5, slice_bytes=slice_bytes, seed=seed)
        sums = rig.store()
        to = [rig.free[: rig.per_chunk], rig.free[rig.per_chunk : 2 * rig.per_chunk]]
        moved = rig.mover.scatter(rig.moves(to), None, layers=[list(range(5))])
        rig.device.settle()
        assert moved.fingerprints() == sums
        for new, chunk in zip(to, range(2), strict=True):
            assert torch.equal(oracle_chunk(rig.cache, new), rig.payload(chunk))


def layer_bytes(cache, layer, ids):
    """What one layer holds in these blocks."""
    _, kvs = row_count(cache)
    axes = cache.axes.split()
    shape = cache.tensors[0].shape
    tokens = shape[axes.index("token")]
    heads = shape[axes.index("head")] if "head" in axes else 1
    return [
        bytes(run_bytes(cache, layer, *where).numpy())
        for where in itertools.product(range(kvs), ids, range(tokens), range(heads))
    ]


@pytest.mark.parametrize("layers", [[], [[0, 1], [2]], [[]], [[0, 1, 2, 3, 4]]])
def test_layers_that_are_not_those_of_the_cache_are_refused(layers):
    rig = Rig(layers=3)
    with pytest.raises(LayoutError, match="layers"):
        rig.mover.scatter(rig.moves(), None, layers=layers)
    assert rig.store()


@pytest.mark.parametrize("path", PATHS)
def test_only_so_much_is_queued_at_a_time(monkeypatch, path):
    """A stream that is full would make CUDA wait with Python's lock held."""
    monkeypatch.setattr("lmcache_kernels.transfer.moving.path.MARK_EVERY", 16)
    rig = Rig(chunks=20, blocks=400, path=path)
    moved = rig.mover.gather(rig.moves(), None)
    assert not moved.done.done()
    assert rig.device.most_waiting <= (path_module.MARKS + 1) * 16 + 8
    rig.device.settle()
    assert moved.fingerprints() == [
        (fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(20)
    ]


def test_a_device_that_has_stopped_is_an_error(monkeypatch):
    """Of a store, and not a hang: what it may still write to is named. And so is every store after it."""
    monkeypatch.setattr("lmcache_kernels.transfer.moving.path.MARK_EVERY", 16)
    rig = Rig(chunks=20, blocks=400, slice_bytes=512)
    rig.device.stopped = True
    with pytest.raises(StillMovingError, match="has not moved") as caught:
        rig.mover.gather(rig.moves(), None)
    assert not caught.value.done.done()
    path = rig.mover._paths["staged", True]
    with pytest.raises(StillMovingError):
        rig.mover.gather(rig.moves(), None)
    path.open()
    assert len(path._slices) == slice_plan.SLICES
    assert not path._marks
    rig.device.stopped = False
    rig.device.settle()
    assert caught.value.done.done()
    assert rig.store() == [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(20)]


def test_fingerprints_that_cannot_be_cleared_are_made_anew(monkeypatch):
    """A failed run is over before its error comes out, whatever else fails then."""
    rig = Rig(slice_bytes=512)
    rig.device.fail_at = 3
    with monkeypatch.context() as patch:
        patch.setattr(tally.Tally, "clear", lambda self: 1 / 0)
        with pytest.raises(RuntimeError, match="luck"):
            rig.mover.gather(rig.moves(), None)
    assert not any(stream.work for stream in rig.device.streams)
    assert rig.store() == [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(3)]


def test_what_cannot_be_opened_leaves_no_stream_behind(monkeypatch):
    rig = Rig()
    with monkeypatch.context() as patch:
        patch.setattr(tally.Tally, "_make_room", lambda self, chunks: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                rig.mover.gather(rig.moves(), None)
    assert rig.device.streams == []
    assert rig.store()


def test_what_is_no_event_cannot_be_waited_for():
    rig = Rig()

    class Elsewhere:
        def done(self):
            return False

    with pytest.raises(TransferFailed, match="expected an event"):
        rig.mover.gather(rig.moves(), Elsewhere())
    with pytest.raises(TransferFailed, match="expected an event"):
        rig.mover.join(Elsewhere())
    assert rig.store()


def test_slices_go_with_the_mover():
    rig = Rig()
    rig.store()
    rig.mover.close()
    assert rig.device.streams == []
    assert rig.store()  # and come back when they are needed again


def test_slices_take_what_was_said():
    rig = Rig(slices=5, slice_bytes=1 << 16)
    rig.store()
    assert rig.mover._paths["staged", True]._memory.shape == (5, 1 << 16)


def test_small_chunks_share_slices_and_calls_of_the_copy_engine():
    rig = Rig(chunks=4, slice_bytes=1 << 20, even=False)
    sums = rig.store()
    assert rig.device.batch_calls == 1
    assert sums == [(fingerprint(bytes(rig.payload(chunk).numpy())),) for chunk in range(4)]
