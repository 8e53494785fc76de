"""Blocks of one GPU copied to another GPU of the same process."""

from __future__ import annotations

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside
from copy_suite import group, settle

from lmcache_kernels import LayoutError
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.copying import PreparedCopy, prepare_copy
from lmcache_kernels.fingerprint import unsigned
from lmcache_kernels.reference import fingerprint_ref

HERE, THERE = "cuda:0", "cuda:1"


@pytest.fixture(scope="module", autouse=True)
def _two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


pytestmark = pytest.mark.gpu


def wait_for_both():
    for device in (HERE, THERE):
        torch.cuda.current_stream(device).synchronize()


@pytest.mark.parametrize("run_on", [None, HERE, THERE])
@pytest.mark.parametrize("programs", [None, 4])
@pytest.mark.parametrize("names", [("kv_first_nhd", "kv_first_hnd"), ("latent", "latent")])
def test_blocks_arrive_bit_exact_pushed_or_pulled(names, programs, run_on):
    source = make_cache(BY_NAME[names[0]], blocks=40, device=HERE)
    target = make_cache(BY_NAME[names[1]], blocks=50, device=THERE)
    source.fill_random(1)
    before = target.snapshot()
    wait_for_both()
    copy = prepare_copy(
        group(target).planes[0], group(source).planes[0], max_programs=programs, run_on=run_on
    )
    assert copy.device == (run_on or HERE)
    for ids, to in (([5, 1, 6], [8, 0, 3]), (list(range(20, 40)), list(range(40, 20, -1)))):
        copy.copy(to, ids)
        settle_on(copy.device)
        assert torch.equal(oracle_chunk(target, to), oracle_chunk(source, ids))
    assert untouched_outside(target, before, [8, 0, 3, *range(21, 41)])


def settle_on(device):
    with torch.cuda.device(device):
        settle(device)


def test_a_chunk_on_another_gpu_has_its_fingerprint():
    source = make_cache(BY_NAME["kv_first_hnd"], device=HERE)
    source.fill_random(2)
    layout = ChunkLayout.of([group(source)], 8)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8, device=THERE)
    wait_for_both()
    ((chunk,),) = layout.planes_at(memory.data_ptr(), THERE)
    copy = PreparedCopy([[(chunk, group(source).planes[0])]], chunk_side="dst")
    sums = torch.zeros((1, copy.plan.rows), dtype=torch.int64, device=copy.device)
    copy.copy([0, 1], [6, 2], sums=sums)
    settle_on(copy.device)
    assert unsigned(sums[0].tolist()) == fingerprint_ref(memory.cpu().numpy().tobytes())


def test_only_a_device_that_holds_a_side_can_copy():
    source = make_cache(BY_NAME["latent"], device=HERE)
    target = make_cache(BY_NAME["latent"], device=THERE)
    planes = group(target).planes[0], group(source).planes[0]
    with pytest.raises(LayoutError, match="run_on: expected cuda:1 or cuda:0, got cpu"):
        prepare_copy(*planes, run_on="cpu")
