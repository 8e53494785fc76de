"""What a block copy must do, whoever executes it. The host, interpreter and GPU test modules import
these tests and say where they run through the ``device`` fixture."""

from __future__ import annotations

import pytest
import torch
from cachekit import (
    BY_NAME,
    LAYOUTS,
    POISON,
    Cache,
    make_cache,
    oracle_chunk,
    poisoned_bytes,
    untouched_outside,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_kernels import CacheGroup, LayoutError, Plane, copy_blocks
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.plane import access_unit, coalesce
from lmcache_kernels.reference import copy_blocks_ref
from lmcache_kernels.views import group_of, plane_of

ids_of = [5, 1, 6]


def settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.current_stream().synchronize()


def group(cache: Cache) -> CacheGroup:
    return group_of(cache.tensors, cache.axes)


def gather(cache: Cache, ids: list[int], device: str, lead: int = 64) -> torch.Tensor:
    """The chunk of these blocks, after checking that nothing around it was written."""
    described = group(cache)
    layout = ChunkLayout.of([described], len(ids) * described.block_tokens)
    whole, chunk = poisoned_bytes(layout.nbytes, device, lead=lead)
    ((dst,),) = layout.planes_at(chunk.data_ptr(), device)
    copy_blocks(dst, range(len(ids)), described.planes[0], ids)
    settle(device)
    assert (whole[:lead] == POISON).all()
    assert (whole[lead + layout.nbytes :] == POISON).all()
    return chunk.cpu()


def scatter(chunk: torch.Tensor, cache: Cache, ids: list[int], device: str) -> None:
    described = group(cache)
    layout = ChunkLayout.of([described], len(ids) * described.block_tokens)
    buffer = chunk.to(device)
    ((src,),) = layout.planes_at(buffer.data_ptr(), device)
    copy_blocks(described.planes[0], ids, src, range(len(ids)))
    settle(device)


def check_round_trip(
    source: Cache, target: Cache, ids: list[int], to: list[int], device: str
) -> None:
    source.fill_random(1)
    chunk = gather(source, ids, device)
    expected = oracle_chunk(source, ids)
    assert torch.equal(chunk, expected)
    before = target.snapshot()
    scatter(chunk, target, to, device)
    assert torch.equal(oracle_chunk(target, to), expected)
    assert untouched_outside(target, before, to)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_gathers_and_scatters_bit_exact(layout, device):
    source = make_cache(layout, device=device)
    target = make_cache(layout, device=device, blocks=9)
    check_round_trip(source, target, ids_of, [8, 0, 3], device)


@pytest.mark.parametrize(
    ("nhd", "hnd"),
    [
        ("kv_first_nhd", "kv_first_hnd"),
        ("kv_first_hnd", "block_first_nhd"),
        ("fused_nhd", "fused_hnd"),
        ("fused_view_of_nhd", "fused_hnd"),
        ("cross_layer", "block_first_hnd"),
    ],
)
def test_fault_a01_heads_and_tokens_are_never_swapped(nhd, hnd, device):
    """The order of the middle axes is what the engine declares, and both orders give one chunk."""
    source = make_cache(BY_NAME[nhd], device=device, blocks=8)
    target = make_cache(BY_NAME[hnd], device=device, blocks=8)
    check_round_trip(source, target, ids_of, [2, 7, 0], device)
    assert torch.equal(gather(target, [2, 7, 0], device), gather(source, ids_of, device))
    assert group(source) != group(target)
    assert (
        ChunkLayout.of([group(source)], 12).fingerprint
        == ChunkLayout.of([group(target)], 12).fingerprint
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_fault_a02_block_first_caches_do_not_write_past_the_pool(dtype, device):
    """The number of blocks is read from the block axis, not from the axis that happens to be second."""
    layout = BY_NAME["block_first_nhd"]
    source = make_cache(layout, blocks=7, dtype=dtype, device=device)
    target = make_cache(layout, blocks=7, dtype=dtype, device=device)
    assert group(target).num_blocks == 7
    check_round_trip(source, target, [6, 2], [0, 6], device)


@pytest.mark.parametrize("name", ["fused_nhd", "fused_hnd", "fused_view_of_nhd"])
def test_fault_a03_fused_content_is_read_by_its_strides(name, device):
    """K and V packed in the content axis: the declared axes and real strides decide."""
    source = make_cache(BY_NAME[name], blocks=8, heads=4, tokens=16, dim=8, device=device)
    target = make_cache(BY_NAME["fused_hnd"], blocks=8, heads=4, tokens=16, dim=8, device=device)
    check_round_trip(source, target, [7, 0], [1, 2], device)


def test_fault_a03_an_unknown_shape_is_refused_with_shape_and_stride(device):
    """No default branch: a tensor that does not fit its axes never gets described."""
    tensor = torch.zeros(2, 3, 4, 5, device=device)
    with pytest.raises(LayoutError, match=r"shape \(2, 3, 4, 5\) stride \(60, 20, 5, 1\)"):
        plane_of(tensor, "kv block token head dim")
    with pytest.raises(LayoutError, match="dense dim"):
        plane_of(tensor.transpose(2, 3), "block token head dim")


DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fault_a17_bytes_are_moved_and_never_converted(dtype, device):
    """All byte values, NaN patterns among them, come back as they were, whatever the dtype."""
    layout = BY_NAME["kv_first_hnd"]
    source = make_cache(layout, dtype=dtype, dim=32, device=device)
    for storage in source.storages:
        count = storage.numel()
        storage.copy_(torch.arange(count, dtype=torch.int64).remainder(256).to(torch.uint8))
    chunk = gather(source, ids_of, device)
    assert set(chunk.tolist()) == set(range(256))
    target = make_cache(BY_NAME["block_first_nhd"], dtype=dtype, dim=32, device=device)
    scatter(chunk, target, [0, 1, 2], device)
    assert torch.equal(oracle_chunk(target, [0, 1, 2]), oracle_chunk(source, ids_of))


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@pytest.mark.parametrize("width", [1, 2, 4, 6, 8, 12, 20, 100])
def test_fault_a19_odd_widths_and_addresses_lose_no_tail(width, shift, device):
    """Row widths that are no multiple of a vector, bases off their alignment."""
    for name in ("latent", "sliced_heads"):
        source = make_cache(BY_NAME[name], dim=width, dtype=torch.uint8, shift=shift, device=device)
        target = make_cache(BY_NAME[name], dim=width, dtype=torch.uint8, shift=0, device=device)
        check_round_trip(source, target, ids_of, [0, 4, 2], device)
        chunk = gather(source, ids_of, device, lead=64 + shift)
        assert torch.equal(chunk, oracle_chunk(source, ids_of))


def test_fault_a09_more_blocks_than_ids_is_an_error_before_anything_moves(device):
    """A request for five blocks with three ids never reads the ids that lie behind them."""
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    described = group(cache)
    layout = ChunkLayout.of([described], 5 * described.block_tokens)
    source = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    ((src,),) = layout.planes_at(source.data_ptr(), device)
    table = [5, 1, 6, 7, 7, 7]
    before = cache.snapshot()
    with pytest.raises(LayoutError, match="got 3 and 5"):
        copy_blocks(described.planes[0], table[:3], src, range(5))
    settle(device)
    assert untouched_outside(cache, before, [])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0, 9], r"dst_ids\[1\].*< 9, got 9"),
        ([-2, 0], r"dst_ids\[0\].*got -2"),
        ([4, 4], "block 4 named twice"),
    ],
)
def test_bad_ids_are_refused_and_nothing_is_written(bad, message, device):
    cache = make_cache(BY_NAME["fused_hnd"], blocks=9, device=device)
    described = group(cache)
    layout = ChunkLayout.of([described], 2 * described.block_tokens)
    source = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    ((src,),) = layout.planes_at(source.data_ptr(), device)
    before = cache.snapshot()
    with pytest.raises(LayoutError, match=message):
        copy_blocks(described.planes[0], bad, src, [0, 1])
    with pytest.raises(LayoutError, match="src_ids"):
        copy_blocks(described.planes[0], [0, 1], src, [0, 2])
    settle(device)
    assert untouched_outside(cache, before, [])


def test_fault_a10_a_gather_may_name_a_block_twice_and_block_zero(device):
    cache = make_cache(BY_NAME["kv_first_nhd"], device=device)
    cache.fill_random(3)
    for ids in ([4, 4], [0, 4]):
        assert torch.equal(gather(cache, ids, device), oracle_chunk(cache, ids))


def test_one_copy_never_reads_and_writes_a_block_of_one_plane(device):
    """Which of both comes first would be undefined: moving blocks around takes two copies."""
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    cache.fill_random(4)
    plane = group(cache).planes[0]
    before = cache.snapshot()
    with pytest.raises(LayoutError, match=r"blocks \[0, 1\] are read and written"):
        copy_blocks(plane, [0, 1], plane, [1, 0])
    settle(device)
    assert untouched_outside(cache, before, [])
    expected = oracle_chunk(cache, [0, 1])
    copy_blocks(plane, [4, 5], plane, [0, 1])
    settle(device)
    assert torch.equal(oracle_chunk(cache, [4, 5]), expected)


def test_ids_are_integers_of_any_kind_and_nothing_else(device):
    cache = make_cache(BY_NAME["kv_first_nhd"], blocks=8, device=device)
    plane = group(cache).planes[0]
    cache.fill_random(4)
    expected = oracle_chunk(cache, [0, 1])
    copy_blocks(plane, torch.tensor([4, 5]), plane, range(2))
    settle(device)
    assert torch.equal(oracle_chunk(cache, [4, 5]), expected)
    with pytest.raises(LayoutError, match="src_ids: expected integers"):
        copy_blocks(plane, [4, 5], plane, [0.0, 1.0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_plain_reference_says_the_same(layout, device):
    """Both write into equally poisoned memory, the code under test first."""
    source = make_cache(layout, device=device)
    source.fill_random(6)
    described = group(source).planes[0]
    written = make_cache(layout, blocks=9, device=device)
    copy_blocks(group(written).planes[0], [8, 0, 3], described, ids_of)
    settle(device)
    # The reference works in host memory: on a GPU it is given the same bytes there.
    origin, expected = make_cache(layout), make_cache(layout, blocks=9)
    for here, there in zip(origin.storages, source.storages, strict=True):
        here.copy_(there)
    copy_blocks_ref(group(expected).planes[0], [8, 0, 3], group(origin).planes[0], ids_of)
    assert all(
        torch.equal(a, b) for a, b in zip(written.snapshot(), expected.snapshot(), strict=True)
    )


def test_no_ids_is_a_no_op(device):
    cache = make_cache(BY_NAME["kv_first_nhd"], device=device)
    plane = group(cache).planes[0]
    before = cache.snapshot()
    copy_blocks(plane, [], plane, [])
    settle(device)
    assert untouched_outside(cache, before, [])


def test_a_bounded_grid_still_moves_everything(device):
    source = make_cache(
        BY_NAME["kv_first_hnd"], blocks=20, tokens=16, heads=4, dim=64, device=device
    )
    target = make_cache(
        BY_NAME["kv_first_nhd"], blocks=20, tokens=16, heads=4, dim=64, device=device
    )
    source.fill_random(5)
    copy_blocks(
        group(target).planes[0],
        range(20),
        group(source).planes[0],
        range(19, -1, -1),
        max_programs=3,
    )
    settle(device)
    assert torch.equal(
        oracle_chunk(target, list(range(20))), oracle_chunk(source, list(range(19, -1, -1)))
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_two_layouts_of_one_shape_exchange_blocks(data, device):
    """Random shapes, paddings, offsets and ids; both sides independent."""
    draw = data.draw
    shape = {
        "layers": draw(st.integers(1, 3), "layers"),
        "tokens": draw(st.integers(1, 5), "tokens"),
        "heads": draw(st.integers(1, 4), "heads"),
        "dim": draw(st.sampled_from([1, 2, 3, 8, 16, 24]), "dim"),
        "dtype": draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]), "dtype"),
    }
    kind = draw(st.sampled_from(["split", "fused", "latent"]), "kind")
    choices = [x for x in LAYOUTS if (x.fused, x.latent) == (kind == "fused", kind == "latent")]
    element = torch.empty(0, dtype=shape["dtype"]).element_size()
    sides = []
    for side in ("source", "target"):
        layout = draw(st.sampled_from(choices), side)
        blocks = draw(st.integers(4, 8), f"{side} blocks")
        shift = draw(st.integers(0, 4), f"{side} shift") * element
        sides.append(make_cache(layout, blocks=blocks, shift=shift, device=device, **shape))
    count = draw(st.integers(1, 4), "count")
    ids = [draw(st.permutations(range(group(side).num_blocks)), "ids")[:count] for side in sides]
    check_round_trip(sides[0], sides[1], ids[0], ids[1], device)


def test_coalescing_and_access_width_of_common_pairs(device):
    """What decides speed: equal layouts become one run a block, and accesses are as wide as can be."""
    shape = {"tokens": 16, "heads": 4, "dim": 64, "device": device}
    nhd = group(make_cache(BY_NAME["kv_first_nhd"], **shape))
    hnd = group(make_cache(BY_NAME["kv_first_hnd"], **shape))
    ((chunk,),) = ChunkLayout.of([nhd], 16).planes_at(1 << 20, device)
    for side in coalesce(chunk, nhd.planes[0]):
        assert (side.block_tokens, side.num_heads, side.width) == (1, 1, 16 * 4 * 64 * 2)
    for side in coalesce(hnd.planes[0], hnd.planes[0]):
        assert (side.block_tokens, side.num_heads) == (1, 1)
    mixed = coalesce(chunk, hnd.planes[0])
    assert (mixed[0].block_tokens, mixed[0].num_heads, mixed[0].width) == (16, 4, 128)
    assert access_unit(chunk, nhd.planes[0]) == 16


def test_planes_of_other_shapes_or_devices_never_mix(device):
    cache = make_cache(BY_NAME["kv_first_nhd"], device=device)
    plane = group(cache).planes[0]
    other = group(make_cache(BY_NAME["kv_first_nhd"], heads=2, device=device)).planes[0]
    with pytest.raises(LayoutError, match="num_heads: destination has 3, source has 2"):
        copy_blocks(plane, [0], other, [0])
    with pytest.raises(LayoutError, match="expected a Plane, got CacheGroup"):
        copy_blocks(group(cache), [0], plane, [1])
    elsewhere = Plane(**{**{n: getattr(plane, n) for n in Plane.__slots__}, "device": "cuda:7"})
    with pytest.raises(LayoutError, match=r"different devices|cuda:7 is not here"):
        copy_blocks(plane, [0], elsewhere, [0])


def test_fault_a07_offsets_past_two_to_the_31(device):
    """One layer of more than 2**31 elements: a 32-bit product of id and stride would wrap."""
    blocks, tokens, dim = 2**15 + 16, 64, 1024
    cache = torch.empty((blocks, tokens, dim), dtype=torch.uint8, device=device)
    ids = [blocks - 1, 0, blocks - 2]
    for seed, block in enumerate(ids):
        pattern = torch.arange(tokens * dim, dtype=torch.int64).mul(seed + 3).remainder(251)
        cache[block].copy_(pattern.to(torch.uint8).view(tokens, dim))
    plane = plane_of(cache, "block token dim")
    chunk = torch.full((3, tokens, dim), POISON, dtype=torch.uint8, device=device)
    copy_blocks(plane_of(chunk, "block token dim"), [0, 1, 2], plane, ids)
    settle(device)
    assert torch.equal(chunk.cpu(), cache[ids].cpu())
    below = blocks - 1 - 2**15  # where a wrapped offset would land
    cache[blocks - 1].fill_(POISON)
    cache[below].fill_(7)
    copy_blocks(plane, [blocks - 1], plane_of(chunk, "block token dim"), [0])
    settle(device)
    assert torch.equal(cache[blocks - 1].cpu(), chunk[0].cpu())
    assert (cache[below] == 7).all()
