"""Every layout of ``layout_table`` gathered and scattered, whoever executes the copy. The host,
interpreter and GPU modules import these tests and say where they run through ``device``."""

from __future__ import annotations

import pytest
import torch
from cachekit import POISON, poisoned_bytes
from layout_table import ROWS
from layoutkit import expected_chunk, make_caches, write_blocks

from lmcache_kernels import LayoutError, copy_blocks, group_of, plane_of
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.pages import pages_per_block, split_ids


def settle(device):
    if device.startswith("cuda"):
        torch.cuda.current_stream().synchronize()


def chunk_planes(group, count, device):
    """A poisoned chunk of ``count`` blocks, with its planes."""
    layout = ChunkLayout.of([group], count * group.block_tokens)
    whole, chunk = poisoned_bytes(layout.nbytes, device)
    (planes,) = layout.planes_at(chunk.data_ptr(), device)
    return whole, chunk, planes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_layout_gathers_and_scatters_bit_exact(row, device):
    ids, to = [5, 1, 6], [8, 0, 3]
    source = make_caches(row, device=device)
    target = make_caches(row, blocks=9, pad=2, device=device)
    source.fill_random(1)
    group = source.group()
    whole, chunk, planes = chunk_planes(group, len(ids), device)
    for dense, plane in zip(planes, group.planes, strict=True):
        copy_blocks(dense, range(len(ids)), plane, ids)
    settle(device)
    on_host = source.on_host()
    assert torch.equal(chunk.cpu(), expected_chunk(on_host, ids))
    assert (whole[:64] == POISON).all()
    assert (whole[64 + chunk.numel() :] == POISON).all()

    expected = target.on_host()
    write_blocks(expected, to, on_host, ids)
    for dense, plane in zip(planes, target.group().planes, strict=True):
        copy_blocks(plane, to, dense, range(len(ids)))
    settle(device)
    for got, wanted in zip(target.storages, expected.storages, strict=True):
        assert torch.equal(got.cpu(), wanted)


def poisoned_slice(shape, device):
    """(whole, inner): random bytes of this shape with poison behind every axis."""
    whole = torch.full([n + 1 for n in shape], POISON, dtype=torch.uint8)
    inner = whole[tuple(slice(n) for n in shape)]
    inner.copy_(torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2)))
    whole = whole.to(device)
    return whole, whole[tuple(slice(n) for n in shape)]


@pytest.mark.parametrize("axes", ["block token head dim", "block head token dim"])
def test_fault_a05_a_scheduler_block_of_several_kernel_pages(axes, device):
    """Ids of blocks of 20 tokens name the pages of 4 tokens that the tensor really has."""
    extent = {"block": 20, "token": 4, "head": 3, "dim": 8}
    _, cache = poisoned_slice([extent[axis] for axis in axes.split()], device)
    group = group_of([cache], axes)
    ratio = pages_per_block(20, group.block_tokens)
    pages = split_ids([3, 0], ratio)
    assert (ratio, pages) == (5, [15, 16, 17, 18, 19, 0, 1, 2, 3, 4])
    _, chunk, (dense,) = chunk_planes(group, len(pages), device)
    assert chunk.numel() == 40 * 3 * 8
    copy_blocks(dense, range(len(pages)), group.planes[0], pages)
    settle(device)
    logical = cache.cpu() if axes == "block token head dim" else cache.cpu().transpose(1, 2)
    tokens = [logical[page, token] for page in pages for token in range(4)]
    assert torch.equal(chunk.cpu(), torch.stack(tokens).view(-1))
    with pytest.raises(LayoutError, match="block of 20 tokens: expected a whole number of pages"):
        pages_per_block(20, 6)


PAGED = {
    "block token dim": [5, 4, 8],
    "block token 1 dim": [5, 4, 1, 8],
    "block 1 token dim": [5, 1, 4, 8],
}
STAGED = {"layer block dim": [3, 8, 8], "layer block 1 dim": [3, 8, 1, 8]}


@pytest.mark.parametrize("staged", STAGED)
@pytest.mark.parametrize("paged", PAGED)
def test_fault_a16_latent_buffers_of_rank_three_and_four(paged, staged, device):
    """A tail of 5 tokens is cut from the token axis, whatever the rank of cache and buffer."""
    tail = 5
    layers = [poisoned_slice(PAGED[paged], device)[1] for _ in range(3)]
    for layer, cache in enumerate(layers):
        cache.add_(layer)
    slots = [*range(4 * 4, 4 * 4 + 4), 1 * 4]  # page 4, then the first token of page 1
    tokens = torch.stack([torch.stack([c.reshape(20, 8)[s] for s in slots]) for c in layers])
    whole = torch.full(STAGED[staged], POISON, dtype=torch.uint8, device=device)
    buffer = plane_of(whole[:, :tail], staged)
    copy_blocks(buffer, range(tail), plane_of(layers, paged).by_token(), slots)
    settle(device)
    assert torch.equal(whole.view(3, 8, 8)[:, :tail].cpu(), tokens.cpu())
    assert (whole[:, tail:] == POISON).all()

    back = [torch.full(PAGED[paged], POISON, dtype=torch.uint8, device=device) for _ in range(3)]
    to = [2, 3, 4, 5, 6]
    copy_blocks(plane_of(back, paged).by_token(), to, buffer, range(tail))
    settle(device)
    got = torch.stack([cache.view(20, 8) for cache in back])
    assert torch.equal(got[:, to].cpu(), tokens.cpu())
    got[:, to] = POISON
    assert (got == POISON).all()
