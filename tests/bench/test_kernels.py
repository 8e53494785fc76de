"""The whole way from a trial to a row, in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import kernels
from bench.results import problems
from bench.workload import set_up

ON_HOST = ("plain", "index_select", "per_block")


def test_a_trial_becomes_a_row_that_is_exact_and_adds_up(tiny_trial, make_document):
    (row,) = kernels.run_on_host([tiny_trial], rounds=2)
    assert row.bit_exact
    assert set(row.seconds) == {"ours", *ON_HOST}
    assert set(row.absent) == {"memcpy_batch", "lmcache", "vllm_swap"}
    assert row.bytes >= tiny_trial.nbytes
    assert row.ratios["plain"] == pytest.approx(row.of_ceiling("ours"))
    assert problems(make_document(row)) == []


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_wrong_checksum_is_not_exact(direction, tiny_trial, monkeypatch):
    trial = replace(tiny_trial, variant="checksum", direction=direction)
    (row,) = kernels.run_on_host([trial], rounds=2)
    assert row.bit_exact
    monkeypatch.setattr(kernels, "unsigned", lambda row: sum(row) + 1)
    (row,) = kernels.run_on_host([trial], rounds=2)
    assert not row.bit_exact


def test_beside_a_checksum_the_copy_without_one_is_timed(tiny_trial):
    (row,) = kernels.run_on_host([replace(tiny_trial, variant="checksum")], rounds=2)
    assert row.bit_exact
    assert set(row.seconds) == {"ours", "plain", "ours_plain"}
    assert row.absent == {}


def test_a_copy_that_moves_nothing_is_not_exact(tiny_trial, monkeypatch):
    monkeypatch.setitem(kernels.OURS_BY_VARIANT, "plain", lambda work: lambda: None)
    (row,) = kernels.run_on_host([tiny_trial], rounds=2)
    assert not row.bit_exact
    assert "NOT BIT-EXACT" in kernels.line(row)


@pytest.mark.parametrize("where", [0, -1])
def test_one_wrong_byte_is_seen(tiny_trial, where):
    work = set_up(tiny_trial, "cpu")
    kernels.OURS_BY_VARIANT["plain"](work)()
    assert work.is_exact()
    work.chunk.view(-1)[where] ^= 1
    assert not work.is_exact()


def test_a_part_is_checked_without_the_rest(tiny_trial):
    work = set_up(tiny_trial, "cpu")
    kernels.OURS_BY_VARIANT["plain"](work)()
    work.chunk.view(-1)[-1] ^= 1
    assert work.is_exact(work.blocks_per_chunk)


def test_poison_spoils_the_side_that_is_written(tiny_trial):
    work = set_up(tiny_trial, "cpu")
    before = (work.chunk.clone(), work.caches[0].clone())
    work.poison()
    untouched = work.caches[0].equal(before[1]) if work.gathers else work.chunk.equal(before[0])
    assert untouched
    assert not work.is_exact()
