"""vLLM's registered tensors, recognised by what their specs say they hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lmcache_kernels.adapters.vllm.layouts import (
    axes_of,
    check_can_move,
    describe_groups,
    group_shapes,
    layers_run_once,
)
from lmcache_kernels.adapters.vllm.tracker import GroupShape
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.errors import LayoutError


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def full(kind=FullAttentionSpec, heads=3, tokens=16, size=8):
    return kind(num_kv_heads=heads, block_size=tokens, head_size=size)


def config(*groups, num_blocks=10):
    return SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups
        ],
    )


def described(*arguments):
    """The groups as they are read, and their layers."""
    groups, layers = describe_groups(*arguments)
    return [group.read() for group in groups], layers


@pytest.mark.parametrize(
    ("shape", "spec", "axes"),
    [
        ((10, 3, 16, 16), full(), "block head token dim"),
        ((2, 10, 16, 3, 8), full(), "kv block token head dim"),
        ((10, 2, 16, 3, 8), full(), "block kv token head dim"),
        ((10, 16, 576), full(MLAAttentionSpec, heads=1, size=576), "block token dim"),
        ((10, 1, 16, 576), full(MLAAttentionSpec, heads=1, size=576), "block head token dim"),
    ],
)
def test_every_known_shape_has_its_axes(shape, spec, axes):
    assert axes_of(torch.zeros(shape), spec, 10) == axes


@pytest.mark.parametrize(
    "shape",
    [(10, 4, 16, 16), (20, 3, 16, 16), (10, 16, 3, 16), (10, 16 * 3 * 16), (3, 10, 16, 3, 8)],
)
def test_an_unknown_shape_is_refused_naming_it(shape):
    with pytest.raises(LayoutError, match=r"shape \(.*\) stride \(.*0 fit"):
        axes_of(torch.zeros(shape), full(), 10)


def test_two_blocks_of_keys_and_values_could_be_either_and_are_refused():
    with pytest.raises(LayoutError, match="2 fit"):
        axes_of(torch.zeros(2, 2, 16, 3, 8), full(), 2)


def test_layers_become_rows_and_other_shapes_planes_of_their_own():
    spec = FullAttentionSpec(
        block_size=16, kv_cache_specs={"a": full(), "b": full(), "c": full(heads=5)}
    )
    caches = {
        "a": torch.zeros(10, 3, 16, 16),
        "b": torch.zeros(10, 3, 16, 16),
        "c": torch.zeros(10, 5, 16, 16),
    }
    (group,), layers = described(config((spec, ["a", "b", "c"])), caches, {})
    assert layers == [["a", "b", "c"]]
    assert [(plane.rows, plane.num_heads) for plane in group.planes] == [(2, 3), (1, 5)]
    assert group.planes[0].bases == (caches["a"].data_ptr(), caches["b"].data_ptr())
    assert (group.block_tokens, group.dtype, group.opaque) == (16, "float32", "")


def test_pages_of_the_cpu_back_end_are_opaque_and_know_their_instruction_set():
    caches = {"a": torch.zeros(10, 3, 16, 16)}
    groups = {
        isa: described(config((full(), ["a"])), caches, {"a": isa})[0][0] for isa in ("vec", "amx")
    }
    plane = groups["vec"].planes[0]
    assert (plane.block_tokens, plane.num_heads, plane.width) == (1, 1, 3 * 16 * 16 * 4)
    assert groups["vec"].block_tokens == 16
    assert groups["vec"].opaque != groups["amx"].opaque


def test_opaque_pages_of_one_group_are_all_alike():
    caches = {"a": torch.zeros(10, 3, 16, 16), "b": torch.zeros(10, 5, 16, 16)}
    with pytest.raises(LayoutError, match="layers a, b: expected opaque pages that are all alike"):
        describe_groups(config((full(), ["a", "b"])), caches, {"a": "vec", "b": "vec"})


def test_pages_with_holes_cannot_be_opaque():
    padded = torch.zeros(10, 3, 16, 20)[..., :16]
    with pytest.raises(LayoutError, match="dense bytes"):
        describe_groups(config((full(), ["a"])), {"a": padded}, {"a": "vec"})


def test_a_layer_that_was_not_registered_is_named():
    with pytest.raises(LayoutError, match="layers b"):
        describe_groups(config((full(), ["a", "b"])), {"a": torch.zeros(10, 3, 16, 16)}, {})


def test_groups_say_how_they_page():
    sliding = full(SlidingWindowSpec)
    sliding.sliding_window = 96
    groups = config((full(), ["a", "c"]), (sliding, ["b"]))
    assert group_shapes(groups) == [GroupShape(16), GroupShape(16, window=96)]


def test_caches_whose_blocks_the_engine_rewrites_before_a_fence_are_refused():
    other = config((full(), ["a"]), (full(tokens=32), ["b"]))
    with pytest.raises(LayoutError, match=r"\[16, 32\] tokens a block"):
        group_shapes(other)
    zeroed = config((full(), ["a"]))
    zeroed.needs_kv_cache_zeroing = True
    with pytest.raises(LayoutError, match="zeroed"):
        group_shapes(zeroed)


def test_a_pipeline_stage_without_layers_of_a_group_is_refused():
    with pytest.raises(LayoutError, match="without layers"):
        group_shapes(config((full(), ["a"]), (full(), [])))


def test_a_recurrent_group_is_refused_with_one_sentence():
    with pytest.raises(LayoutError, match="KV-cache group of MambaSpec: this connector stores"):
        group_shapes(config((full(), ["a"]), (full(MambaSpec), ["m"])))


def test_pages_of_the_sparse_attention_indexer_are_values_and_then_scales():
    """Registered as 132 bytes a token; engines with other block sizes must find the same chunks."""
    latent = torch.zeros(10, 64, 576, dtype=torch.bfloat16)
    index = torch.zeros(10, 64, 132, dtype=torch.uint8)
    specs = full(MLAAttentionSpec, heads=1, tokens=64, size=576)
    specs.kv_cache_specs = {
        "attn": full(MLAAttentionSpec, heads=1, tokens=64, size=576),
        "indexer": full(MLAAttentionSpec, heads=1, tokens=64, size=132),
    }
    (group,), _ = described(
        config((specs, ["attn", "indexer"])), {"attn": latent, "indexer": index}, {}
    )
    assert [(p.width, p.token_stride, p.block_stride) for p in group.planes] == [
        (1152, 1152, 64 * 1152),
        (128, 128, 64 * 132),
        (4, 4, 64 * 132),
    ]
    assert group.planes[2].bases[0] == index.data_ptr() + 64 * 128


def test_layers_that_engines_stride_differently_never_pass_for_each_other():
    """Which layers share a plane decides the order of a chunk's rows, and so its name."""

    def engine(*head_major):
        caches = {
            f"l{i}": torch.zeros(10, 3, 16, 16)
            if hnd
            else torch.zeros(10, 16, 3, 16).transpose(1, 2)
            for i, hnd in enumerate(head_major)
        }
        groups, layers = described(config((full(), list(caches))), caches, {})
        layout = ChunkLayout.of(groups, 16)
        return layout.fingerprint, layers

    one, other = engine(True, False, True, False), engine(True, True, False, False)
    assert one[0] == other[0]
    assert one[1] == [["l0", "l2", "l1", "l3"]]
    assert other[1] == [["l0", "l1", "l2", "l3"]]


@pytest.mark.parametrize(
    ("shape", "page_tokens"),
    [
        ((10, 3, 20, 16), 20),
        ((50, 3, 4, 16), 4),
        ((2, 20, 10, 3, 8), 10),
        ((200, 3, 1, 16), 1),
    ],
)
def test_fault_a05_blocks_may_be_several_pages_of_the_attention_kernel(shape, page_tokens):
    """Planes describe the pages that the tensors have, whatever the scheduler counts."""
    (group,), _ = described(config((full(tokens=20), ["a"])), {"a": torch.zeros(shape)}, {})
    assert group.block_tokens == page_tokens
    assert group.num_blocks == 10 * 20 // page_tokens


@pytest.mark.parametrize("shape", [(40, 3, 4, 16), (50, 3, 5, 16), (55, 3, 4, 16), (70, 3, 3, 16)])
def test_fault_a05_pages_that_make_no_whole_blocks_are_refused(shape):
    with pytest.raises(LayoutError, match="0 fit"):
        describe_groups(config((full(tokens=20), ["a"])), {"a": torch.zeros(shape)}, {})


def test_layers_of_one_group_are_cut_alike():
    caches = {"a": torch.zeros(50, 3, 4, 16), "b": torch.zeros(20, 3, 10, 16)}
    with pytest.raises(LayoutError, match=r"cut blocks alike, got \[2, 5\] pages a block"):
        describe_groups(config((full(tokens=20), ["a", "b"])), caches, {})


def test_a_layer_with_a_view_of_its_cache_could_not_follow_to_shared_memory():
    cache = torch.zeros(10, 3, 16, 16)
    check_can_move({"a": cache}, {"a": cache})
    for bound in ({"a": cache.view(20, 3, 8, 16)}, {"a": [cache]}, {}):
        with pytest.raises(LayoutError, match=r"layer a: it computes with a view .* engine_driven"):
            check_can_move({"a": cache}, bound)
    on_device = torch.zeros(10, 3, 16, 16, device="meta")
    check_can_move({"a": on_device}, {"a": on_device.view(-1)})


@pytest.mark.parametrize(
    ("micro", "drafts", "once"),
    [(False, None, True), (True, None, False), (False, object(), False)],
)
def test_a_layers_hook_tells_of_the_whole_step_unless_it_is_called_for_pieces(micro, drafts, once):
    parallel = SimpleNamespace(use_ubatching=micro)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=drafts)
    assert layers_run_once(config) is once
