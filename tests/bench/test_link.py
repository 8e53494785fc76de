"""The link parts: what is measured, and the whole way to a row in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import layers, link, two_way
from bench.cases import CASES
from bench.options import Options
from bench.plain_link import PlainLink
from bench.results import problems
from bench.trials import Trial
from bench.workload import set_up

PEERS = {"lmcache_staged", "lmcache_direct", "memcpy_batch", "vllm_swap"}


def found(rig, **options):
    return list(link.link_trials(replace(rig, options=Options(**options))))


def test_every_layout_goes_both_ways_large_and_small(rig):
    trials = found(rig, only="link ")
    for nbytes in (64 << 20, 8 << 20):
        measured = {(t.case, t.direction) for t in trials if t.nbytes == nbytes}
        assert measured == {(c, way) for c in CASES for way in ("gather", "scatter")}
    assert {t.case for t in trials if t.nbytes == 256 << 20} == set(link.FEW)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_small_payload_is_one_chunk_of_no_more_than_it_must(rig, case):
    (trial, *_) = [t for t in found(rig, only=case.name) if t.nbytes == 8 << 20]
    blocks = trial.chunk_tokens // case.block_tokens
    assert trial.chunk_tokens % case.block_tokens == 0
    assert blocks * case.block_bytes >= 8 << 20 > (blocks - 1) * case.block_bytes


@pytest.mark.parametrize(
    ("only", "count"), [("link MLA", 0), ("link DeepSeek-V3 MLA 16", 4), ("gather, 8 MiB", 14)]
)
def test_titles_choose(rig, only, count):
    assert len(found(rig, only=only)) == count


def test_a_trial_becomes_a_row(rig, tiny_trial, make_document):
    row = link.measure_link(tiny_trial, rig)
    assert row.bit_exact
    assert set(row.seconds) == {"ours", "link"}
    assert set(row.absent) == PEERS
    assert row.moved == {"link": 1 << 20}
    assert row.title == f"link {tiny_trial.title}, 0 MiB"
    assert set(row.parts) == {"call", "call_to_done", "link_call_to_done"}
    assert row.of_ceiling("ours") == pytest.approx(row.ratios["link"])
    assert problems(make_document(row)) == []
    assert "of the link" in link.line(row)


def test_a_mover_that_moves_nothing_is_not_exact(rig, tiny_trial, monkeypatch):
    monkeypatch.setattr("lmcache_kernels.copying.PreparedCopy.copy_groups", lambda *a, **n: None)
    row = link.measure_link(tiny_trial, rig)
    assert not row.bit_exact
    assert "NOT BIT-EXACT" in link.line(row)


def test_settings_of_the_mover_are_in_the_title(rig, tiny_trial):
    tuned = replace(rig, mover={"max_programs": 8, "slices": 4})
    vars(tuned)["link"] = rig.link
    row = link.measure_link(tiny_trial, tuned)
    assert row.title.endswith("slices 4, 8 programs, 0 MiB")


def test_both_ways_become_a_row(rig, tiny_case, make_document):
    row = two_way.measure_both(tiny_case, rig)
    assert row.bit_exact
    assert row.title.startswith(f"two-way {tiny_case.name} both, 2 MiB")
    assert row.moved == {"link": 2 << 20}
    assert set(row.absent) == {"lmcache_staged"}
    assert problems(make_document(row)) == []


@pytest.mark.parametrize("broken", [0, 1])
def test_both_ways_are_checked(rig, tiny_case, broken, monkeypatch):
    real = two_way.Transfer.queue

    def lazy(self, after):
        moved = real(self, after)
        if self.work.gathers != bool(broken):
            self.work.chunk[0, 0] ^= 1
        return moved

    monkeypatch.setattr(two_way.Transfer, "queue", lazy)
    assert not two_way.measure_both(tiny_case, rig).bit_exact


@pytest.mark.parametrize("nbytes", [1, 1000, 1001, 2500])
@pytest.mark.parametrize("out", [True, False])
def test_plain_copies_move_as_many_bytes_as_asked_for(nbytes, out, monkeypatch):
    plain = PlainLink("cpu", 1000)
    host, here = plain._out if out else plain._into
    to, origin = (host, here) if out else (here, host)
    assert not to.equal(origin)
    kept = to.clone()
    plain.copy(out, nbytes)
    size = min(nbytes, 1000)
    assert to[:size].equal(origin[:size])
    assert to[size:].equal(kept[size:])
    assert (plain.contender(out).name, plain.contender(out).moved) == ("link", 1000)


def test_plain_copies_both_ways_move_everything(monkeypatch):
    monkeypatch.setattr("bench.plain_link.SLICE_BYTES", 300)
    plain = PlainLink("cpu", 1000)
    both = plain.both_ways()
    both.run()
    assert both.moved == 2000
    for host, here in (plain._out, plain._into):
        assert host.equal(here)


def test_the_kernels_benchmark_still_sets_up_on_the_device(tiny_trial):
    work = set_up(Trial(tiny_trial.case, "gather", tiny_trial.nbytes), "cpu")
    assert work.chunk.is_contiguous()
    assert work.chunk.shape == (
        3,
        256 // tiny_trial.case.block_tokens * tiny_trial.case.block_bytes,
    )


def test_a_load_by_layers_becomes_a_row(rig, tiny_trial, make_document):
    row = layers.measure_layers(replace(tiny_trial, direction="scatter"), rig)
    assert row.bit_exact
    assert set(row.seconds) == {"ours", "last_layer", "whole"}
    assert problems(make_document(row)) == []
    assert "layer 0" in layers.line(row)
