"""The table of layouts: what the documentation shows is what the tests copy."""

from __future__ import annotations

import pytest
import torch
from import_graph import ROOT
from layout_table import ROWS
from layoutkit import SIZES, make_caches

from lmcache_kernels.chunk_layout import ChunkLayout


def test_the_documentation_shows_exactly_the_rows_that_are_tested():
    shown = [
        line
        for line in (ROOT / "docs" / "layouts.md").read_text().splitlines()
        if line.startswith("| ") and "_of(" in line
    ]
    assert shown == [row.line for row in ROWS]
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("kv", "at_least"), [(1, 10), (2, 15)])
def test_engines_that_keep_the_same_heads_share_chunks(kv, at_least):
    """Keys and values apart make one canonical chunk wherever they lie; so do fused ones."""
    plain = [row for row in ROWS if row.dtypes == (torch.float16,) and not row.sizes]
    groups = [make_caches(row).group() for row in plain if [p.kv for p in row.parts] == [kv]]
    width = 2 * 2 // kv * SIZES["HS"]
    same = [g for g in groups if (g.planes[0].width, g.planes[0].num_heads) == (width, SIZES["NH"])]
    assert len(same) >= at_least
    assert len({ChunkLayout.of([group], 4 * SIZES["BS"]).fingerprint for group in same}) == 1
