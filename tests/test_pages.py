"""Scheduler blocks of several kernel pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels import LayoutError
from lmcache_kernels.pages import pages_per_block, split_ids


@given(st.lists(st.integers(0, 1 << 40)), st.integers(1, 64))
def test_ids_name_the_pages_of_their_blocks_in_order(ids, ratio):
    pages = split_ids(ids, ratio)
    assert [page // ratio for page in pages] == [block for block in ids for _ in range(ratio)]
    assert [page % ratio for page in pages] == list(range(ratio)) * len(ids)


def test_blocks_hold_whole_pages_or_are_refused():
    assert pages_per_block(1600, 64) == 25
    for block, page in ((20, 6), (4, 20), (16, 0), (0, 16)):
        with pytest.raises(LayoutError, match=f"block of {block} tokens: .* pages of {page}"):
            pages_per_block(block, page)
    with pytest.raises(LayoutError, match="expected >= 1, got 0"):
        split_ids([1], 0)
