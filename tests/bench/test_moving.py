"""A workload as moves of the library: where the bytes lie, and that a wrong one is seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench import moving
from bench.moving import GatedDevice, Transfer, host_slots, open_mover
from bench.timing import HostClock
from bench.trials import Trial
from bench.workload import set_up, set_up_both
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.moving.moves import Over
from lmcache_kernels.views import group_of

MEMORY = partial(host_slots, "cpu")


def transfer_of(work):
    return Transfer.of(open_mover(work, {}, HostClock()), work)


@pytest.mark.parametrize(("nbytes", "distance"), [(3584, 4096), (3585, 8192), (1, 4096)])
def test_slots_have_a_header_each_and_begin_on_pages(nbytes, distance):
    slots = host_slots("cpu", 3, nbytes)
    assert slots.shape == (3, nbytes)
    assert slots.stride() == (distance, 1)
    assert slots.storage_offset() == HEADER_BYTES
    assert slots.untyped_storage().nbytes() == 3 * distance


def test_every_chunk_goes_with_its_blocks(tiny_trial):
    work = set_up(tiny_trial, "cpu", MEMORY)
    moves = transfer_of(work).moves
    assert [move.address for move in moves] == [row.data_ptr() for row in work.chunk]
    assert [block for move in moves for block in move.blocks[0]] == work.ids
    assert {len(move.blocks[0]) for move in moves} == {work.blocks_per_chunk}


def test_what_was_moved_is_exact_and_one_wrong_byte_is_not(tiny_trial):
    work = set_up(tiny_trial, "cpu", MEMORY)
    work.poison()
    ours = transfer_of(work)
    assert not work.is_exact()
    assert ours.is_exact()
    moved = ours.queue(None)
    work.chunk[-1, -1] ^= 1
    assert not ours.holds(moved)


def test_right_bytes_with_a_wrong_fingerprint_are_not_exact(tiny_trial):
    work = set_up(tiny_trial, "cpu", MEMORY)
    ours = transfer_of(work)
    moved = ours.queue(None)
    assert ours.holds(moved)
    (first,), *others = moved.fingerprints()
    assert not ours.holds(replace(moved, fingerprints=lambda: [(first ^ 1,), *others]))


def test_both_ways_share_a_cache_and_no_block(tiny_case):
    out, into = set_up_both(tiny_case, 1, "cpu", MEMORY)
    assert out.caches is into.caches
    assert sorted(out.ids + into.ids) == list(range(out.pool.num_blocks))
    assert (out.gathers, into.gathers) == (True, False)
    out.poison()
    mover = open_mover(out, {}, HostClock())
    assert all(Transfer.of(mover, work).is_exact() for work in (out, into))


def test_settings_reach_the_mover_of_a_gpu(tiny_trial, monkeypatch):
    seen = []
    monkeypatch.setattr(moving, "GatedMover", lambda *given, **named: seen.append((given, named)))
    work = replace(set_up(tiny_trial, "cpu", MEMORY), device="cuda:0")
    open_mover(work, {"max_programs": 4}, HostClock())
    (((groups, layout), named),) = seen
    assert groups == [group_of(work.caches, tiny_trial.case.axes)]
    assert layout == ChunkLayout.of(groups, tiny_trial.chunk_tokens)
    assert isinstance(named.pop("device"), GatedDevice)
    assert named == {"max_programs": 4}


def test_a_transfer_that_never_ends_is_an_error(monkeypatch):
    class Stuck(Over):
        def wait(self, timeout):
            return False

    with pytest.raises(RuntimeError, match="not done after"):
        moving.finish(Stuck())


def test_chunks_of_fewer_tokens(tiny_case):
    tokens = 2 * tiny_case.block_tokens
    trial = Trial(tiny_case, "gather", 4 * tiny_case.block_bytes, chunk_tokens=tokens)
    work = set_up(trial, "cpu", MEMORY)
    assert (work.blocks_per_chunk, len(work.chunk)) == (2, 2)
    assert transfer_of(work).is_exact()
    assert torch.unique(work.chunk).numel() > 1
