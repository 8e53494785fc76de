"""The ways to use a block copy besides whole blocks of one cache. See copy_suite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cachekit import BY_NAME, POISON, make_cache, oracle_chunk, untouched_outside
from chunkkit import chunk_memory, hybrid, many_examples, payload, without_gaps
from copy_suite import group, settle
from hypothesis import given
from hypothesis import strategies as st
from planekit import expected_memory, fill_random, sides

from lmcache_kernels import CacheGroup, LayoutError, copy_blocks
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.copying import PreparedCopy, prepare_copy
from lmcache_kernels.fingerprint import unsigned
from lmcache_kernels.head_slices import head_slices
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.reference import fingerprint_ref
from lmcache_kernels.views import plane_of


@pytest.mark.timeout(600)
@many_examples
@given(data=st.data())
def test_any_two_planes_of_one_shape_exchange_blocks(data, device):
    """Random nesting, strides, paddings, splits, offsets, head slices and ids; both sides alone."""
    draw = data.draw
    shape = (
        draw(st.integers(1, 3), "rows"),
        draw(st.integers(1, 5), "tokens"),
        draw(st.integers(1, 4), "heads"),
        draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 48, 80, 272]), "width"),
    )
    dst, src = draw(sides(shape, device), "dst"), draw(sides(shape, device), "src")
    evenly = all(
        side.plane.split == 1 or side.plane.split_stride == shape[1] * side.plane.token_stride
        for side in (dst, src)
    )
    if evenly and draw(st.booleans(), "by token"):
        dst.plane, src.plane = dst.plane.by_token(), src.plane.by_token()
    count = draw(st.integers(1, dst.plane.num_heads), "heads kept")
    for side in (dst, src):
        start = draw(st.integers(0, side.plane.num_heads - count), "first head")
        side.plane = side.plane.narrow_heads(start, count)
    fill_random(src.memory, draw(st.integers(0, 9), "seed"))
    most = min(dst.plane.num_blocks, 5)
    dst_ids = draw(st.permutations(range(dst.plane.num_blocks)), "dst ids")[:most]
    dst_ids = [draw(st.sampled_from([to, to, to, ABSENT])) for to in dst_ids]
    src_ids = [draw(st.integers(0, src.plane.num_blocks - 1)) for _ in dst_ids]
    expected = expected_memory(dst, dst_ids, src, src_ids)
    prepare_copy(
        dst.plane,
        src.plane,
        max_programs=draw(st.sampled_from([None, 1, 3]), "programs"),
        max_launch_bytes=draw(st.sampled_from([1, 5000, 1 << 20]), "launch"),
    ).copy(dst_ids, src_ids)
    settle(device)
    assert torch.equal(dst.memory.cpu(), expected)


def test_an_absent_destination_leaves_its_block_out(device):
    source = make_cache(BY_NAME["kv_first_hnd"], device=device)
    target = make_cache(BY_NAME["kv_first_nhd"], device=device)
    source.fill_random(1)
    before = target.snapshot()
    copy_blocks(
        group(target).planes[0], [2, ABSENT, ABSENT, 6], group(source).planes[0], [0, 1, 2, 3]
    )
    settle(device)
    assert torch.equal(oracle_chunk(target, [2, 6]), oracle_chunk(source, [0, 3]))
    assert untouched_outside(target, before, [2, 6])


def test_token_slots_move_any_tokens_of_any_blocks(device):
    """Unaligned ranges, in any order: the id is block * block_tokens + token."""
    source = make_cache(BY_NAME["block_first_hnd"], device=device, tokens=4)
    target = make_cache(BY_NAME["kv_first_nhd"], device=device, tokens=4)
    source.fill_random(2)
    slots, to = [3, 4, 5, 22, 9], [27, 0, 14, 13, 6]
    copy_blocks(group(target).planes[0].by_token(), to, group(source).planes[0].by_token(), slots)
    settle(device)
    expected = make_cache(BY_NAME["kv_first_nhd"], tokens=4)
    for here, there in zip(to, slots, strict=True):
        for layer in range(2):
            picked = source.tensors[layer][there // 4, :, :, there % 4]
            expected.tensors[layer][:, here // 4, here % 4] = picked.cpu()
    assert all(
        torch.equal(a, b) for a, b in zip(target.snapshot(), expected.snapshot(), strict=True)
    )


def test_fault_a23_a_load_starts_and_ends_inside_chunks(device):
    """Chunks of four blocks: from block 2 of one to block 0 of the next, into scattered blocks."""
    source = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    target = make_cache(BY_NAME["block_first_nhd"], blocks=12, device=device)
    source.fill_random(3)
    layout = ChunkLayout.of([group(source)], 16)
    _memory, ((chunks,),), _ = chunk_memory(layout, 2, device)
    copy_blocks(chunks, range(8), group(source).planes[0], [7, 6, 5, 4, 3, 2, 1, 0])
    before = target.snapshot()
    copy_blocks(group(target).planes[0], [9, 2, 11], chunks, [2, 3, 4])
    settle(device)
    assert torch.equal(oracle_chunk(target, [9, 2, 11]), oracle_chunk(source, [5, 4, 3]))
    assert untouched_outside(target, before, [9, 2, 11])


@pytest.mark.parametrize("chunks", [1, 5, 9])
def test_any_number_of_chunks_in_one_copy(chunks, device):
    cache = make_cache(BY_NAME["kv_first_hnd"], blocks=2 * chunks, device=device)
    cache.fill_random(4)
    layout = ChunkLayout.of([group(cache)], 8)
    memory, ((planes,),), stride = chunk_memory(layout, chunks, device)
    ids = torch.randperm(2 * chunks, generator=torch.Generator().manual_seed(1)).tolist()
    copy_blocks(planes, range(2 * chunks), group(cache).planes[0], ids)
    settle(device)
    for chunk in range(chunks):
        expected = oracle_chunk(cache, ids[2 * chunk : 2 * chunk + 2])
        assert payload(memory, layout, chunk) == expected.numpy().tobytes()
        start = 512 + chunk * stride
        memory[start : start + layout.nbytes] = POISON
    assert (memory == POISON).all()


@pytest.mark.parametrize("heads", [33, 40])
def test_more_heads_than_a_warp_has_lanes(heads, device):
    source = make_cache(BY_NAME["kv_first_hnd"], heads=heads, blocks=3, device=device)
    target = make_cache(BY_NAME["kv_first_nhd"], heads=heads, blocks=3, device=device)
    source.fill_random(5)
    copy_blocks(group(target).planes[0], [2, 0], group(source).planes[0], [0, 1])
    settle(device)
    assert torch.equal(oracle_chunk(target, [2, 0]), oracle_chunk(source, [0, 1]))


@pytest.mark.parametrize("names", [("kv_first_nhd", "kv_first_hnd"), ("kv_first_hnd",) * 2])
@pytest.mark.parametrize(("stored_tp", "tp"), [(4, 2), (4, 8), (2, 4), (8, 4), (4, 1)])
def test_chunks_of_one_tensor_parallel_size_load_at_another(names, stored_tp, tp, device):
    """Every rank of the second engine ends up with just its heads of the whole model's cache."""
    heads, ids, to = 8, [3, 0], [1, 4]
    whole = make_cache(BY_NAME[names[0]], heads=heads, blocks=5, device=device)
    whole.fill_random(6)
    plane = group(whole).planes[0]
    chunks = []
    for rank in range(stored_tp):
        count = heads // stored_tp
        share = plane.narrow_heads(rank * count, count)
        size = 2 * share.rows * share.block_bytes
        memory = torch.full((size,), POISON, dtype=torch.uint8).to(device)
        chunk = plane_of(
            memory.view(2, 2, 2, 4, count, 16),
            "layer kv block token head dim",
        )
        copy_blocks(chunk, range(2), share, ids)
        chunks.append((memory, chunk))
    for rank in range(tp):
        mine = make_cache(BY_NAME[names[-1]], heads=heads // tp, blocks=5, device=device)
        before = mine.snapshot()
        for part in head_slices(heads, tp=tp, rank=rank, stored_tp=stored_tp):
            copy_blocks(
                group(mine).planes[0].narrow_heads(part.here, part.count),
                to,
                chunks[part.rank][1].narrow_heads(part.start, part.count),
                range(2),
            )
        settle(device)
        first = rank * (heads // tp)
        assert torch.equal(oracle_chunk(mine, to), heads_in_chunk(whole, ids, first, heads // tp))
        assert untouched_outside(mine, before, to)


def heads_in_chunk(cache, ids, first, count):
    """The oracle's chunk of some heads only."""
    runs = oracle_chunk(cache, ids).view(-1, 8, 16)
    return runs[:, first : first + count].reshape(-1)


def test_groups_with_their_own_blocks_move_in_one_copy(device):
    source, target = hybrid(device, 10), hybrid(device, 20)
    layout = ChunkLayout.of([group(cache) for cache in source], 8)
    memory, planes, _ = chunk_memory(layout, 2, device)
    ids = [[5, 1, 6, 0], [8, 2, 3, 7]]
    inside = range(4)
    PreparedCopy(
        [[(chunk[0], group(cache).planes[0])] for chunk, cache in zip(planes, source, strict=True)]
    ).copy_groups([(inside, blocks) for blocks in ids])
    settle(device)
    for chunk in range(2):
        expected = b"".join(
            oracle_chunk(cache, blocks[2 * chunk : 2 * chunk + 2])
            .numpy()
            .tobytes()
            .ljust(512, b"\xa5")
            for cache, blocks in zip(source, ids, strict=True)
        )
        assert payload(memory, layout, chunk) == expected[: layout.nbytes]
    to = [[0, 1, 2, 3], []]
    before = [cache.snapshot() for cache in target]
    back = PreparedCopy(
        [[(group(cache).planes[0], chunk[0])] for chunk, cache in zip(planes, target, strict=True)]
    )
    back.copy_groups([(to[0], [3, 2, 1, 0]), ([], [])])
    settle(device)
    assert torch.equal(oracle_chunk(target[0], to[0]), oracle_chunk(source[0], [0, 6, 1, 5]))
    assert untouched_outside(target[0], before[0], to[0])
    assert untouched_outside(target[1], before[1], [])
    back.copy_groups([([], []), ([4], [0])])
    settle(device)
    assert torch.equal(oracle_chunk(target[1], [4]), oracle_chunk(source[1], [8]))
    with pytest.raises(LayoutError, match="expected 2 groups, got 1"):
        back.copy([0], [0])


@pytest.mark.parametrize("count", [1, 5, 16, 17, 40])
def test_planes_of_unlike_shapes_move_together(count, device):
    """Values, scales and latents that share block ids; few ids and many; with fingerprints."""
    shapes = [("kv_first_hnd", 3, 8), ("latent", 1, 2), ("latent", 1, 72)]
    caches = [
        make_cache(BY_NAME[name], blocks=48, tokens=2, heads=heads, dim=dim, device=device)
        for name, heads, dim in shapes
    ]
    for index, cache in enumerate(caches):
        cache.fill_random(index)
    planes = tuple(group(cache).planes[0] for cache in caches)
    layout = ChunkLayout.of([CacheGroup(planes, 2, "float16")], 2 * count)
    memory, (chunk,), _ = chunk_memory(layout, 1, device)
    copy = PreparedCopy([list(zip(chunk, planes, strict=True))], chunk_side="dst")
    sums = torch.zeros((1, copy.plan.rows), dtype=torch.int64, device=device)
    ids = torch.randperm(48, generator=torch.Generator().manual_seed(3)).tolist()[:count]
    copy.copy(range(count), ids, sums=sums)
    settle(device)
    data = payload(memory, layout, 0)
    for cache, plane in zip(caches, layout.groups[0], strict=True):
        expected = oracle_chunk(cache, ids).numpy().tobytes()
        assert data[plane.bases[0] :][: len(expected)] == expected
    assert unsigned(sums[0].tolist()) == fingerprint_ref(without_gaps(data, layout))


def test_many_legs_move_in_one_copy(device):
    """More legs than a warp has lanes, some without blocks."""
    caches = [make_cache(BY_NAME["latent"], layers=1, dim=8, device=device) for _ in range(37)]
    targets = [make_cache(BY_NAME["latent"], layers=1, dim=8, device=device) for _ in range(37)]
    for index, cache in enumerate(caches):
        cache.fill_random(index)
    ids = [[] if index % 3 == 1 else [index % 7, (index + 2) % 7] for index in range(37)]
    PreparedCopy(
        [[(group(t).planes[0], group(c).planes[0])] for t, c in zip(targets, caches, strict=True)]
    ).copy_groups([(range(len(blocks)), blocks) for blocks in ids])
    settle(device)
    clean = make_cache(BY_NAME["latent"], layers=1, dim=8).snapshot()
    for target, cache, blocks in zip(targets, caches, ids, strict=True):
        if blocks:
            assert torch.equal(oracle_chunk(target, [0, 1]), oracle_chunk(cache, blocks))
        assert untouched_outside(target, clean, list(range(len(blocks))))


# --- offsets beyond 32 bits -------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1 << 31, (1 << 32) - 1, 1 << 32])
def test_fault_a21_strides_at_the_edges_of_32_bits(stride, device):
    """Strides that only just do or do not fit 32 bits, in units of one byte, on both sides."""
    cache = torch.empty(2 * stride + 64, dtype=torch.uint8, device=device)
    wide = cache.as_strided((3, 33), (stride, 1), 1)
    pattern = torch.arange(99, dtype=torch.uint8).view(3, 33)
    wide.copy_(pattern)
    small = torch.full((5, 33), POISON, dtype=torch.uint8, device=device)
    copy_blocks(plane_of(small, "block dim"), [1, 4, 2], plane_of(wide, "block dim"), [2, 0, 1])
    settle(device)
    assert torch.equal(small[[1, 4, 2]].cpu(), pattern[[2, 0, 1]])
    assert (small[[0, 3]] == POISON).all()
    copy_blocks(plane_of(wide, "block dim"), [0, 2], plane_of(small, "block dim"), [1, 4])
    settle(device)
    assert torch.equal(wide[[0, 2]].cpu(), pattern[[2, 0]])


# --- plans that cannot be ---------------------------------------------------------------------------


def test_plans_that_cannot_be_are_refused(device):
    cache = make_cache(BY_NAME["latent"], device=device)
    (plane,) = group(cache).planes
    layout = ChunkLayout.of([group(cache)], 8)
    ((chunk,),) = layout.planes_at(1 << 20, device, chunks=2, stride=1 << 12)
    ((apart,),) = layout.planes_at(1 << 20, device, chunks=2, stride=1 << 13)
    ((far,),) = layout.planes_at(1 << 20, device, chunks=2, stride=1 << 40)
    twice = replace(plane, bases=(plane.bases[0],) * 2)
    huge = replace(
        plane, bases=(1 << 20,), width=1 << 31, token_stride=1 << 31, block_stride=1 << 40
    )
    for groups, options, message in [
        ([], {}, "at least one pair"),
        ([[(plane, plane)], []], {}, "at least one pair"),
        ([[(plane, plane)]], {"chunk_side": "destination"}, "expected dst, src or None"),
        ([[(plane, plane)]], {"max_programs": 0}, "max_programs"),
        ([[(plane, plane)]], {"max_programs": 1.5}, "max_programs"),
        ([[(plane, plane)]], {"run_on": "cuda:5"}, "run_on: expected"),
        ([[(twice, plane)]], {}, "two rows of one plane"),
        ([[(huge, huge)]], {}, "runs of at most"),
        ([[(chunk, plane), (apart, plane)]], {"chunk_side": "dst"}, "same chunks"),
    ]:
        with pytest.raises(LayoutError, match=message):
            PreparedCopy(groups, **options)
    PreparedCopy([[(far, plane)]], chunk_side="dst")  # gaps between chunks are no part of one


@pytest.mark.parametrize("name", ["cuda", "cpu:0", "CPU", "", None, torch.device("cpu")])
def test_devices_have_one_spelling(name, device):
    (plane,) = group(make_cache(BY_NAME["latent"], device=device)).planes
    with pytest.raises(LayoutError, match=r"plane\.device"):
        replace(plane, device=name)
