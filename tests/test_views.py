"""From tensors and an axes string to planes: what is described, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cachekit import LAYOUTS, make_cache
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels import CacheGroup, LayoutError
from lmcache_kernels.axes import Axes
from lmcache_kernels.views import blocked_group_of, group_of, opaque_group_of, plane_of


def address(plane, row, block, token=0, head=0):
    return (
        plane.bases[row]
        + block // plane.split * plane.block_stride
        + block % plane.split * plane.split_stride
        + token * plane.token_stride
        + head * plane.head_stride
    )


# --- the notation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "levels", "folds"),
    [
        ("block dim", None, [["block"], ["dim"]]),
        ("kv layer|block 1 dim", ("kv", "layer"), [["block"], ["1"], ["dim"]]),
        ("| (block token)(head dim)", (), [["block", "token"], ["head", "dim"]]),
        ("block ( head  1 token dim )", None, [["block"], ["head", "1", "token", "dim"]]),
    ],
)
def test_an_axes_string_is_read(text, levels, folds):
    axes = Axes.parse(text)
    assert axes.levels == levels
    assert axes.folds == tuple(map(tuple, folds))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'block' is missing"),
        ("token head dim", "'block' is missing"),
        ("block tokens head dim", "unknown axis 'tokens', known are block"),
        ("block 2 dim", "unknown axis '2'"),
        ("kv block kv dim", "'kv' named twice"),
        ("kv | kv block dim", "'kv' named twice"),
        ("plane | plane block dim", "'plane' named twice"),
        ("block | token dim", "'block' in front of the bar"),
        ("1 | block dim", "'1' in front of the bar"),
        ("layer | kv | block dim", "'|' in front of the bar"),
        ("(layer) | block dim", "in front of the bar"),
        ("(block token dim", "pairs of parentheses"),
        ("block) token dim", "pairs of parentheses"),
        ("((block token) head) dim", "pairs of parentheses"),
        ("block () dim", "pairs of parentheses around words"),
    ],
)
def test_a_string_that_cannot_be_read_is_refused_and_quoted(text, message):
    with pytest.raises(LayoutError, match=message) as caught:
        group_of(torch.zeros(2, 3, 4), text)
    assert repr(text) in str(caught.value)


SHAPE = r"shape \(6, 4, 3, 5\) stride \(60, 15, 5, 1\)"


@pytest.mark.parametrize(
    ("axes", "sizes", "message"),
    [
        ("kv block token head dim", {}, f"expected 5 axes .*{SHAPE}"),
        ("block 1 head dim", {}, f"axis of 1=1 and not 4 .*{SHAPE}"),
        ("(block token) layer head dim", {"token": 4}, rf"axis of block=\? x token=4 .*{SHAPE}"),
        ("(block token) layer head dim", {"token": 12}, f"token=12 and not 6 .*{SHAPE}"),
        ("(block token) layer head dim", {"block": 1, "token": 3}, f"not 6 .*{SHAPE}"),
        ("(block token) layer head dim", {}, r"\(block token\): expected the sizes of all but one"),
        ("block token head dim", {"head": 4}, f"axis of head=4 and not 3 .*{SHAPE}"),
        ("block token head dim", {"kv": 2}, "size is given for 'kv', which is not named exactly"),
        ("block token token dim", {"token": 4}, "size is given for 'token', which is not named"),
        ("block token head dim", {"head": 0}, "size of 'head': expected an integer >= 1, got 0"),
        ("block token head dim", {"head": 4.0}, "expected an integer >= 1, got 4.0"),
        ("block token head dim", {"head": "4"}, "expected an integer >= 1, got '4'"),
        ("kv block head dim", {}, f"one or two entries of kv .*{SHAPE}"),
        ("block dim head token", {}, f"dense dim axis .*{SHAPE}"),
        ("block head layer head", {}, f"strides that make one axis of head .*{SHAPE}"),
        ("head block head dim", {}, f"strides that make one axis of head .*{SHAPE}"),
    ],
)
def test_a_tensor_that_is_not_what_its_axes_say_is_refused(axes, sizes, message):
    with pytest.raises(LayoutError, match=message):
        plane_of(torch.zeros(6, 4, 3, 5), axes, **sizes)


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ("block token head dim", {"block": 6, "token": 4, "head": 3, "dim": 5}),
        ("layer | block token head dim", {"layer": 2, "token": 4}),
    ],
)
def test_sizes_that_hold_change_nothing(axes, sizes):
    tensors = [torch.zeros(6, 4, 3, 5) for _ in range(2)]
    assert plane_of(tensors, axes, **sizes) == plane_of(tensors, axes)


# --- random notations -----------------------------------------------------------------------------


@st.composite
def described_caches(draw):
    """Tensors with their axes string and sizes, and a function from logical place to element."""
    words = ["block", *draw(st.sets(st.sampled_from(["token", "head", "dim", "layer", "kv"])))]
    most = {"kv": 2, "dim": 4}
    extent = {word: draw(st.integers(1, most.get(word, 3)), word) for word in sorted(words)}
    outer = draw(st.permutations([w for w in sorted(words) if w in ("layer", "kv")]))
    levels = outer[: draw(st.integers(0, len(outer)), "levels")]
    rest = [word for word in sorted(words) if word not in levels and word != "dim"]

    # Axes of the tensor, slowest in memory first; each folds words or is half of a cut word.
    memory = draw(st.permutations(rest)) + ["dim"] * ("dim" in words)
    axes: list[list[tuple[str, int]]] = []
    cuttable = [word for word in memory if word not in ("layer", "kv")]
    cut = draw(st.sampled_from([None, *cuttable]), "cut")
    glued = []  # axes that no padding may follow
    for word in memory:
        if word == cut:
            half = draw(st.sampled_from([1, 2, 3]), "half")
            axes += [[(word, half)], [(word, extent[word])]]
            if word == "dim" or (word != "block" and min(half, extent[word]) > 1):
                glued.append(len(axes) - 1)
            extent[word] *= half
        elif axes and axes[-1][0][0] != cut and draw(st.booleans(), f"fold {word}"):
            axes[-1].append((word, extent[word]))
        else:
            axes.append([(word, extent[word])])
    stride, step = [0] * len(axes), 1
    for i in reversed(range(len(axes))):
        stride[i] = step
        count = math.prod(n for _, n in axes[i])
        step *= count + (0 if i in glued else draw(st.integers(0, 2), "padding"))

    # The order of the shape is free, but the slower half of a cut word comes first.
    order = list(draw(st.permutations(range(len(axes))), "order"))
    halves = [i for i in range(len(axes)) if axes[i][0][0] == cut]
    for place, i in zip(sorted(map(order.index, halves)), halves, strict=True):
        order[place] = i
    text, shape, strides, sizes = [], [], [], {}
    for i in order:
        names = [word for word, _ in axes[i]]
        text.append(f"({' '.join(names)})" if len(names) > 1 else names[0])
        shape.append(math.prod(n for _, n in axes[i]))
        strides.append(stride[i])
        unsaid = draw(st.sampled_from(names), "unsaid")
        sizes |= {word: n for word, n in axes[i] if word not in (unsaid, cut)}
    if draw(st.booleans(), "one"):
        at = draw(st.integers(0, len(text)), "one at")
        text.insert(at, "1")
        shape.insert(at, 1)
        strides.insert(at, draw(st.integers(0, 9)))
        order.insert(at, -1)
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]), "dtype")

    def nest(extents):
        if extents:
            return [nest(extents[1:]) for _ in range(extents[0])]
        return torch.zeros(step + 5, dtype=dtype).as_strided(shape, strides, 5)

    tensors = nest([extent[word] for word in levels])
    bar = levels and (levels != ["layer"] or draw(st.booleans(), "bar"))
    axes_text = f"{' '.join(levels)} | {' '.join(text)}" if bar else " ".join(text)

    def element(place):
        tensor = tensors
        for word in levels:
            tensor = tensor[place[word]]
        left = dict(place)
        index = {}
        for i in reversed(range(len(axes))):  # a cut word's faster half takes its remainder first
            index[i] = 0
            scale = 1
            for word, n in reversed(axes[i]):
                left[word], digit = divmod(left[word], n)
                index[i] += digit * scale
                scale *= n
        assert not any(left[word] for word in left if word not in levels)
        return tensor[tuple(0 if i < 0 else index[i] for i in order)]

    return tensors, axes_text, sizes, extent, dtype.itemsize, element


@given(described_caches())
def test_every_address_is_where_indexing_finds_the_element(described):
    tensors, axes, sizes, extent, itemsize, element = described
    plane = plane_of(tensors, axes, **sizes)
    count = {w: extent.get(w, 1) for w in ("layer", "kv", "block", "token", "head")}
    assert plane.rows == count["layer"] * count["kv"]
    assert (plane.num_blocks, plane.block_tokens) == (count["block"], count["token"])
    assert (plane.num_heads, plane.width) == (count["head"], extent.get("dim", 1) * itemsize)
    for layer, kv, block, token, head in itertools.product(*map(range, count.values())):
        place = {"layer": layer, "kv": kv, "block": block, "token": token, "head": head, "dim": 0}
        at = address(plane, layer * count["kv"] + kv, block, token, head)
        assert at == element({w: i for w, i in place.items() if w in extent}).data_ptr()


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_last_address_is_where_the_tensor_has_its_last_element(layout):
    cache = make_cache(layout)
    plane = plane_of(cache.tensors, layout.axes)
    last = cache.tensors[-1]
    end = last[tuple(slice(-1, None) for _ in last.shape)].data_ptr() + last.element_size()
    assert end == plane.bases[-1] + plane.span


def test_rows_are_ordered_by_layer_then_key_and_value():
    cache = make_cache(LAYOUTS[0], layers=3)
    plane = plane_of(cache.tensors, LAYOUTS[0].axes)
    assert plane.bases == tuple(t[kv].data_ptr() for t in cache.tensors for kv in range(2))
    (tensor,) = make_cache(next(x for x in LAYOUTS if x.name == "cross_layer"), layers=3).tensors
    assert plane_of(tensor, "block layer kv token head dim").bases == tuple(
        tensor[0, layer, kv].data_ptr() for layer in range(3) for kv in range(2)
    )
    pools = [[torch.zeros(4, 2) for _ in range(3)] for _ in range(2)]
    assert plane_of(pools, "kv layer | block dim").bases == tuple(
        pools[kv][layer].data_ptr() for layer in range(3) for kv in range(2)
    )


def test_several_tensors_of_several_layers_are_counted_through():
    pools = [torch.zeros(4, 2, 3) for _ in range(2)]
    assert plane_of(pools, "block layer dim").bases == tuple(
        pool[0, layer].data_ptr() for pool in pools for layer in range(2)
    )


def test_one_list_of_views_and_one_tensor_are_the_same_plane():
    """vLLM hands out each layer's view of one pool; the pool says the same in one piece."""
    pool = torch.zeros(7, 5, 3, 4, 6).permute(1, 0, 3, 2, 4)
    assert plane_of(list(pool), "block head token dim") == plane_of(
        pool, "layer block head token dim"
    )


def test_blocks_cut_in_two_are_joined_or_counted_through():
    tensor = torch.zeros(3, 4, 2, 6)
    joined = plane_of(tensor, "block block head dim")
    assert (joined.num_blocks, joined.block_stride, joined.split) == (12, 12 * 4, 1)
    apart = plane_of(tensor[:, :3], "block block head dim")
    assert (apart.num_blocks, apart.split, apart.split_stride) == (9, 3, 12 * 4)
    assert address(apart, 0, 7) == tensor[2, 1].data_ptr()
    with pytest.raises(LayoutError, match="strides that make one axis of block"):
        plane_of(torch.zeros(3, 4, 5, 6)[:, :3, :2], "block block block dim")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(2, 3, 4, 6), r"tensors\[1\].shape: expected \(2, 3, 4, 5\) as tensors\[0\]"),
        (torch.zeros(2, 3, 4, 5, dtype=torch.float16), r"tensors\[1\].dtype"),
        (torch.zeros(2, 4, 3, 5).transpose(1, 2), r"tensors\[1\].stride"),
        (torch.zeros(2, 3, 4, 5, device="meta"), r"tensors\[1\]: expected bytes in memory"),
        ((1, 2), r"tensors\[1\]: expected a torch.Tensor, got tuple"),
    ],
)
def test_layers_that_differ_are_refused_naming_what(other, message):
    with pytest.raises(LayoutError, match=message):
        plane_of([torch.zeros(2, 3, 4, 5), other], "block token head dim")


@pytest.mark.parametrize(
    ("tensors", "axes", "message"),
    [
        ([], "block dim", "tensors: expected a list along 'layer' of at least one, got none"),
        (torch.zeros(2, 3), "layer | block dim", "expected a list along 'layer', got Tensor"),
        (None, "block dim", "expected a list along 'layer', got NoneType"),
        ([torch.zeros(2, 3)], "| block dim", "tensors: expected a torch.Tensor, got list"),
        (
            [[torch.zeros(2, 3)], torch.zeros(2, 3)],
            "kv layer | block dim",
            r"tensors\[1\]: expected a list along 'layer', got Tensor",
        ),
        (
            [[torch.zeros(2, 3)] * 2, [torch.zeros(2, 3)]],
            "kv layer | block dim",
            r"tensors\[1\]: expected 2 along 'layer', got 1",
        ),
        ([torch.zeros(2, 3)] * 3, "kv | block dim", r"tensors\[2\]: expected one or two entries"),
        (torch.zeros(0, 3), "block dim", "no empty axis"),
        (torch.zeros(2, 3, device="meta"), "block dim", "expected bytes in memory"),
        (torch.eye(3).to_sparse(), "block dim", "expected bytes in memory, got a torch.sparse_coo"),
        (torch.zeros(1, 3).expand(2, 3), "block dim", "block_stride: expected >= 12"),
        ([torch.zeros(2, 3)], "plane | block dim", "describe these tensors by group_of"),
    ],
)
def test_what_is_no_cache_is_refused(tensors, axes, message):
    with pytest.raises(LayoutError, match=message):
        plane_of(tensors, axes)


def test_a_list_that_is_longer_or_shorter_than_said_is_refused():
    with pytest.raises(LayoutError, match="tensors: expected 3 along 'layer', got 2"):
        plane_of([torch.zeros(2, 3)] * 2, "layer | block dim", layer=3)


# --- groups ---------------------------------------------------------------------------------------


def test_unlike_layers_become_planes_in_order_of_their_first_rows():
    wide, narrow = (lambda: torch.zeros(5, 4, 2, 8)), (lambda: torch.zeros(5, 4, 2, 6))
    layers = [narrow(), wide(), narrow()]
    group = group_of(layers, "block token head dim")
    assert [(plane.rows, plane.width) for plane in group.planes] == [(2, 24), (1, 32)]
    assert group.planes[0].bases == (layers[0].data_ptr(), layers[2].data_ptr())
    assert (group.block_tokens, group.dtype) == (4, "float32")
    assert group.planes == (
        plane_of(layers[::2], "block token head dim"),
        plane_of(layers[1], "block token head dim"),
    )


def test_planes_of_one_shape_stay_apart_and_planes_of_other_dtypes_are_named():
    layers = [[torch.zeros(5, 4, 8), torch.zeros(5, 4, 8)] for _ in range(3)]
    group = group_of(layers, "layer plane | block token dim")
    assert [plane.bases for plane in group.planes] == [
        tuple(layer[plane].data_ptr() for layer in layers) for plane in range(2)
    ]
    mixed = [[torch.zeros(5, 4, 8, dtype=torch.int8), torch.zeros(5, 4, 1)]] * 2
    assert group_of(mixed, "layer plane | block token dim").dtype == "int8+float32"
    assert group_of(layers[0][0], "block token dim").dtype == "float32"


def test_planes_along_an_axis_of_the_tensor():
    tensor = torch.zeros(5, 2, 4, 8)
    assert group_of(tensor, "block plane token dim") == CacheGroup(
        tuple(plane_of(tensor[:, i], "block token dim") for i in range(2)), 4, "float32"
    )


def test_one_block_size_a_group_and_states_count_their_tokens():
    with pytest.raises(LayoutError, match=r"planes\[1\].block_tokens: expected 4, got 2"):
        group_of([torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)], "block token dim")
    group = group_of(torch.zeros(5, 4, 8), "block token dim", tokens_per_state=16)
    assert (group.block_tokens, group.tokens_per_state, group.planes[0].block_tokens) == (64, 16, 4)


def test_opaque_pages_are_dense_in_whatever_order():
    permuted = [torch.zeros(5, 8, 4, 2).permute(0, 3, 2, 1)]
    group = opaque_group_of(permuted, 4, "a")
    assert (group.planes[0].width, group.planes[0].block_tokens) == (2 * 4 * 8 * 4, 1)
    assert (group.block_tokens, group.opaque) == (4, "a")
    states = [(torch.zeros(5, 3, 8), torch.zeros(5, 2, 8, dtype=torch.int8)) for _ in range(3)]
    group = opaque_group_of(states, 16, "a")
    assert [(plane.rows, plane.width) for plane in group.planes] == [(3, 96), (3, 16)]
    assert group.dtype == "float32+int8"


@pytest.mark.parametrize(
    ("pages", "tag", "message"),
    [
        ([torch.zeros(5, 2)], "", "needs a name"),
        ([], "a", "pages: expected a tensor or a list of at least one, got none"),
        ([[torch.zeros(5, 2)], [3]], "a", r"pages\[1\]\[0\]: expected a tensor or a list, got int"),
        (torch.zeros(5, 3, 4)[..., :2], "a", r"pages: expected dense .*shape \(5, 3, 2\) stride"),
        ([torch.zeros(5, 2), torch.zeros(())], "a", r"pages\[1\]: expected a block axis"),
        ([torch.zeros(5, 0)], "a", r"pages\[0\]: expected a block axis and bytes behind it"),
        ([torch.zeros(5, 2, device="meta")], "a", r"pages\[0\]: expected bytes in memory"),
    ],
)
def test_pages_that_cannot_move_whole_are_refused(pages, tag, message):
    with pytest.raises(LayoutError, match=message):
        opaque_group_of(pages, 4, tag)


def test_blocked_pages_are_a_plane_for_each_array():
    pages = [torch.zeros(5, 4 * 140, dtype=torch.uint8) for _ in range(2)]
    group = blocked_group_of(pages, 4, (128, 4))
    assert [(p.width, p.token_stride, p.block_stride) for p in group.planes] == [
        (128, 128, 560),
        (4, 4, 560),
    ]
    assert group.planes[1].bases == tuple(page.data_ptr() + 4 * 128 for page in pages)
    typed = blocked_group_of(
        torch.zeros(5, 4, 8, dtype=torch.float16), 8, (12, 4), tokens_per_state=2
    )
    assert (typed.dtype, typed.block_tokens, typed.planes[0].block_tokens) == ("float16", 8, 4)
    equal = blocked_group_of(pages, 4, (64, 64))
    assert [plane.rows for plane in equal.planes] == [2, 2]


@pytest.mark.parametrize(
    ("tokens", "widths", "per_state", "message"),
    [
        (4, (128, 13), 1, r"pages\[0\]: expected pages of at least 564 bytes .*got 560 in shape"),
        (4, (), 1, "widths: expected some"),
        (4, (128, 0), 1, r"all >= 1, got \(128, 0\)"),
        (4, (128, 4), 3, "block of 4 tokens: expected whole states, got 3 tokens a state"),
        (4, (128, 4), 0, "got 0 tokens a state"),
    ],
)
def test_blocked_pages_that_do_not_hold_their_arrays_are_refused(
    tokens, widths, per_state, message
):
    with pytest.raises(LayoutError, match=message):
        blocked_group_of(
            [torch.zeros(5, 560, dtype=torch.uint8)], tokens, widths, tokens_per_state=per_state
        )
