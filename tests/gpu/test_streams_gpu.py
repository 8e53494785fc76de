"""Copies that are queued behind work of the device: what they read stays theirs until they ran."""

from __future__ import annotations

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk
from copy_suite import group

from lmcache_kernels.call_ring import WORDS
from lmcache_kernels.copying import prepare_copy

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
HALF_A_SECOND = 1_000_000_000
"""Cycles, about."""


def caches(blocks):
    source = make_cache(BY_NAME["latent"], layers=1, dim=8, blocks=blocks, device=DEVICE)
    target = make_cache(BY_NAME["latent"], layers=1, dim=8, blocks=blocks, device=DEVICE)
    source.fill_random(1)
    torch.cuda.current_stream().synchronize()
    return source, target, prepare_copy(group(target).planes[0], group(source).planes[0])


def same(target, source):
    """Bit by bit: among random bytes are NaN, which do not equal themselves."""
    return torch.equal(target.view(torch.int16), source.view(torch.int16))


@pytest.mark.parametrize("count", [10, 100])
def test_many_copies_in_flight_keep_their_ids(count):
    """More of them than a ring holds, all behind one long kernel."""
    copies = 2 * WORDS // (2 * count)
    source, target, prepared = caches(copies * count)
    order = torch.randperm(copies * count, generator=torch.Generator().manual_seed(1)).tolist()
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_A_SECOND)
        for copy in range(copies):
            ids = order[copy * count : (copy + 1) * count]
            prepared.copy(range(copy * count, (copy + 1) * count), ids)
    stream.synchronize()
    assert same(target.tensors[0].cpu(), source.tensors[0].cpu()[order])


def test_one_copy_of_more_ids_than_a_ring_holds():
    source, target, prepared = caches(2 * WORDS)
    order = torch.randperm(2 * WORDS, generator=torch.Generator().manual_seed(2)).tolist()
    prepared.copy(range(2 * WORDS), order)
    torch.cuda.current_stream().synchronize()
    assert same(target.tensors[0].cpu(), source.tensors[0].cpu()[order])


@pytest.mark.parametrize("count", [10, 100])
def test_a_handle_may_go_while_its_copies_are_queued(count):
    source, target, prepared = caches(count)
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_A_SECOND)
        prepared.copy(range(count), range(count - 1, -1, -1))
    del prepared
    # Whoever gets the memory of its tables writes it at once.
    for _ in range(200):
        torch.full((64,), -1, dtype=torch.int64, device=DEVICE)
    stream.synchronize()
    assert torch.equal(
        oracle_chunk(target, list(range(count))).cpu().view(count, -1).flip(0),
        oracle_chunk(source, list(range(count))).cpu().view(count, -1),
    )


def test_one_handle_serves_two_streams_in_turn():
    """Also a stream that never saw the handle being made."""
    source, target, prepared = caches(400)
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            first = turn * 20
            prepared.copy(range(first, first + 20), range(399 - first, 379 - first, -1))
    for stream in streams:
        stream.synchronize()
    assert same(target.tensors[0].cpu(), source.tensors[0].cpu().flip(0))


def test_a_copy_waits_for_what_its_stream_has_queued():
    """The source is written by work in front of the copy."""
    source, target, prepared = caches(100)
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_A_SECOND)
        source.tensors[0].fill_(7)
        prepared.copy(range(100), range(100))
    stream.synchronize()
    assert (target.tensors[0] == 7).all()
