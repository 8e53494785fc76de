"""Hybrid models through the mover: several groups, windows, recurrent states, interleaved layers."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from hybridkit import BLOCKS, block_bytes, gemma, qwen3_next
from lazy_device import LazyDevice

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.fingerprint import fingerprint
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.transfer.moving import tally
from lmcache_kernels.transfer.moving.gpu_mover import GpuMover
from lmcache_kernels.transfer.moving.moves import ChunkMove, is_as_stored
from lmcache_kernels.transfer.moving.planner import PATHS

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

CHUNK_TOKENS = 32


class Rig:
    def __init__(self, model, path="staged", seed=0):
        self.caches, groups, self.layers = model()
        self.groups = [group.read() for group in groups]
        self.layout = ChunkLayout.of(self.groups, CHUNK_TOKENS)
        self.device = LazyDevice(seed)
        self.mover = GpuMover(
            self.groups, self.layout, device=self.device, path=path, slice_bytes=1500
        )
        order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
        counts = self.layout.blocks_per_chunk
        self.here = tuple(tuple(order[:count]) for count in counts)
        self.there = tuple(tuple(order[count : 2 * count]) for count in counts)
        self.host = torch.full((self.layout.nbytes + 512,), 0xA5, dtype=torch.uint8)
        self.at = self.host.data_ptr() + -self.host.data_ptr() % 512

    def move(self, blocks):
        return ChunkMove(self.at, blocks, reachable=True)

    def store(self):
        moved = self.mover.gather([self.move(self.here)], None)
        self.device.settle()
        return moved.fingerprints()

    def block(self, group, layer, block):
        return block_bytes(self.caches, group, layer, block)

    def same(self, group, layer, left_out=()):
        return all(
            self.block(group, layer, new) == self.block(group, layer, old)
            for index, (new, old) in enumerate(
                zip(self.there[group], self.here[group], strict=True)
            )
            if index not in left_out
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", [gemma, qwen3_next])
def test_all_groups_go_out_and_come_back(model, path):
    rig = Rig(model, path)
    sums = rig.store()
    start = rig.at - rig.host.data_ptr()
    assert [sum(groups) % (1 << 64) for groups in sums] == [fingerprint(clean(rig, start))]
    moved = rig.mover.scatter([rig.move(rig.there)], None)
    rig.device.settle()
    assert moved.fingerprints() == sums
    for group, caches in enumerate(rig.caches):
        assert all(rig.same(group, layer) for layer in range(len(caches)))


def clean(rig, start):
    """The payload, padding between planes as the fingerprint counts it: zero."""
    data, kept = rig.host[start : start + rig.layout.nbytes], torch.zeros(rig.layout.nbytes).byte()
    for planes in rig.layout.groups:
        for plane in planes:
            size = plane.num_blocks * plane.block_bytes
            for base in plane.bases:
                kept[base : base + size] = data[base : base + size]
    return kept.numpy().tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", [gemma, qwen3_next])
def test_blocks_outside_a_window_are_left_out(model, path):
    """A null block of an engine is no destination; what it holds stays."""
    rig = Rig(model, path)
    sums = rig.store()
    first, *others = rig.there[0]
    before = [rig.block(0, layer, first) for layer in range(len(rig.caches[0]))]
    there = ((ABSENT, *others), *rig.there[1:])
    moved = rig.mover.scatter([rig.move(there)], None)
    rig.device.settle()
    assert moved.fingerprints() == sums
    for layer, was in enumerate(before):
        assert rig.block(0, layer, first) == was
        assert rig.same(0, layer, left_out={0})
    assert all(rig.same(1, layer) for layer in range(len(rig.caches[1])))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", [gemma, qwen3_next])
def test_several_chunks_have_totals_of_their_own(model, path, monkeypatch):
    """More of them than there are sums and pinned totals at first."""
    monkeypatch.setattr(tally, "ENTRIES", 2)
    monkeypatch.setattr(tally, "TOTALS", 2)
    rig = Rig(model, path)
    chunks = 3
    counts = rig.layout.blocks_per_chunk
    step = -(-rig.layout.nbytes // 512) * 512 + 512
    host = torch.full((chunks * step + 512,), 0xA5, dtype=torch.uint8)
    at = host.data_ptr() + -host.data_ptr() % 512

    def moves(blocks):
        return [ChunkMove(at + n * step, one, reachable=True) for n, one in enumerate(blocks)]

    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(9)).tolist()
    here = [
        tuple(tuple(order[n * count : (n + 1) * count]) for count in counts) for n in range(chunks)
    ]
    stored = rig.mover.gather(moves(here), None)
    rig.device.settle()
    sums = stored.fingerprints()
    assert len({one for groups in sums for one in groups}) == chunks * len(counts)
    for index, blocks in enumerate(here):  # as if each were alone
        alone = rig.mover.gather(moves([blocks]), None)
        rig.device.settle()
        assert alone.fingerprints() == [sums[index]]
    again = rig.mover.gather(moves(here), None)
    rig.device.settle()
    assert again.fingerprints() == sums
    loaded = rig.mover.scatter(moves(here), None)
    rig.device.settle()
    assert loaded.fingerprints() == sums


def payload_of(rig, group):
    """Where a group's part of the payload lies in host memory."""
    planes = rig.layout.groups[group]
    last = planes[-1]
    return rig.at + planes[0].bases[0], rig.at + last.bases[-1] + last.num_blocks * last.block_bytes


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("left_out", [0, 1])
@pytest.mark.parametrize("model", [gemma, qwen3_next])
def test_what_no_window_needs_is_not_read(model, left_out, path, layered, monkeypatch):
    """A group none of whose blocks are named costs the link nothing, and may be damaged."""
    rig = Rig(model, path)
    (stored,) = rig.store()
    first, end = payload_of(rig, left_out)
    start = rig.host.data_ptr()
    rig.host[first - start : end - start] ^= 0xFF
    read = []
    copy = rig.device.copy

    def watched(stream, to, origin, nbytes, *, pinned):
        read.append((origin, origin + nbytes))
        copy(stream, to, origin, nbytes, pinned=pinned)

    monkeypatch.setattr(rig.device, "copy", watched)
    before = [
        rig.block(left_out, layer, rig.there[left_out][0])
        for layer in range(len(rig.caches[left_out]))
    ]
    there = list(rig.there)
    there[left_out] = (ABSENT,) * len(there[left_out])
    moved = rig.mover.scatter(
        [rig.move(tuple(there))], None, layers=rig.layers if layered else None
    )
    rig.device.settle()
    want = [None if group == left_out else one for group, one in enumerate(stored)]
    assert moved.fingerprints() == [tuple(want)]
    assert is_as_stored(tuple(want), stored)
    assert not any(origin < end and first < over for origin, over in read)
    assert bool(read) == (path != "direct" or layered)
    assert before == [
        rig.block(left_out, layer, rig.there[left_out][0])
        for layer in range(len(rig.caches[left_out]))
    ]
    for group, caches in enumerate(rig.caches):
        if group != left_out:
            assert all(rig.same(group, layer) for layer in range(len(caches)))


@pytest.mark.parametrize("model", [gemma, qwen3_next])
def test_the_planner_is_asked_for_what_moves(model, monkeypatch):
    """Not for the groups that are left out."""
    rig = Rig(model, path=None)
    asked = []
    monkeypatch.setattr(
        rig.mover, "_planner", SimpleNamespace(choose=lambda job, paths: asked.append(job))
    )
    nothing = [(ABSENT,) * len(blocks) for blocks in rig.there]
    for wanted in ({0, 1}, {0}, {1}, set()):
        blocks = [rig.there[g] if g in wanted else nothing[g] for g in range(2)]
        rig.mover.choose([rig.move(tuple(blocks))] * 3, storing=False)
    both, first, second, none = asked
    rig.mover.choose([], storing=False)
    assert asked.pop().runs == 1
    rig.mover.choose([rig.move(rig.here)] * 3, storing=True)
    assert (both.runs, both.run_bytes) == (asked[-1].runs, asked[-1].run_bytes)
    assert first.runs + second.runs == both.runs
    assert none.runs == 1
    sizes = [job.runs * job.run_bytes for job in (first, second)]
    parts = [end - start for start, end in (payload_of(rig, group) for group in range(2))]
    for size, part, job in zip(sizes, parts, (first, second), strict=True):
        assert 3 * part - 512 * 3 - job.runs <= size <= 3 * part


@pytest.mark.parametrize("path", PATHS)
def test_a_chunk_of_which_nothing_is_wanted_moves_nothing(path):
    rig = Rig(gemma, path)
    rig.store()
    nothing = tuple((ABSENT,) * len(blocks) for blocks in rig.there)
    moved = rig.mover.scatter([rig.move(nothing)], None)
    rig.device.settle()
    assert moved.done.done()
    assert moved.fingerprints() == [(None,) * len(nothing)]
    assert is_as_stored((None, None), (1, 2))
    assert not is_as_stored((None, 1), (1, 2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", [gemma, qwen3_next])
def test_interleaved_layers_come_in_the_engine_s_order(model, seed):
    rig = Rig(model, seed=seed)
    sums = rig.store()
    moved = rig.mover.scatter([rig.move(rig.there)], None, layers=rig.layers)
    last = max(map(max, rig.layers))
    assert [place for place, _ in moved.layers][-1] == last
    assert len(moved.layers) > 1
    for place, there in moved.layers:
        rig.device.settle_until(there.event)
        for group, order in enumerate(rig.layers):
            assert all(rig.same(group, layer) for layer, at in enumerate(order) if at <= place)
    rig.device.settle()
    assert moved.fingerprints() == sums
