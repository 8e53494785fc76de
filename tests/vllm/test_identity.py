"""Which slice of the cache a rank holds, and which rank of several stores it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_kernels.adapters.vllm.identity import (
    kv_dtype,
    model_identity,
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


@pytest.mark.parametrize(
    ("cache", "model", "name"),
    [
        ("auto", "torch.bfloat16", "bfloat16"),
        ("bfloat16", "torch.float16", "bfloat16"),
        ("fp8", "torch.bfloat16", "fp8_e4m3"),
        ("fp8_e4m3", "torch.bfloat16", "fp8_e4m3"),
    ],
)
def test_equal_cache_dtypes_have_one_name(cache, model, name):
    config = engine()
    config.cache_config.cache_dtype = cache
    config.model_config.dtype = model
    assert kv_dtype(config) == name


def identity(name=None, *, model="org/m", settings=None, **changes):
    config = engine()
    config.model_config.model = model
    config.model_config.quantization = None
    settings = {"rope_theta": 10000.0, "_name_or_path": "x"} | (settings or {})
    config.model_config.hf_text_config = SimpleNamespace(to_dict=lambda: dict(settings))
    for key, value in changes.items():
        setattr(config.model_config, key, value)
    return model_identity(config, name)


def test_whatever_decides_the_kv_decides_the_identity():
    """A configuration overridden at start, another quantization, revision or dtype."""
    same = identity()
    assert same == identity(settings={"_name_or_path": "y", "transformers_version": "9"})
    others = [
        identity(model="org/n"),
        identity(revision="abc"),
        identity(quantization="fp8"),
        identity(dtype="torch.float16"),
        identity(settings={"rope_theta": 500.0}),
        identity("mine"),
    ]
    assert len({same, *others}) == 7
    assert identity("mine") == identity("mine", model="elsewhere/m")
    assert identity("mine") != identity("mine", settings={"rope_theta": 500.0})


def test_a_local_checkpoint_written_anew_is_another_model(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    (tmp_path / "notes.txt").write_text("whatever")
    before = identity(model=str(tmp_path))
    (tmp_path / "notes.txt").write_text("something else")
    assert identity(model=str(tmp_path)) == before
    weights.write_bytes(b"three")
    assert identity(model=str(tmp_path)) != before
    assert identity("mine", model=str(tmp_path)) == identity("mine")


def test_a_shard_knows_its_layers():
    held = slice_of(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, total_kv_heads=4, mla=False)
    groupings = ([["a", "b"]], [["b", "a"]], [["a"], ["b"]], [["ab"]])
    assert len({held.part(layers).shard(bytes(32)) for layers in groupings}) == 4
