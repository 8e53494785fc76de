"""The registry says what it measures: sizes, strides and runs are those of the tensors."""

from __future__ import annotations

import pytest
import torch

from bench.cases import CASES, LAYOUTS, Case, Model
from bench.trials import DIRECTIONS, Trial, trials
from bench.workload import set_up

CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

RUN_BYTES = {
    "Llama-3-8B [2,B,N,H,D]": 32768,
    "Llama-3-8B [B,2,N,H,D]": 32768,
    "Llama-3-8B [2,B,H,N,D]": 256,
    "Llama-3-8B [B,2,H,N,D]": 256,
    "Llama-3-8B [B,N,H,2D]": 65536,
    "Llama-3-8B [B,H,N,2D]": 512,
    "Llama-3-8B [B,H,N,2D] stored NHD": 65536,
    "Llama-3-8B [B,L,2,N,H,D]": 32768,
    "Llama-3-70B TP4 [2,B,N,H,D]": 8192,
    "Llama-3-70B TP8 [2,B,N,H,D]": 4096,
    "gpt-oss-120b [2,B,N,H,D]": 16384,
    "DeepSeek-V3 MLA 64 [B,N,D]": 73728,
    "DeepSeek-V3 MLA 16 [B,N,D]": 18432,
    "DeepSeek-V3.2 fp8_ds_mla [B,N,D]": 41984,
}
"""By hand: tokens * heads * width where chunk and page agree on their order, else one head's width."""


def test_names_tell_cases_apart():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.name for case in CASES} == set(RUN_BYTES)


@CASE
def test_runs_are_as_long_as_layout_and_model_make_them(case):
    for direction in DIRECTIONS:
        assert set_up(Trial(case, direction, 1), "cpu").run_bytes == RUN_BYTES[case.name]


@CASE
def test_a_block_has_the_bytes_it_claims(case):
    tensors = case.tensors(3, "cpu")
    assert sum(t.numel() * t.element_size() for t in tensors) == 3 * case.block_bytes


@CASE
def test_a_plane_of_the_cache_and_its_views_name_the_same_addresses(case):
    work = set_up(Trial(case, "gather", 1), "cpu")
    assert len(work.views) == case.model.layers
    rows = [view[kv] for view in work.views for kv in range(case.kv_size)]
    assert [row.data_ptr() for row in rows] == list(work.pool.bases)
    element = case.model.element_bytes
    for row in rows:
        assert row.stride(0) * element == work.pool.block_stride
        assert row.stride(1) * element == work.pool.token_stride
        assert row.shape[2] == 1 or row.stride(2) * element == work.pool.head_stride
        assert row.stride(3) == 1


@CASE
def test_the_payload_is_at_least_what_was_asked_for_and_whole_chunks(case):
    per_chunk = 256 // case.block_tokens
    blocks = case.blocks_for(256 << 20, per_chunk)
    assert blocks * case.block_bytes >= 256 << 20
    assert (blocks - per_chunk) * case.block_bytes < 256 << 20
    assert blocks % per_chunk == 0


def test_every_layout_is_measured_both_ways_at_full_size_with_random_ids():
    found = [t for t in trials(256) if t.nbytes >= 256 << 20 and t.ids == "random"]
    usual = {
        (t.case.layout, t.direction)
        for t in found
        if t.max_programs is None and t.variant == "plain"
    }
    assert usual == {(layout, direction) for layout in LAYOUTS for direction in DIRECTIONS}


def test_other_conditions_are_measured_too():
    found = list(trials(256))
    assert {t.case for t in found if t.variant == "checksum"} == set(CASES)
    assert {t.ids for t in found} == {"random", "contiguous"}
    assert {t.max_programs for t in found} == {None, 16, 32}
    assert {t.nbytes for t in found} == {256 << 20, 64 << 20}
    assert len({(t.title, t.nbytes) for t in found}) == len(found)


def test_random_ids_name_every_block_once_and_are_the_same_every_time():
    case = Case(Model("tiny", 2, 2, 4), LAYOUTS[0])
    first, second = (set_up(Trial(case, "gather", 20000), "cpu") for _ in range(2))
    assert sorted(first.ids) == list(range(first.pool.num_blocks))
    assert first.ids != sorted(first.ids)
    assert first.ids == second.ids
    assert set_up(Trial(case, "gather", 20000, ids="contiguous"), "cpu").ids == sorted(first.ids)


def test_the_cache_is_not_made_of_zeros():
    (tensor, *_) = CASES[0].tensors(1, "cpu")
    assert torch.unique(tensor).numel() > 1000
