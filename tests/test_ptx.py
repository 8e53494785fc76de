"""What the compiler makes of the kernel, read from its PTX; needs no GPU."""

from __future__ import annotations

import os
import re
from functools import cache

import pytest
import triton
from cachekit import BY_NAME, LAYOUTS, make_cache
from layout_table import ROWS
from layoutkit import make_caches
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.copy_config import choose_config
from lmcache_kernels.copy_kernel import block_copy_kernel
from lmcache_kernels.copy_plan import CopyPlan
from lmcache_kernels.launching import constants_of
from lmcache_kernels.views import group_of

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {"call": "*i32", "legs": "*i64", "rows": "*i64", "sums": "*i64"}
TYPES |= {"shift": "i64", "total_at": "i64"}
ACCESS = {16: ".v4.b32", 8: ".v2.b32", 4: ".b32", 2: ".b16", 1: ".b8"}


@cache
def ptx(constants: tuple[tuple[str, object], ...], num_warps: int) -> str:
    fixed = dict(constants)
    signature = {
        name: TYPES.get(name, "constexpr" if name in fixed else "i32")
        for name in block_copy_kernel.arg_names
    }
    source = ASTSource(block_copy_kernel, signature, fixed)
    text = triton.compile(source, target=HOPPER, options={"num_warps": num_warps}).asm["ptx"]
    return str(text)


def constants(plan: CopyPlan, *, max_programs=None, fingerprint=0, staged=False, inline=False):
    """The constants a copy by this plan is compiled for, and its warps."""
    leg = max(plan.legs, key=lambda leg: leg.dst.rows * leg.dst.block_bytes)
    config = choose_config(leg.dst, plan.unit, max_programs)
    found = constants_of(
        leg_slots=1 << (len(plan.legs) - 1).bit_length(),
        unit=plan.unit,
        config=config,
        fingerprint=fingerprint,
        staged=staged,
        writes=True,
        inline=inline,
    )
    return tuple(found.items()), config.num_warps


def plans(group, tokens):
    """Gather from these planes and scatter to them."""
    (chunk,) = ChunkLayout.of([group], tokens).planes_at(1 << 20, "cpu")
    pairs = list(zip(chunk, group.planes, strict=True))
    return [CopyPlan.of([pairs], None), CopyPlan.of([[pair[::-1] for pair in pairs]], None)]


def check_accesses(text: str, unit: int) -> None:
    stores = re.findall(r"st\.global(?:\.L\w+::\w+)*(\.v\d)?(\.b\d+)", text)
    loads = re.findall(r"ld\.global(?:\.L\w+::\w+)*(\.v\d)?(\.b\d+)", text)
    # Sums of fingerprints and what becomes of them are the only words of 64 bits.
    stores = [store for store in stores if store != ("", ".b64")]
    assert stores
    assert {"".join(store) for store in stores} == {ACCESS[unit]}
    # Ids and tables are read too, but what is stored was loaded in the same way.
    assert ["".join(load) for load in loads].count(ACCESS[unit]) >= len(stores)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_layout_is_accessed_in_whole_units(row):
    for plan in plans(make_caches(row).group(), 3 * make_caches(row).group().block_tokens):
        check_accesses(ptx(*constants(plan)), plan.unit)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_caches_of_real_models_are_accessed_by_16_bytes(layout):
    cache_ = make_cache(layout, tokens=16, heads=8, dim=128)
    for plan in plans(group_of(cache_.tensors, cache_.axes), 32):
        if layout.name != "padded_dim":  # an odd row that real models do not have
            assert plan.unit == 16
        check_accesses(ptx(*constants(plan)), plan.unit)


@pytest.mark.parametrize(
    "mode",
    [
        {"max_programs": 16},
        {"inline": True},
        {"fingerprint": 1},
        {"fingerprint": 2, "inline": True},
        {"fingerprint": 2, "max_programs": 16},
        {"fingerprint": 1, "staged": True, "inline": True},
        {"fingerprint": 2, "staged": True, "inline": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["kv_first_nhd", "kv_first_hnd", "latent"])
def test_every_mode_accesses_by_16_bytes(name, mode):
    cache_ = make_cache(BY_NAME[name], tokens=16, heads=8, dim=128)
    for plan in plans(group_of(cache_.tensors, cache_.axes), 32):
        check_accesses(ptx(*constants(plan, **mode)), 16)


@pytest.mark.parametrize("mode", [{"max_programs": 16}, {"staged": True}], ids=str)
@pytest.mark.parametrize("fingerprint", [1, 2])
def test_sums_are_zeroed_only_when_every_thread_has_loaded_them(mode, fingerprint):
    """Where there are more threads than rows, several load the same, and one of them zeroes it."""
    cache_ = make_cache(BY_NAME["kv_first_nhd"], tokens=16, heads=8, dim=128)
    for plan in plans(group_of(cache_.tensors, cache_.axes), 32):
        text = ptx(*constants(plan, fingerprint=fingerprint, **mode))
        last_load = text.rindex("ld.global.cg")
        between = text[last_load : text.index("st.global.b64", last_load)]
        assert "bar.sync" in between or "bar.warp.sync" in between


def test_one_binary_serves_all_strides_and_sizes_of_a_unit():
    """Nothing of a cache but the width of an access and the shape of a tile is compiled in."""
    found = set()
    for name in ("kv_first_nhd", "block_first_nhd", "cross_layer", "padded_blocks"):
        for layers, blocks in ((1, 5), (3, 64)):
            cache_ = make_cache(
                BY_NAME[name], layers=layers, blocks=blocks, tokens=16, heads=8, dim=128
            )
            found |= {constants(plan) for plan in plans(group_of(cache_.tensors, cache_.axes), 64)}
    assert len(found) == 1


def test_no_argument_is_specialised():
    """Triton would compile again for 1, for multiples of 16 and for aligned pointers."""
    cache_ = make_cache(BY_NAME["latent"])
    fixed = dict(constants(plans(group_of(cache_.tensors, cache_.axes), 16)[0])[0])
    for param in block_copy_kernel.params:
        if param.name not in fixed:
            assert param.do_not_specialize or param.do_not_specialize_on_alignment, param.name
