"""Planes, groups and chunk layouts: what is described and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from cachekit import LAYOUTS, make_cache
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels import CacheGroup, LayoutError, Plane
from lmcache_kernels.chunk_layout import PLANE_ALIGN, ChunkLayout
from lmcache_kernels.copy_config import choose_config
from lmcache_kernels.plane import access_unit
from lmcache_kernels.views import group_of, opaque_group_of

PLANE = Plane((1024, 4096), 3, 4, 2, 16, block_stride=256, token_stride=32, head_stride=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bases": ()}, "at least one row"),
        ({"num_blocks": 0}, "num_blocks: expected >= 1, got 0"),
        ({"width": -4}, "width: expected >= 1, got -4"),
        ({"token_stride": 8}, "token_stride: expected >= 16"),
        ({"head_stride": 0}, "head_stride"),
        ({"block_stride": -256}, "block_stride"),
    ],
)
def test_a_plane_that_cannot_be_is_refused(change, message):
    with pytest.raises(LayoutError, match=message):
        replace(PLANE, **change)


def test_sizes_of_a_plane():
    assert (PLANE.rows, PLANE.block_bytes, PLANE.span) == (2, 128, 2 * 256 + 3 * 32 + 16 + 16)


def test_a_group_is_one_device_and_one_block_size():
    with pytest.raises(LayoutError, match=r"planes\[1\].block_tokens: expected 4, got 2"):
        CacheGroup((PLANE, replace(PLANE, block_tokens=2)), 4, "uint8")
    with pytest.raises(LayoutError, match=r"planes\[1\].device: expected cpu, got cuda:0"):
        CacheGroup((PLANE, replace(PLANE, device="cuda:0")), 4, "uint8")
    with pytest.raises(LayoutError, match="expected 1, got 4"):
        CacheGroup((PLANE,), 4, "uint8", opaque="tag")
    with pytest.raises(LayoutError, match="at least one plane"):
        CacheGroup((), 4, "uint8")
    assert CacheGroup((PLANE, replace(PLANE, num_blocks=2)), 4, "uint8").num_blocks == 2


def test_a_group_may_keep_one_state_for_several_tokens():
    assert CacheGroup((PLANE,), 12, "uint8", tokens_per_state=3).planes[0].block_tokens == 4
    for tokens, per_state, message in (
        (12, 1, r"planes\[0\].block_tokens: expected 12, got 4"),
        (16, 3, "block_tokens: expected a multiple of 3 tokens a state, got 16"),
        (4, 0, "tokens_per_state: expected >= 1, got 0"),
    ):
        with pytest.raises(LayoutError, match=message):
            CacheGroup((PLANE,), tokens, "uint8", tokens_per_state=per_state)


@pytest.mark.parametrize(
    ("number", "unit"), [(16, 16), (24, 8), (36, 4), (2, 2), (3, 1), (1 << 40, 16)]
)
def test_the_access_unit_divides_everything_that_is_used(number, unit):
    assert access_unit(replace(PLANE, bases=(number,))) == unit
    assert access_unit(PLANE, replace(PLANE, block_stride=256 + number)) == min(unit, 16)
    # A stride along an axis of one is never used.
    assert access_unit(replace(PLANE, num_blocks=1, block_stride=number)) == 16


@pytest.mark.parametrize("chunk", [0, 6, 13, -16])
def test_a_chunk_is_a_whole_number_of_blocks(chunk):
    group = group_of(make_cache(LAYOUTS[0]).tensors, LAYOUTS[0].axes)
    with pytest.raises(LayoutError, match=rf"chunk size {chunk} tokens: expected a multiple of"):
        ChunkLayout.of([group], chunk)
    with pytest.raises(LayoutError, match="groups: expected at least one"):
        ChunkLayout.of([], 8)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([8, 16]),
)
def test_the_planes_of_a_chunk_are_aligned_dense_and_apart(shapes, chunk_tokens):
    groups = [
        CacheGroup(
            (
                Plane(tuple(range(rows)), 9, tokens, heads, 6, 10000, 6 * heads, 6),
                Plane((0,), 9, tokens, 1, 3, 1000, 3, 3),
            ),
            tokens,
            "uint8",
        )
        for rows, tokens, heads in shapes
    ]
    layout = ChunkLayout.of(groups, chunk_tokens)
    taken = []
    for group, planes, blocks in zip(
        groups, layout.planes_at(1 << 20, "cpu"), layout.blocks_per_chunk, strict=True
    ):
        assert blocks * group.block_tokens == chunk_tokens
        for plane, engine in zip(planes, group.planes, strict=True):
            assert plane.bases[0] % PLANE_ALIGN == 0
            assert plane.num_blocks == blocks
            assert plane.span == blocks * engine.block_bytes
            taken += [(base, base + plane.span) for base in plane.bases]
    taken.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    assert taken[-1][1] == (1 << 20) + layout.nbytes


def test_a_fingerprint_is_meaning_and_never_strides_or_block_size():
    def fingerprint(chunk=16, **shape):
        cache = make_cache(shape.pop("layout", LAYOUTS[0]), **shape)
        return ChunkLayout.of([group_of(cache.tensors, cache.axes)], chunk).fingerprint

    same = {fingerprint(layout=layout) for layout in LAYOUTS if not (layout.fused or layout.latent)}
    assert same == {fingerprint(tokens=8, blocks=99)}
    for change in (
        {"dtype": torch.bfloat16},
        {"layers": 3},
        {"heads": 4},
        {"dim": 16},
        {"chunk": 32},
    ):
        assert fingerprint(**change) not in same
    # Equal bytes per token, cut otherwise.
    assert fingerprint(heads=6, dim=4) not in same


def test_opaque_pages_are_told_apart_by_tag_and_block_size():
    pages = [torch.zeros(5, 2, 4, 8)]

    def fingerprint(tokens, tag):
        return ChunkLayout.of([opaque_group_of(pages, tokens, tag)], 16).fingerprint

    assert len({fingerprint(4, "a"), fingerprint(8, "a"), fingerprint(4, "b")}) == 3


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 64),
    st.integers(1, 16),
    st.sampled_from([None, 1, 5, 1000]),
)
def test_a_tile_is_bounded_and_covers_short_runs_at_once(width, tokens, heads, most):
    plane = Plane((0,), 2, tokens, heads, width * 16, 1 << 40, 1 << 30, 1 << 26)
    config = choose_config(plane, 16, max_programs=most)
    shape = (config.blocks, config.tokens, config.heads, config.units)
    assert all(n & (n - 1) == 0 for n in shape)
    assert config.tile_bytes(16) <= (4 if most is None else 64) * 1024
    assert config.num_warps == (1 if most is None else 16)
    assert most is None or config.programs == most
    covered = -(-width // config.units) * config.units
    assert covered < 2 * width or config.units <= 128
    assert config.tiles(plane, 3, 16) * config.tile_bytes(16) >= 3 * plane.block_bytes
