"""Fingerprints that copies compute in passing. See copy_suite."""

from __future__ import annotations

import itertools

import pytest
import torch
from cachekit import BY_NAME, POISON, make_cache, untouched_outside
from chunkkit import chunk_memory, hybrid, many_plans, payload, without_gaps
from copy_suite import group, settle
from hypothesis import given
from hypothesis import strategies as st
from planekit import chunks_of, expected_memory, fill_random, sides

from lmcache_kernels import LayoutError, copy_blocks
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.copying import PreparedCopy, prepare_copy
from lmcache_kernels.fingerprint import unsigned
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.reference import fingerprint_ref


def gather_with_sums(caches, layout, ids, device, **options):
    """(payloads, fingerprints) of chunks gathered from these caches."""
    chunks = len(ids[0]) // layout.blocks_per_chunk[0]
    memory, planes, _ = chunk_memory(layout, chunks, device)
    copy = PreparedCopy(
        [[(chunk[0], group(cache).planes[0])] for chunk, cache in zip(planes, caches, strict=True)],
        chunk_side="dst",
        **options,
    )
    sums = torch.zeros((chunks, copy.plan.rows), dtype=torch.int64, device=device)
    copy.copy_groups([(range(len(blocks)), blocks) for blocks in ids], sums=sums)
    settle(device)
    return (
        [payload(memory, layout, chunk) for chunk in range(chunks)],
        [unsigned(row) for row in sums.tolist()],
    )


@pytest.mark.parametrize("programs", [None, 2])
def test_a_gather_knows_the_fingerprint_of_its_chunks(programs, device):
    caches = hybrid(device, 30)
    layout = ChunkLayout.of([group(cache) for cache in caches], 8)
    payloads, found = gather_with_sums(
        caches, layout, [[5, 1, 6, 0], [8, 2, 3, 7]], device, max_programs=programs
    )
    assert found == [fingerprint_ref(without_gaps(data, layout)) for data in payloads]


shapes = st.tuples(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 8, 16, 20, 48, 272]),
)


@pytest.mark.timeout(600)
@many_plans
@given(data=st.data())
def test_any_plan_moves_its_bytes_and_knows_their_fingerprints(data, device):
    """Groups of planes of any shapes between caches and chunks with gaps, either way, some blocks
    left out, few ids and many."""
    draw = data.draw
    kinds = draw(st.lists(st.lists(shapes, min_size=1, max_size=2), min_size=1, max_size=3))
    chunks = draw(chunks_of(kinds, device), "chunks")
    caches = [[draw(sides(shape, device)) for shape in group] for group in kinds]
    chunk_side = draw(st.sampled_from(["dst", "src"]), "side")
    fill_random(chunks.memory, 1)
    for cache in itertools.chain(*caches):
        fill_random(cache.memory, 2)
    pairs, ids, named = [], [], []
    for cache_group, chunk_group in zip(caches, chunks.groups, strict=True):
        blocks = min(cache.plane.num_blocks for cache in cache_group)
        inside = draw(st.permutations(range(chunk_group[0].plane.num_blocks)), "inside")
        outside = draw(st.permutations(range(blocks)), "outside")
        count = draw(st.integers(0, min(len(inside), len(outside))), "count")
        inside, outside = inside[:count], outside[:count]
        to, origin = (inside, outside) if chunk_side == "dst" else (outside, inside)
        to = [draw(st.sampled_from([block, block, block, ABSENT])) for block in to]
        ids.append((to, origin))
        named.append(origin if chunk_side == "src" else [block for block in to if block != ABSENT])
        both = list(zip(chunk_group, cache_group, strict=True))
        pairs.append(both if chunk_side == "dst" else [pair[::-1] for pair in both])
    expected = {}
    for legs, (to, origin) in zip(pairs, ids, strict=True):
        for dst, src in legs:
            before = expected.get(id(dst.memory))
            expected[id(dst.memory)] = expected_memory(dst, to, src, origin, before)
    copy = PreparedCopy(
        [[(dst.plane, src.plane) for dst, src in legs] for legs in pairs],
        chunk_side=chunk_side,
        max_programs=draw(st.sampled_from([None, 2]), "programs"),
        max_launch_bytes=draw(st.sampled_from([1, 4000, 1 << 20]), "launch"),
    )
    sums = torch.zeros((chunks.count, copy.plan.rows), dtype=torch.int64, device=device)
    copy.copy_groups(ids, sums=sums)
    settle(device)
    for dst, _ in itertools.chain(*pairs):
        assert torch.equal(dst.memory.cpu(), expected[id(dst.memory)].cpu())
    for chunk, parts in enumerate(sums.tolist()):
        expected_parts = map(fingerprint_ref, chunks.rows_of(chunk, named))
        assert [unsigned([part]) for part in parts] == list(expected_parts)


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@pytest.mark.parametrize("width", [1, 2, 3, 6, 20, 64])
def test_fingerprints_depend_on_bytes_alone(width, shift, device):
    """Not on where blocks lie, in which order they are named, nor on how wide accesses can be."""
    shape = {"dim": width, "dtype": torch.uint8}
    first = make_cache(BY_NAME["latent"], device=device, **shape)
    other = (
        make_cache(
            BY_NAME["sliced_heads"],
            heads=1,
            dim=width // 2 or 1,
            device=device,
            dtype=torch.uint8,
            shift=shift,
        )
        if width % 2 == 0
        else make_cache(BY_NAME["latent"], blocks=9, shift=shift, device=device, **shape)
    )
    first.fill_random(7)
    copy_blocks(group(other).planes[0], [6, 0], group(first).planes[0], [2, 5])
    layout = ChunkLayout.of([group(first)], 8)
    one = gather_with_sums([first], layout, [[2, 5]], device)
    two = gather_with_sums([other], layout, [[6, 0]], device)
    assert one == two
    assert one[1] == [fingerprint_ref(data) for data in one[0]]


def test_a_scatter_knows_the_fingerprint_of_what_it_read(device):
    """Also of blocks that are left out, so that a partial load still checks the whole chunk."""
    caches = hybrid(device, 40)
    layout = ChunkLayout.of([group(cache) for cache in caches], 8)
    memory, planes, _ = chunk_memory(layout, 2, device)
    fill_random(memory, 5)
    copy = PreparedCopy(
        [[(group(cache).planes[0], chunk[0])] for chunk, cache in zip(planes, caches, strict=True)],
        chunk_side="src",
    )
    sums = torch.zeros((2, copy.plan.rows), dtype=torch.int64, device=device)
    before = caches[0].snapshot()
    copy.copy_groups([([3, ABSENT, ABSENT, 1], range(4)), ([ABSENT] * 4, range(4))], sums=sums)
    settle(device)
    assert [unsigned(row) for row in sums.tolist()] == [
        fingerprint_ref(without_gaps(payload(memory, layout, chunk), layout)) for chunk in range(2)
    ]
    assert untouched_outside(caches[0], before, [3, 1])


def test_a_fingerprint_shows_a_flipped_bit_swapped_rows_and_a_shifted_block(device):
    cache = make_cache(BY_NAME["kv_first_nhd"], heads=2, dim=16, device=device)
    cache.fill_random(8)
    layout = ChunkLayout.of([group(cache)], 8)
    (data,), (right,) = gather_with_sums([cache], layout, [[2, 5]], device)
    changed = []
    for bit in range(8 * 24):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(flipped))
    row = len(data) // 4
    changed.append(data[row : 2 * row] + data[:row] + data[2 * row :])
    changed.append(data[: 2 * row] + data[3 * row :] + data[2 * row : 3 * row])
    block = row // 2
    changed.append(data[block:] + data[:block])
    changed.append(data[-4:] + data[:-4])
    _, (swapped,) = gather_with_sums([cache], layout, [[5, 2]], device)
    found = [fingerprint_ref(other) for other in changed] + [swapped]
    assert right == fingerprint_ref(data)
    assert right not in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.int32}, "int64"),
        ({"size": (1, 4)}, r"int64 \[2, 4\]"),
        ({"size": (2, 3)}, r"int64 \[2, 4\]"),
    ],
)
def test_sums_that_do_not_fit_are_refused(change, message, device):
    cache = make_cache(BY_NAME["kv_first_nhd"], device=device)
    layout = ChunkLayout.of([group(cache)], 4)
    memory, ((chunks,),), _ = chunk_memory(layout, 2, device)
    copy = PreparedCopy([[(chunks, group(cache).planes[0])]], chunk_side="dst")
    wrong = torch.zeros(**{"size": (2, 4), "dtype": torch.int64, "device": device, **change})
    with pytest.raises(LayoutError, match=message):
        copy.copy([0, 1], [0, 1], sums=wrong)
    with pytest.raises(LayoutError, match="exactly where"):
        copy.copy([0, 1], [0, 1])
    with pytest.raises(LayoutError, match="exactly where"):
        prepare_copy(chunks, group(cache).planes[0]).copy([0], [0], sums=wrong)
    settle(device)
    assert (memory == POISON).all()


def test_only_dense_blocks_can_be_chunks(device):
    cache = make_cache(BY_NAME["kv_first_hnd"], device=device)
    plane = group(cache).planes[0]
    with pytest.raises(LayoutError, match="dense blocks"):
        PreparedCopy([[(plane, plane)]], chunk_side="dst")
