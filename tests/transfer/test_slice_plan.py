"""Sizes of slices, and the parts of a chunk that they give."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.chunk_copy import cut, pair_planes
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.copy_config import choose_config
from lmcache_kernels.copy_plan import CopyPlan
from lmcache_kernels.transfer.moving.slice_plan import (
    fill,
    head_bytes,
    layer_ends,
    layer_sizes,
    part_sizes,
)
from lmcache_kernels.views import group_of

MB = 1 << 20


@given(
    nbytes=st.integers(1, 200 * MB),
    most=st.integers(1, 40 * MB),
    first=st.integers(0, 4 * MB),
    last=st.integers(0, 4 * MB),
)
def test_sizes_are_those_of_the_chunk_and_within_the_bound(nbytes, most, first, last):
    sizes = part_sizes(nbytes, most, first=first, last=last)
    assert all(0 < size <= most for size in sizes)
    assert nbytes <= sum(sizes) < nbytes + len(sizes)
    if nbytes >= 4 * MB <= most:
        assert not first or sizes[0] == first
        assert first or not last or sizes[-1] == last


def test_a_pipeline_starts_and_ends_small_and_is_even_between():
    assert part_sizes(32 * MB, 16 * MB) == [16 * MB] * 2
    assert part_sizes(18 * MB, 16 * MB) == [9 * MB] * 2
    assert part_sizes(8 * MB, 16 * MB, first=3 * MB) == [3 * MB, 5 * MB]
    assert part_sizes(8 * MB, 16 * MB, last=MB) == [7 * MB, MB]
    assert part_sizes(MB // 2, 16 * MB, first=MB, last=MB) == [MB // 2]


def test_the_head_of_a_store_leaves_as_much_for_the_first_slice():
    assert [head_bytes(size * MB) for size in (1, 2, 4, 6, 32)] == [
        size * MB for size in (1, 1, 2, 3, 3)
    ]


@given(
    layers=st.integers(1, 3),
    block_tokens=st.sampled_from([1, 2, 8]),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 3, 8, 40]),
    latent=st.booleans(),
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    max_programs=st.sampled_from([None, 4]),
    chunk_side=st.sampled_from(["dst", "src"]),
)
def test_parts_are_the_payload_and_the_tiles_one_behind_the_other(
    layers, block_tokens, heads, dim, latent, sizes, max_programs, chunk_side
):
    groups = [
        group_of(
            [torch.empty(2, 5, block_tokens, heads, dim, dtype=torch.half) for _ in range(layers)],
            "kv block token head dim",
        )
    ]
    if latent:
        groups.append(
            group_of(
                [torch.empty(5, 2 * block_tokens, 9) for _ in range(layers)], "block token dim"
            )
        )
    layout = ChunkLayout.of(groups, 16)
    plan = CopyPlan.of(pair_planes(groups, layout.planes_at(0, "cpu"), chunk_side), chunk_side)
    config = choose_config(plan.legs[0].dst, plan.unit, max_programs)
    parts = cut(plan, config, sizes)
    assert parts[0].first_tile == parts[0].offset == 0
    tiles = 0
    for leg in plan.legs:
        tiles += config.tiles(leg.dst, layout.blocks_per_chunk[leg.group], plan.unit)
    assert parts[-1].end_tile == tiles
    assert parts[-1].offset + parts[-1].nbytes == layout.nbytes
    for before, after in itertools.pairwise(parts):
        assert before.end_tile == after.first_tile
        assert 0 <= after.offset - (before.offset + before.nbytes) < 512  # padding
        assert before.nbytes > 0
    one_tile = max(config.blocks * leg.dst.block_bytes for leg in plan.legs)
    bounds = itertools.chain(sizes, itertools.repeat(sizes[-1]))
    padded = 512 * len(plan.legs)
    bound = next(bounds)
    for part in parts:
        assert part.nbytes < bound + one_tile + padded
        assert part.nbytes >= bound or part.last
        bound = next(bounds) if part.nbytes >= bound else bound - part.nbytes
    for group, planes in enumerate(layout.groups):
        mine = [part for part in parts if part.group == group]
        assert [part.last for part in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[0].offset == planes[0].bases[0]
        end = planes[-1].bases[-1] + planes[-1].num_blocks * planes[-1].block_bytes
        assert mine[-1].offset + mine[-1].nbytes == end


@given(
    sizes=st.lists(st.integers(1, 100), max_size=30),
    most=st.integers(100, 300),
    ramp=st.lists(st.integers(1, 300), max_size=3),
)
def test_slices_are_filled_in_order_and_never_too_full(sizes, most, ramp):
    slices = fill(sizes, int, most, ramp)
    assert [size for one in slices for size in one] == sizes
    assert all(one and sum(one) <= most for one in slices)
    for one, room in zip(slices, ramp, strict=False):
        assert len(one) == 1 or sum(one) <= room
    for one, after in itertools.pairwise(slices[len(ramp) :]):
        assert sum(one) + after[0] > most


@given(places=st.lists(st.integers(0, 200), min_size=1, unique=True).map(sorted))
def test_layers_that_are_followed_end_small(places):
    """Parts of one, two, four, ... layers, counted from the end, and what is left in the first."""
    ends = [-1, *layer_ends(places), places[-1]]
    assert ends == sorted(set(ends))
    parts = [sum(a < place <= b for place in places) for a, b in itertools.pairwise(ends)][::-1]
    assert sum(parts) == len(places)
    assert parts[:-1] == [1 << k for k in range(len(parts) - 1)]
    assert 0 < parts[-1] <= 1 << (len(parts) - 1)


@given(
    rows=st.integers(1, 9),
    ends=st.lists(st.integers(0, 8), unique=True).map(sorted),
    seed=st.integers(0, 100),
    size=st.integers(1, 20_000),
)
def test_no_part_goes_on_behind_an_end(rows, ends, seed, size):
    tensors = [torch.zeros((2, 8, 4, 2, 16), dtype=torch.float16) for _ in range(rows)]
    groups = [group_of(tensors, "kv block token head dim")]
    layout = ChunkLayout.of(groups, 16)
    plan = CopyPlan.of(pair_planes(groups, layout.planes_at(0, "cpu"), "dst"), "dst")
    config = choose_config(plan.legs[0].dst, plan.unit, None)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    parts = cut(plan, config, [size], [order], ends)
    assert sum(part.nbytes for part in parts) == layout.nbytes
    assert [p.last_layer for p in parts] == sorted(p.last_layer for p in parts)
    layer_bytes = layout.nbytes // rows
    for part in parts:
        held = range(part.offset // layer_bytes, -(-(part.offset + part.nbytes) // layer_bytes))
        places = [order[layer] for layer in held]
        assert (min(places), max(places)) == (part.first_layer, part.last_layer)
        assert not any(part.first_layer <= end < part.last_layer for end in ends)


def test_layers_begin_small():
    assert layer_sizes(16 * MB) == [MB, 2 * MB, 4 * MB, 8 * MB, 16 * MB]
    assert layer_sizes(MB // 2) == [MB // 2]
