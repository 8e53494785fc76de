"""Blocks written into the cache of another real process, in host memory."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk
from handover_peer import HandoverPeer, caches_of, describe, groups_of

from lmcache_kernels import group_of, opaque_group_of
from lmcache_kernels.errors import Closed, LayoutError, PeerGone, RemoteProtocolError
from lmcache_kernels.transfer import PeerCopy, PeerTarget
from lmcache_kernels.transfer.memory.arena import SHM_DIRECTORY, sweep_stale_segments
from lmcache_kernels.transfer.sharing.descriptors import decode

HND = [{"layout": "kv_first_hnd", "seed": 1, "blocks": 9}]
NHD = [{"layout": "kv_first_nhd", "seed": 2, "blocks": 7}]
FUSED = [{"layout": "fused_nhd", "seed": 3, "blocks": 8, "dim": 4}]
HYBRID = [
    {"layout": "block_first_nhd", "seed": 4, "blocks": 7},
    {"layout": "latent", "seed": 5, "layers": 3, "blocks": 11, "dim": 40},
]
HYBRID_THERE = [
    {"layout": "block_first_hnd", "seed": 6, "blocks": 12},
    {"layout": "latent", "seed": 7, "layers": 3, "blocks": 6, "dim": 40},
]


@pytest.fixture(scope="module")
def peer():
    with HandoverPeer() as found:
        yield found


def chunk(cache, ids):
    return oracle_chunk(cache, ids).numpy().tobytes()


def mapped():
    """Segments that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return set(re.findall(r"lmcache_kernels_[0-9a-f]{32}", maps.read()))


def left(names):
    """Which of these segments are still there, after those of dead processes were swept."""
    sweep_stale_segments()
    return {name for name in names if (SHM_DIRECTORY / name).exists()}


def segments_of(offer):
    return {offer[:48].decode(), *(one.share.segment for one in decode(offer[48:]))}


@pytest.mark.parametrize(
    ("here", "there", "dst", "src"),
    [
        (NHD, HND, [[8, 0, 3]], [[5, 1, 6]]),
        (HND, NHD, [[2, 6, 5, 4]], [[8, 7, 1, 0]]),
        (HYBRID, HYBRID_THERE, [[11, 4], [0, 5, 1]], [[3, 6], [10, 8, 9]]),
        ([{**NHD[0], "layout": "cross_layer"}], HND, [list(range(7))], [list(range(6, -1, -1))]),
    ],
    ids=["to_head_major", "to_token_major", "several_groups", "all_layers_in_one_tensor"],
)
def test_blocks_arrive_bit_exact_and_nothing_else_is_touched(peer, here, there, dst, src):
    offer = peer.offer(there)
    own = caches_of(here)
    with PeerCopy(groups_of(own), offer, describe(there)) as copy:
        peer.wait(copy.copy(dst, src, after=peer.ready()))
        copy.flush()
    for which, cache in enumerate(own):
        assert peer.read(which, dst[which]) == chunk(cache, src[which])
        assert peer.untouched(which, dst[which])


def test_k_and_v_apart_become_one_tensor_and_the_other_way_round(peer):
    """The axes say that the two halves of the fused axis are K and V."""
    for here, there in ((NHD, [{**FUSED[0], "dim": 8}]), ([{**FUSED[0], "dim": 8}], NHD)):
        offer = peer.offer(there)
        (own,) = caches_of(here)

        def described(tensors, fused):
            if fused:
                return [group_of(tensors, "block token head (kv dim)", kv=2)]
            return [group_of(tensors, "kv block token head dim")]

        ours = described(own.tensors, here is not NHD)
        fused_there = there is not NHD
        with PeerCopy(ours, offer, lambda tensors, f=fused_there: described(tensors, f)) as copy:
            copy.copy([[4, 2]], [[1, 5]])
        assert peer.untouched(0, [4, 2])
        got = torch.frombuffer(bytearray(peer.read(0, [4, 2])), dtype=torch.float16)
        want = torch.frombuffer(bytearray(chunk(own, [1, 5])), dtype=torch.float16)
        apart, fused = (got, want) if here is not NHD else (want, got)
        apart, fused = apart.view(2, 2, 2, 4, 3, 8), fused.view(2, 2, 4, 3, 2, 8)
        assert torch.equal(
            apart.movedim(1, -2).view(torch.int16), fused.view(torch.int16)
        )  # layer, block, token, head, kv, dim


def test_absent_destinations_are_left_out_and_an_empty_copy_is_fine(peer):
    offer = peer.offer(HND)
    (own,) = caches_of(NHD)
    with PeerCopy(groups_of([own]), offer, describe(HND)) as copy:
        peer.wait(copy.copy([[4, -1, 6]], [[0, 1, 2]]))
        peer.wait(copy.copy([[]], [[]]))
    assert peer.read(0, [4, 6]) == chunk(own, [0, 2])
    assert peer.untouched(0, [4, 6])


def test_opaque_pages_move_between_caches_of_one_format(peer):
    there = [{**HND[0], "layout": "block_first_hnd"}]
    offer = peer.offer(there)
    (own,) = caches_of([{**there[0], "seed": 9}])

    def pages(tensors, tag="a page format"):
        return [opaque_group_of(tensors, 4, tag)]

    with pytest.raises(LayoutError, match=r"groups\[0\].opaque: expected 'a page format' as here"):
        PeerCopy(pages(own.tensors), offer, lambda tensors: pages(tensors, "another"))
    with PeerCopy(pages(own.tensors), offer, pages) as copy:
        copy.copy([[4, 0]], [[1, 8]])
    assert peer.read(0, [4, 0]) == chunk(own, [1, 8])
    assert peer.untouched(0, [4, 0])


def local(**changed):
    cache = make_cache(BY_NAME["kv_first_nhd"], **changed)
    return [group_of(cache.tensors, cache.axes)], cache


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"dtype": torch.bfloat16},
            r"groups\[0\].dtype: expected 'bfloat16' as here, got 'float16'",
        ),
        ({"tokens": 8}, r"groups\[0\].block_tokens: expected 8 as here, got 4"),
        ({"heads": 2}, "planes differ in num_heads: destination has 3, source has 2"),
        ({"dim": 16}, "planes differ in width: destination has 16, source has 32"),
        ({"layers": 3}, "planes differ in rows: destination has 4, source has 6"),
    ],
)
def test_caches_that_do_not_fit_are_refused_before_a_byte_moves(peer, changed, message):
    offer = peer.offer(HND)
    groups, _ = local(**changed)
    with pytest.raises(LayoutError, match=message):
        PeerCopy(groups, offer, describe(HND))
    assert peer.untouched(0, [])


def test_what_describe_returns_is_checked_and_the_memory_let_go(peer):
    offer = peer.offer(HND)
    groups, _cache = local()
    seen, before = [], mapped()

    def two(tensors):
        seen.append([tuple(tensor.shape) for tensor in tensors])
        return describe(HND)(tensors) * 2

    for wrong, message in (
        (two, "the peer's groups: expected 1 as here, got 2"),
        (lambda tensors: [tensors[0]], r"groups\[0\]: expected a CacheGroup, got Tensor"),
        (
            lambda tensors: [group_of(tensors[0], "kv block head token dim")],
            "planes differ in rows",
        ),
        (lambda tensors: [group_of(tensors, "block token head dim")], "expected 4 axes"),
    ):
        with pytest.raises(LayoutError, match=message):
            PeerCopy(groups, offer, wrong)
        assert mapped() <= before
    assert seen == [[(2, 9, 3, 4, 8)] * 2]
    with pytest.raises(ZeroDivisionError):
        PeerCopy(groups, offer, lambda tensors: 1 // 0)
    assert mapped() <= before


def test_groups_on_several_devices_or_none_are_refused():
    groups, _cache = local()
    (plane,) = groups[0].planes
    with pytest.raises(LayoutError, match="groups: expected one device, got no group"):
        PeerCopy([], b"", lambda tensors: [])
    elsewhere = type(groups[0])(
        (type(plane)(*[*_fields(plane)[:-3], "cuda:0", 1, 0]),), 4, "float16"
    )
    with pytest.raises(LayoutError, match="groups: expected one device, got cpu, cuda:0"):
        PeerCopy([*groups, elsewhere], b"", lambda tensors: [])


def _fields(plane):
    return [getattr(plane, name) for name in plane.__dataclass_fields__]


def test_memory_of_another_kind_is_refused_before_it_is_opened(peer):
    offer = peer.offer(HND)
    groups, _cache = local()
    (plane,) = groups[0].planes
    on_gpu = type(plane)(*[*_fields(plane)[:-3], "cuda:0", 1, 0])
    with pytest.raises(LayoutError, match="expected memory of cuda as here, got cpu"):
        PeerCopy([type(groups[0])((on_gpu,), 4, "float16")], offer, describe(HND))


@pytest.mark.parametrize(
    ("dst", "src", "message"),
    [
        ([[9]], [[0]], r"dst_ids\[0\]: expected -1 <= id < 9, got 9"),
        ([[0]], [[7]], r"src_ids\[0\]: expected 0 <= id < 7, got 7"),
        ([[3, 3]], [[0, 1]], "block 3 named twice"),
        ([[3, 4]], [[0]], "expected as many destination as source blocks"),
        ([[3], [4]], [[0], [1]], "expected lists for 1 groups, got 2"),
        ([[3]], [], "expected lists for 1 groups, got 0"),
        ([["3"]], [[0]], "expected integers"),
    ],
)
def test_bad_block_ids_move_no_byte(peer, dst, src, message):
    offer = peer.offer(HND)
    groups, _cache = local()
    with PeerCopy(groups, offer, describe(HND)) as copy:
        with pytest.raises(LayoutError, match=message):
            copy.copy(dst, src)
        assert peer.untouched(0, [])
        peer.wait(copy.copy([[3]], [[0]]))


def test_many_threads_copy_at_once(peer):
    offer = peer.offer([{**HND[0], "blocks": 48}])
    (own,) = caches_of([{**NHD[0], "blocks": 48}])
    failed = []

    def work(first):
        try:
            for block in range(first, 48, 6):
                copy.copy([[47 - block]], [[block]])
        except BaseException as error:
            failed.append(error)

    with PeerCopy(groups_of([own]), offer, describe([{**HND[0], "blocks": 48}])) as copy:
        threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert failed == []
    assert peer.read(0, list(range(48))) == chunk(own, list(range(47, -1, -1)))


def test_one_target_takes_blocks_from_several_processes():
    """Two ends here, one there; and closing one leaves the other whole."""
    with HandoverPeer() as receiver:
        offer = receiver.offer(HND)
        (own,) = caches_of(NHD)
        first = PeerCopy(groups_of([own]), offer, describe(HND))
        second = PeerCopy(groups_of([own]), offer, describe(HND))
        first.copy([[0]], [[1]])
        first.close()
        receiver.wait(second.copy([[5]], [[2]]))
        second.close()
        assert receiver.read(0, [0, 5]) == chunk(own, [1, 2])


# --- ends that go ---------------------------------------------------------------------------------


def test_an_offer_of_a_process_that_was_killed_is_refused():
    before = mapped()
    with HandoverPeer() as gone:
        offer = gone.offer(HND)
        gone.kill()
    groups, _cache = local()
    with pytest.raises(PeerGone, match="its process has ended"):
        PeerCopy(groups, offer, describe(HND))
    assert mapped() <= before
    assert left(segments_of(offer)) == set()


def test_copying_into_a_process_that_was_killed_says_so_and_closing_still_works():
    before = mapped()
    groups, _cache = local()
    with HandoverPeer() as gone:
        offer = gone.offer(HND)
        copy = PeerCopy(groups, offer, describe(HND))
        ready = gone.ready()
        gone.wait(copy.copy([[0]], [[1]], after=ready))
        gone.kill()
    for after in (None, ready):
        with pytest.raises(PeerGone, match="its process has ended"):
            copy.copy([[0]], [[1]], after=after)
    used = mapped() - before
    copy.flush()
    copy.close()
    copy.close()
    assert segments_of(offer) - {offer[:48].decode()} < used
    assert mapped() <= before
    assert left(used | segments_of(offer)) == set()


def test_a_closed_target_takes_nothing_more_and_is_let_go():
    groups, _cache = local()
    with HandoverPeer() as receiver:
        offer = receiver.offer(HND)
        with PeerCopy(groups, offer, describe(HND)) as copy:
            copy.copy([[0]], [[1]])
            assert left(segments_of(offer)) == segments_of(offer)
            receiver.close()
            receiver.close()
            with pytest.raises(PeerGone, match="or closed its end"):
                copy.copy([[0]], [[1]])
            with pytest.raises(Closed, match="the peer target is closed"):
                receiver.ready()
        receiver.finish()
    assert left(segments_of(offer)) == set()


def test_a_closed_copy_refuses_and_nothing_of_it_stays(peer):
    before = mapped()
    groups, _cache = local()
    copy = PeerCopy(groups, peer.offer(HND), describe(HND))
    used = mapped() - before
    assert used
    copy.close()
    copy.close()
    assert mapped() <= before
    with pytest.raises(Closed, match="the peer copy is closed"):
        copy.copy([[0]], [[1]])
    copy.flush()


def test_both_ends_in_one_process_work_in_host_memory():
    (there,) = caches_of(HND)
    (own,) = caches_of(NHD)
    with PeerTarget({str(i): tensor for i, tensor in enumerate(there.tensors)}) as target:
        with PeerCopy(groups_of([own]), target.offer, describe(HND)) as copy:
            target.wait(copy.copy([[4]], [[2]], after=target.ready()))
        assert chunk(there, [4]) == chunk(own, [2])


# --- what is no offer and no signal ---------------------------------------------------------------


def test_offers_and_signals_that_are_none_are_refused(peer):
    groups, _cache = local()
    offer = peer.offer(HND)
    for bad in (
        b"",
        offer[:40],
        offer[:48],
        offer[:-1],
        offer[48:],
        b"lmcache_kernels_../../../../../../../etc/passwd0" + offer[48:],
        b"\xff" * 200,
    ):
        with pytest.raises(RemoteProtocolError):
            PeerCopy(groups, bad, describe(HND))
    with PeerCopy(groups, offer, describe(HND)) as copy:
        for bad in (b"", b"x" * 48, peer.ready() + b"x" * 64, peer.ready()[:-1]):
            with pytest.raises(RemoteProtocolError):
                copy.copy([[0]], [[1]], after=bad)
    assert peer.untouched(0, [])
    with pytest.raises(RemoteProtocolError):
        peer.wait(b"")


@pytest.mark.parametrize("caches", [{}, {"layer": [1]}, {"layer": torch.ones(2, device="meta")}])
def test_what_cannot_be_offered_is_refused(caches):
    before = mapped()
    with pytest.raises(LayoutError):
        PeerTarget(caches)
    assert mapped() <= before
