"""Blocks written into another process's cache: on the same GPU, and on another one over NVLink."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from cachekit import POISON, oracle_chunk
from handover_peer import HandoverPeer, caches_of, describe, groups_of, settle, sleep
from import_graph import ROOT

from lmcache_kernels.errors import LayoutError, PeerGone, TransferTimeout
from lmcache_kernels.transfer import PeerCopy, PeerTarget
from lmcache_kernels.transfer.handover import peer_signals

pytestmark = pytest.mark.gpu

HERE = "cuda:0"
HALF_A_SECOND = 1_000_000_000
"""Cycles, about."""

NHD = [{"layout": "kv_first_nhd", "seed": 1, "blocks": 40}]
HND = [{"layout": "kv_first_hnd", "seed": 2, "blocks": 50}]
PADDED = [{"layout": "padded_blocks", "seed": 3, "blocks": 50}]
HYBRID = [
    {"layout": "block_first_nhd", "seed": 4, "blocks": 40},
    {"layout": "latent", "seed": 5, "layers": 3, "blocks": 11, "dim": 40},
]
HYBRID_THERE = [
    {"layout": "cross_layer", "seed": 6, "blocks": 50},
    {"layout": "latent", "seed": 7, "layers": 3, "blocks": 6, "dim": 40},
]


@pytest.fixture(params=["cuda:0", "cuda:1"])
def there(request):
    """The peer's device."""
    if int(request.param[-1]) >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    return request.param


@pytest.fixture
def peer():
    with HandoverPeer() as found:
        yield found


def own_caches(specs):
    caches = caches_of(specs, HERE)
    settle(HERE)
    return caches


def chunk(cache, ids):
    return oracle_chunk(cache, ids).numpy().tobytes()


@pytest.mark.parametrize(
    ("ours", "theirs", "dst", "src"),
    [
        (NHD, HND, [[8, 0, 3, *range(10, 50)][:40]], [list(range(39, -1, -1))]),
        (NHD, PADDED, [[8, -1, 49]], [[5, 1, 6]]),
        (HYBRID, HYBRID_THERE, [[11, 4], [0, 5, 1]], [[3, 6], [10, 8, 9]]),
    ],
    ids=["head_major", "padded", "several_groups"],
)
def test_blocks_arrive_bit_exact_and_nothing_else_is_touched(peer, there, ours, theirs, dst, src):
    offer = peer.offer(theirs, there)
    own = own_caches(ours)
    for programs in (None, 4):
        with PeerCopy(groups_of(own), offer, describe(theirs), max_programs=programs) as copy:
            for _ in range(2):
                peer.wait(copy.copy(dst, src, after=peer.ready()))
            copy.flush()
    for which, cache in enumerate(own):
        pairs = [pair for pair in zip(dst[which], src[which], strict=True) if pair[0] >= 0]
        to, origin = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        assert peer.read(which, to) == chunk(cache, origin)
        assert peer.untouched(which, to)


def test_engines_that_see_only_their_own_gpu_reach_each_other():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with (
        HandoverPeer(CUDA_VISIBLE_DEVICES=seen[0]) as giver,
        HandoverPeer(CUDA_VISIBLE_DEVICES=seen[1]) as taker,
    ):
        offer = taker.offer(HND, "cuda:0")
        written = giver.give(NHD, offer, HND, [[8, 0, 3]], [[5, 1, 6]], taker.ready())
        taker.wait(written)
        (own,) = caches_of(NHD)
        assert taker.read(0, [8, 0, 3]) == chunk(own, [5, 1, 6])
        assert taker.untouched(0, [8, 0, 3])


def test_a_copy_waits_for_what_the_peer_had_queued(peer, there):
    """The peer overwrites all of its blocks after half a second; the copy comes after that."""
    offer = peer.offer(HND, there)
    (own,) = own_caches(NHD)
    with PeerCopy(groups_of([own]), offer, describe(HND)) as copy:
        peer.wait(copy.copy([[1]], [[2]], after=peer.ready()))
        ready = peer.ready(HALF_A_SECOND, POISON)
        peer.wait(copy.copy([[8, 0]], [[5, 1]], after=ready))
    assert peer.read(0, [8, 0]) == chunk(own, [5, 1])
    assert set(peer.read(0, [1, 2])) == {POISON}


def test_a_copy_reads_what_was_queued_before_it_and_the_peer_waits_for_the_copy(peer, there):
    offer = peer.offer(HND, there)
    (own,) = own_caches(NHD)
    with PeerCopy(groups_of([own]), offer, describe(HND)) as copy:
        own.fill(8)  # loads that kernel, which may wait for the device
        peer.wait(copy.copy([[1]], [[2]]))
        sleep(HERE, HALF_A_SECOND)
        own.fill(7)
        written = copy.copy([[8, 0]], [[5, 1]])
        with pytest.raises(TransferTimeout, match="not done within"):
            copy.flush(0.0)
        peer.wait(written)
        assert set(peer.read(0, [8, 0])) == {7}
        copy.flush(0.0)


def test_bad_block_ids_move_no_byte(peer, there):
    offer = peer.offer(HND, there)
    (own,) = own_caches(NHD)
    with PeerCopy(groups_of([own]), offer, describe(HND)) as copy:
        for dst, src in (([50], [0]), ([0], [40]), ([1, 1], [2, 3])):
            with pytest.raises(LayoutError):
                copy.copy([dst], [src])
        assert peer.untouched(0, [])


def killing(monkeypatch, victim):
    """Kill the process when its event has been looked at twice; how often it was."""
    looks, opened = [], peer_signals.import_event

    class Watched:
        def __init__(self, event):
            self._event = event

        def query(self):
            looks.append(1)
            if len(looks) == 2:
                victim.kill()
            return self._event.query()

    monkeypatch.setattr(peer_signals, "import_event", lambda *how: Watched(opened(*how)))
    return looks


def test_a_peer_that_is_killed_before_its_blocks_are_free_ends_the_copy(peer, there, monkeypatch):
    offer = peer.offer(HND, there)
    (own,) = own_caches(NHD)
    before = chunk(own, [5])
    copy = PeerCopy(groups_of([own]), offer, describe(HND))
    ready = peer.ready(20 * HALF_A_SECOND)
    looks = killing(monkeypatch, peer)
    with pytest.raises(PeerGone, match="its process has ended"):
        copy.copy([[8]], [[5]], after=ready)
    assert len(looks) >= 2
    copy.flush(1.0)
    copy.close()
    assert chunk(own, [5]) == before
    with pytest.raises(PeerGone):
        PeerCopy(groups_of([own]), offer, describe(HND))
    assert torch.ones(3, device=HERE).sum().item() == 3, "this process's GPU works on"


def test_a_giver_that_is_killed_before_it_wrote_ends_the_wait(peer, there, monkeypatch):
    (pages,) = own_caches(HND)
    with PeerTarget({str(i): tensor for i, tensor in enumerate(pages.tensors)}) as target:
        written = peer.give(
            NHD, target.offer, HND, [[8]], [[5]], target.ready(), there, 20 * HALF_A_SECOND
        )
        looks = killing(monkeypatch, peer)
        with pytest.raises(PeerGone, match="its process has ended"):
            target.wait(written)
        assert len(looks) >= 2
    assert torch.ones(3, device=HERE).sum().item() == 3, "this process's GPU works on"


def test_closing_waits_for_what_is_queued(peer, there):
    offer = peer.offer(HND, there)
    (own,) = own_caches(NHD)
    copy = PeerCopy(groups_of([own]), offer, describe(HND))
    sleep(HERE, HALF_A_SECOND)
    copy.copy([[8]], [[5]])
    copy.close()
    copy.close()
    settle(HERE)
    assert peer.read(0, [8]) == chunk(own, [5])


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("transfer.py", "2 chunks stored and loaded on cuda:0, every byte the same"),
        ("handover.py", r"decode on cuda:\d: every byte is right\nprefill on cuda:0 handed over"),
    ],
)
def test_examples_run_on_gpus(name, printed):
    done = subprocess.run(
        [sys.executable, f"examples/{name}"], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(printed, done.stdout), done.stdout
