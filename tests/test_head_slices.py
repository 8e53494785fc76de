"""Heads of one tensor-parallel size found in chunks of another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels import LayoutError
from lmcache_kernels.head_slices import HeadSlice, head_slices, heads_of

SIZES = [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("tp", "rank", "stored_tp", "expected"),
    [
        (2, 1, 4, [HeadSlice(2, 0, 0, 2), HeadSlice(3, 0, 2, 2)]),
        (8, 5, 4, [HeadSlice(2, 1, 0, 1)]),
        (4, 3, 4, [HeadSlice(3, 0, 0, 2)]),
        (16, 5, 4, [HeadSlice(1, 0, 0, 1)]),
        (1, 0, 16, [HeadSlice(2 * head, 0, head, 1) for head in range(8)]),
    ],
)
def test_slices_of_eight_heads(tp, rank, stored_tp, expected):
    assert head_slices(8, tp=tp, rank=rank, stored_tp=stored_tp) == expected


@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from(SIZES), st.data())
def test_every_head_is_found_exactly_once(heads, tp, stored_tp, data):
    rank = data.draw(st.integers(0, tp - 1))
    mine = heads_of(heads, tp, rank)
    found = {}
    for part in head_slices(heads, tp=tp, rank=rank, stored_tp=stored_tp):
        theirs = heads_of(heads, stored_tp, part.rank)
        for i in range(part.count):
            assert part.start + i < len(theirs)
            assert part.here + i not in found
            found[part.here + i] = theirs[part.start + i]
    assert [found[i] for i in range(len(mine))] == list(mine)


@pytest.mark.parametrize(
    ("heads", "tp", "rank", "message"),
    [
        (8, 3, 0, "8 heads cannot lie on 3 ranks"),
        (0, 1, 0, "0 heads"),
        (8, 2, 2, "0 <= rank < 2, got 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(heads, tp, rank, message):
    with pytest.raises(LayoutError, match=message):
        head_slices(heads, tp=tp, rank=rank, stored_tp=1)


@pytest.mark.parametrize("stored_tp", [0, -2, 3])
def test_ranks_that_cannot_have_stored_are_refused(stored_tp):
    with pytest.raises(LayoutError, match=f"8 heads cannot lie on {stored_tp} ranks"):
        head_slices(8, tp=2, rank=0, stored_tp=stored_tp)
