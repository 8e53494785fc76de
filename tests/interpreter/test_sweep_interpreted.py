"""The sweep of tile shapes, on a tiny cache in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from bench import cases, sweep
from bench.cases import Case
from bench.timing import HostClock
from bench.trials import Trial
from bench.workload import set_up

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("max_programs", [None, 2])
@pytest.mark.parametrize("variant", ["plain", "checksum"])
def test_every_tile_takes_part(variant, max_programs):
    model = replace(cases.MLA_16, layers=1, dim=8)
    case = Case(model, cases.LATENT)
    trial = Trial(case, "gather", case.block_bytes, variant=variant, max_programs=max_programs)
    row = sweep.measure_tiles(set_up(trial, "cpu"), 2, HostClock())
    assert row.bit_exact
    tried = sweep.FREE if max_programs is None else sweep.BOUNDED
    assert set(row.seconds) == {"ours", "plain", *(f"{kib}K_w{warps}" for kib, warps in tried)}
    named = [name for name in row.seconds if f" {name}" in sweep.best(row, count=2)]
    assert len(named) >= 2
