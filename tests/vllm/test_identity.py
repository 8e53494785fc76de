"""Which slice of the cache a rank holds, and which rank of several stores it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_kernels.adapters.vllm.identity import (
    kv_dtype,
    model_name,
    slice_of,
    slice_of_engine,
)
from lmcache_kernels.errors import ConfigError


def slices(tp, heads, *, mla=False):
    found = [
        slice_of(tp_rank=r, tp_size=tp, pp_rank=0, pp_size=1, total_kv_heads=heads, mla=mla)
        for r in range(tp)
    ]
    return [(s.index, s.count, s.writer) for s in found]


@pytest.mark.parametrize(
    ("tp", "heads", "expected"),
    [
        (1, 8, [(0, 1, True)]),
        (2, 8, [(0, 2, True), (1, 2, True)]),
        (4, 2, [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]),
        (2, 1, [(0, 1, True), (0, 1, False)]),
    ],
)
def test_ranks_with_the_same_heads_have_one_slice_and_one_writer(tp, heads, expected):
    assert slices(tp, heads) == expected


def test_a_latent_cache_counts_no_ranks():
    assert slices(8, 128, mla=True) == [(0, 1, r == 0) for r in range(8)]


def test_stages_are_slices_of_their_own():
    for stage in range(2):
        held = slice_of(tp_rank=1, tp_size=2, pp_rank=stage, pp_size=2, total_kv_heads=4, mla=False)
        assert (held.stage, held.stages, held.index) == (stage, 2, 1)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="6 KV heads on 4"):
        slices(4, 6)


def engine(**changes):
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **changes}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 4,
            use_mla=False,
            model="org/m",
            revision=None,
            dtype="torch.bfloat16",
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def test_an_engines_rank_counts_tensor_parallel_first():
    held = slice_of_engine(engine(), 3)
    assert (held.index, held.count, held.stage, held.stages) == (1, 2, 1, 2)


def test_context_parallelism_is_refused():
    with pytest.raises(ConfigError, match="decode_context_parallel_size=2"):
        slice_of_engine(engine(decode_context_parallel_size=2), 0)


def test_names():
    config = engine()
    assert (model_name(config), kv_dtype(config)) == ("org/m", "torch.bfloat16")
    config.model_config.revision = "abc"
    config.cache_config.cache_dtype = "fp8"
    assert (model_name(config), kv_dtype(config)) == ("org/m@abc", "fp8")
