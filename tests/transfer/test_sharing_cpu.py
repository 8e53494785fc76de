"""CPU caches shared between processes: moved in place, opened elsewhere, taken back on failure."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch
from share_peer import SharePeer

from lmcache_kernels.errors import (
    CapacityError,
    Closed,
    LayoutError,
    LocalProtocolError,
    PeerGone,
    RemoteProtocolError,
)
from lmcache_kernels.transfer.memory.arena import SHM_DIRECTORY, Arena
from lmcache_kernels.transfer.sharing import devices, wrapping
from lmcache_kernels.transfer.sharing.cpu_share import CpuSharing
from lmcache_kernels.transfer.sharing.descriptors import (
    CpuShare,
    CudaShare,
    decode,
    describe,
    encode,
)
from lmcache_kernels.transfer.sharing.wrapping import (
    open_kv_caches,
    wrap_kv_caches,
    wrap_one_kv_cache,
)

WAIT = 30
UUID = "0a1b2c3d-0000-1111-2222-333344445555"


@pytest.fixture
def made(monkeypatch):
    """Names of the segments made, in order."""
    names, create = [], Arena.create

    def recorded(*arguments, **options):
        arena = create(*arguments, **options)
        names.append(arena.name)
        return arena

    monkeypatch.setattr(Arena, "create", recorded)
    return names


@pytest.fixture
def peer():
    with SharePeer() as found:
        yield found


def there(name: str) -> bool:
    return (SHM_DIRECTORY / name).exists()


def segments(wrapped) -> list[str]:
    return [descriptor.share.segment for descriptor in wrapped.descriptors]


def cache(seed: int = 1, shape=(2, 5, 3), dtype=torch.float16):
    """Any bits, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.empty(shape, dtype=dtype)
    tensor.unsqueeze(-1).view(torch.uint8).random_(generator=generator)
    return tensor


def elements(tensor) -> list[bytes]:
    """As SharePeer.read gives them."""
    raw = tensor.unsqueeze(-1).view(torch.uint8).numpy().tobytes()
    return [raw[i : i + tensor.itemsize] for i in range(0, len(raw), tensor.itemsize)]


def not_dense():
    return torch.zeros(4, 8)[:, :6]


# --- between two processes ------------------------------------------------------------------------


def test_a_peer_sees_the_cache_and_its_writes_come_back(peer):
    """Several dtypes and orders of axes; the engine's own tensor objects are what is shared."""
    caches = {
        "plain": cache(1),
        "permuted": cache(2, (4, 3, 2)).permute(2, 0, 1),
        "bytes": cache(3, (7,), torch.uint8),
        "fp8": cache(4, (3, 3), torch.uint8).view(torch.float8_e4m3fn),
        "number": cache(5, (), torch.int64),
        "empty": torch.empty(0, 3),
    }
    before = {name: elements(tensor) for name, tensor in caches.items()}
    wrapped = wrap_kv_caches(caches)
    assert peer.open(encode(wrapped.descriptors)) == len(caches)
    for index, (name, tensor) in enumerate(caches.items()):
        assert elements(tensor) == before[name], "moving keeps every bit"
        assert peer.read(index) == before[name]
        form = [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), "cpu"]
        assert peer.form(index)[:4] == form
    peer.write(1, 0x55)
    assert set(elements(caches["permuted"])) == {b"\x55\x55"}
    caches["plain"].view(torch.uint8).fill_(0x66)
    assert set(peer.read(0)) == {b"\x66\x66"}
    wrapped.close()


def test_mp_072_two_views_of_one_storage_share_one_segment(peer, made):
    """The whole storage moves once; a write through one view is seen through the other."""
    raw = torch.arange(120, dtype=torch.uint8)
    front, back, wide = raw[:80].view(4, 20), raw[40:], raw[8:72].view(torch.int32).view(4, 4)
    wrapped = wrap_kv_caches({"front": front, "back": back, "wide": wide, "raw": raw})
    assert segments(wrapped) == made * 4
    assert [one.share.offset for one in wrapped.descriptors] == [0, 40, 8, 0]
    assert {one.share.nbytes for one in wrapped.descriptors} == {120}
    peer.open(encode(wrapped.descriptors))
    assert [peer.form(index)[4] for index in range(4)] == [0, 40, 8, 0]
    assert peer.mappings(made[0]) == 1, "many tensors, one mapping"
    peer.write(1, 0xAA)
    assert elements(front)[40:] == [b"\xaa"] * 40
    assert elements(front)[:40] == [bytes([i]) for i in range(40)]
    assert elements(raw)[40:] == [b"\xaa"] * 80
    raw[10] = 0xBB
    assert peer.read(0)[10] == b"\xbb"
    assert peer.read(2)[0] == bytes([8, 9, 0xBB, 11])
    peer.close()
    assert peer.mappings(made[0]) == 0


def test_a_killed_peer_leaves_nothing_and_takes_nothing(peer, made):
    tensor = cache()
    wrapped = wrap_kv_caches({"layer": tensor})
    peer.open(encode(wrapped.descriptors))
    peer.write(0, 0x11)
    peer.kill()
    assert set(elements(tensor)) == {b"\x11\x11"}
    assert there(made[0])
    del wrapped, tensor
    assert not there(made[0])


def test_segments_of_a_killed_owner_go_at_the_next_start(peer):
    """What this process has open of it stays readable; opening it again is refused."""
    descriptors = decode(peer.wrap(5000))
    (name,) = {one.share.segment for one in descriptors}
    opened = open_kv_caches(descriptors)
    peer.kill()
    assert there(name), "nobody could clean up"
    wrap_one_kv_cache(cache())
    assert not there(name)
    assert elements(opened.tensors[0]) == [b"\x07"] * 5000
    opened.close()
    with pytest.raises(PeerGone, match="not there"):
        open_kv_caches(descriptors)


def test_an_owner_that_just_ends_leaves_nothing(peer):
    (descriptor,) = decode(peer.wrap(100))
    assert there(descriptor.share.segment)
    peer.finish()
    assert not there(descriptor.share.segment)


# --- in place -------------------------------------------------------------------------------------


def test_a_segment_goes_with_the_last_tensor_in_it(made):
    raw = torch.arange(64, dtype=torch.uint8)
    one, other = raw[:32], raw[32:]
    wrapped = wrap_kv_caches({"one": one, "other": other})
    wrapped.close()
    wrapped.close()
    del raw, one
    assert there(made[0])
    assert elements(other) == [bytes([i]) for i in range(32, 64)]
    derived = other[5:]
    del other
    assert there(made[0]), "any view keeps it"
    del derived
    assert not there(made[0])


def test_wrapping_again_finds_what_is_shared(made):
    raw = torch.arange(64, dtype=torch.uint8)
    one, later = raw[:32], raw[32:]
    first = wrap_one_kv_cache(one)
    address = one.data_ptr()
    assert wrap_one_kv_cache(one) == first
    assert one.data_ptr() == address
    second = wrap_one_kv_cache(later)
    third = wrap_one_kv_cache(one[4:])
    assert [x.share.segment for x in (first, second, third)] == made * 3
    assert [x.share.offset for x in (first, second, third)] == [0, 32, 4]
    assert later.data_ptr() == address + 32


def test_the_tensor_a_view_was_made_from_moves_with_it(made, caplog):
    """torch keeps it behind every view, and with it the old memory."""
    raw = torch.arange(24, dtype=torch.float32)
    view = raw.view(4, 6)
    assert view._base is raw
    wrap_one_kv_cache(view)
    view[0, 1] = 77
    assert raw[1] == 77
    assert raw.data_ptr() == view.data_ptr()
    assert caplog.records == []


def test_tensors_that_were_left_behind_are_warned_about(caplog):
    """They still lie in the old memory and no longer see what the cache sees."""
    raw = torch.arange(64, dtype=torch.uint8)
    one, other, forgotten = raw[:32], raw[32:], raw[:].view(torch.int16)
    del raw
    wrapped = wrap_kv_caches({"one": one, "other": other})
    wrap_one_kv_cache(forgotten)
    assert forgotten.data_ptr() == one.data_ptr()
    # A server's test may have set the level of all loggers to INFO.
    (record,) = [found for found in caplog.records if found.levelno >= logging.WARNING]
    assert record.levelno == logging.WARNING
    assert "64 bytes" in record.getMessage()
    wrapped.close()


@pytest.mark.parametrize("inside", [True, False])
def test_tensors_of_inference_mode_move_too(inside):
    with torch.inference_mode():
        tensor = cache(6)
    before = elements(tensor)
    with torch.inference_mode(inside):
        wrap_one_kv_cache(tensor)
        wrap_one_kv_cache(cache(7))
    assert tensor.is_inference()
    assert elements(tensor) == before


def test_empty_tensors_have_no_segment(made):
    tensor = torch.empty(3, 0, 2, dtype=torch.int8)
    descriptor = wrap_one_kv_cache(tensor)
    assert descriptor == describe(tensor, CpuShare(segment="", nbytes=0, offset=0))
    opened = open_kv_caches([descriptor, descriptor])
    assert [list(one.shape) for one in opened.tensors] == [[3, 0, 2]] * 2
    opened.close()
    assert made == []


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (not_dense(), r"dense in some order of its axes, got shape \(4, 6\) stride \(8, 1\)"),
        (torch.zeros(1).expand(5), "dense"),
        (torch.zeros(9).as_strided((2, 2), (2, 2)), "dense"),
        (torch.zeros(3, 3).to_sparse(), "strided"),
        (torch.zeros(3, dtype=torch.complex64), "dtype"),
        ([torch.zeros(3)], "torch.Tensor, got list"),
    ],
    ids=["gaps", "repeated", "overlapping", "sparse", "complex", "list"],
)
def test_what_cannot_be_shared_is_refused_and_left_alone(made, tensor, message):
    with pytest.raises(LayoutError, match=message):
        wrap_one_kv_cache(tensor)
    with pytest.raises(LayoutError, match=message):
        wrap_kv_caches({"good": cache(), "bad": tensor})
    assert not any(there(name) for name in made)


def test_extents_of_one_may_have_any_stride():
    tensor = torch.zeros(6).as_strided((1, 2, 1, 3), (99, 3, 0, 1))
    assert wrap_one_kv_cache(tensor).strides == (99, 3, 0, 1)


# --- all or nothing -------------------------------------------------------------------------------


def test_mp_070_a_failure_takes_the_whole_batch_back_and_a_retry_works(peer, made):
    """The third of four fails: no segment is left, the caches are where they were."""
    caches = {f"layer {i}": cache(i) for i in range(4)}
    caches["layer 2"] = not_dense()
    before = {name: (tensor.data_ptr(), elements(tensor)) for name, tensor in caches.items()}
    with pytest.raises(LayoutError, match="dense"):
        wrap_kv_caches(caches)
    assert len(made) == 2
    assert not any(there(name) for name in made)
    assert before == {n: (tensor.data_ptr(), elements(tensor)) for n, tensor in caches.items()}

    caches["layer 2"] = cache(2)
    wrapped = wrap_kv_caches(caches)
    assert segments(wrapped) == made[2:]
    assert len(set(made)) == 6
    peer.open(encode(wrapped.descriptors))
    for index, tensor in enumerate(caches.values()):
        assert peer.read(index) == elements(tensor)
        peer.write(index, index)
        assert set(elements(tensor)) == {bytes([index, index])}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, CapacityError])
@pytest.mark.parametrize("where", ["before", "copying"])
def test_mp_070_any_exception_takes_the_batch_back(monkeypatch, made, error, where):
    """Also one that comes between a segment's making and the end of its filling."""
    first, second = cache(1), cache(2)
    before = first.data_ptr(), elements(first), second.data_ptr(), elements(second)
    create, bytes_of = Arena.create, torch.frombuffer
    thrown = error("stop")

    def fails(*arguments, **options):
        if len(made) == 1 + (where == "copying"):
            raise thrown
        return (create if where == "before" else bytes_of)(*arguments, **options)

    monkeypatch.setattr(*((Arena, "create") if where == "before" else (torch, "frombuffer")), fails)
    with pytest.raises(error) as caught:
        wrap_kv_caches({"first": first, "second": second})
    assert caught.value is thrown
    monkeypatch.undo()
    assert not any(there(name) for name in made)
    assert before == (first.data_ptr(), elements(first), second.data_ptr(), elements(second))
    wrapped = wrap_kv_caches({"first": first, "second": second})
    assert all(there(name) for name in segments(wrapped))


def test_mp_071_a_failing_reregistration_leaves_what_was_shared(peer, made):
    """Segments of an earlier batch are not this batch's to take back."""
    caches = {"a": cache(1), "b": cache(2)}
    wrapped = wrap_kv_caches(caches)
    peer.open(encode(wrapped.descriptors))
    shared = segments(wrapped)
    new = cache(3)
    with pytest.raises(LayoutError):
        wrap_kv_caches({**caches, "new": new, "bad": not_dense()})
    assert [there(name) for name in made] == [True, True, False]
    assert segments(wrap_kv_caches({**caches, "new": new}))[:2] == shared
    peer.write(0, 0x31)
    assert set(elements(caches["a"])) == {b"\x31\x31"}


def test_mp_d25_after_a_rollback_no_descriptor_names_what_is_gone(made):
    """Views of one storage on both sides of the failure stay views of one storage."""
    raw = torch.arange(90, dtype=torch.uint8)
    one, other = raw[:40], raw[40:]
    for _ in range(3):
        with pytest.raises(LayoutError):
            wrap_kv_caches({"one": one, "bad": not_dense(), "other": other})
        one[0] += 1
        assert raw[0] == one[0]
        assert other.data_ptr() == one.data_ptr() + 40
    assert not any(there(name) for name in made)
    wrapped = wrap_kv_caches({"one": one, "other": other, "raw": raw})
    assert segments(wrapped) == [made[-1]] * 3
    assert there(made[-1])
    opened = open_kv_caches(wrapped.descriptors)
    opened.tensors[1].fill_(9)
    assert set(raw[40:].tolist()) == {9}
    assert raw[0] == 3
    opened.close()


def test_mp_d25_a_late_view_of_a_shared_storage_goes_back_alone(made):
    """The failing batch added a view to a segment of an earlier batch: only that is undone."""
    raw = torch.arange(90, dtype=torch.uint8)
    one, late = raw[:40], raw[40:]
    first = wrap_kv_caches({"one": one})
    at = late.data_ptr()
    with pytest.raises(LayoutError):
        wrap_kv_caches({"late": late, "bad": not_dense()})
    assert late.data_ptr() == at
    assert there(made[0])
    assert segments(wrap_kv_caches({"one": one, "late": late})) == made * 2
    first.close()


def test_mp_d25_threads_wait_for_each_others_batches(monkeypatch, made):
    """One batch shares a view, and fails; another, of a sibling view, must not rely on it."""
    raw = torch.arange(90, dtype=torch.uint8)
    one, other = raw[:40], raw[40:]
    inside, go_on, results = threading.Event(), threading.Event(), []

    real = devices.backend_for

    def stops_at_the_second(device_type):
        if threading.current_thread().name == "failing" and len(made) == 1:
            inside.set()
            assert go_on.wait(WAIT)
            raise CapacityError("stop")
        return real(device_type)

    monkeypatch.setattr(wrapping, "backend_for", stops_at_the_second)

    def fail():
        with pytest.raises(CapacityError, match="stop"):
            wrap_kv_caches({"one": one, "then": cache()})

    def share():
        results.append(wrap_kv_caches({"other": other}))

    failing = threading.Thread(target=fail, name="failing")
    failing.start()
    assert inside.wait(WAIT)
    sharing = threading.Thread(target=share)
    sharing.start()
    assert results == [], "it waits"
    go_on.set()
    failing.join(WAIT)
    sharing.join(WAIT)
    assert [there(name) for name in made] == [False, True]
    assert segments(results[0]) == made[1:]


def test_many_threads_make_one_segment_of_one_storage(made):
    raw = torch.arange(160, dtype=torch.uint8)
    views = [raw[i * 20 : (i + 1) * 20] for i in range(8)]
    found = [None] * 8
    ready = threading.Barrier(8)

    def share(i):
        ready.wait(WAIT)
        found[i] = wrap_one_kv_cache(views[i])

    threads = [threading.Thread(target=share, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(made) == 1
    assert [one.share.offset for one in found] == [20 * i for i in range(8)]
    assert len({view.data_ptr() - 20 * i for i, view in enumerate(views)}) == 1


def test_a_segment_that_cannot_be_removed_does_not_hide_the_error(monkeypatch, made, caplog):
    caplog.set_level(logging.DEBUG)
    first = cache()

    def refuses(self):
        close(self)
        raise PermissionError("not yours")

    close = Arena.close
    monkeypatch.setattr(Arena, "close", refuses)
    with pytest.raises(LayoutError, match="dense"):
        wrap_kv_caches({"first": first, "bad": not_dense()})
    assert f"segment {made[0]} was not removed" in caplog.text


def test_the_registry_does_not_grow():
    sharing = CpuSharing()
    for _ in range(5):
        tensor = cache()
        with sharing.wrap(tensor):
            pass
        del tensor
        gc.collect()
    assert len(sharing._segments) <= 2


# --- opening --------------------------------------------------------------------------------------


def test_an_opened_tensor_is_what_the_owner_has_until_it_is_closed():
    tensor = cache(1, (4, 3, 2)).permute(2, 0, 1)
    opened = open_kv_caches([wrap_one_kv_cache(tensor)])
    (one,) = opened.opened
    assert one.device == "cpu"
    assert one.address == one.to_tensor().data_ptr() != tensor.data_ptr()
    assert one.to_tensor().stride() == tensor.stride()
    assert elements(one.to_tensor()) == elements(tensor)
    opened.close()
    opened.close()
    for use in (one.to_tensor, lambda: one.address, lambda: one.device):
        with pytest.raises(Closed):
            use()


def test_opening_is_all_or_nothing():
    tensor = cache()
    good = wrap_one_kv_cache(tensor)
    gone = describe(tensor, CpuShare(segment="lmcache_kernels_" + "0" * 32, nbytes=999, offset=0))
    sharing = devices.backend_named("cpu").open.__self__
    mapped = len(sharing._opened)
    with pytest.raises(PeerGone):
        open_kv_caches([good, good, gone])
    assert len(sharing._opened) == mapped


def test_what_a_segment_really_is_counts_and_not_what_is_said():
    tensor = cache()
    good = wrap_one_kv_cache(tensor)
    sharing = CpuSharing()
    larger = CpuShare(segment=good.share.segment, nbytes=good.share.nbytes + 2, offset=2)
    with pytest.raises(RemoteProtocolError, match="bytes: expected 62, got 60"):
        sharing.open(describe(tensor, larger))
    opened = sharing.open(good)
    with pytest.raises(RemoteProtocolError, match="expected 62 bytes, got 60"):
        sharing.open(describe(tensor, larger))
    opened.close()
    assert len(sharing._opened) == 0
    with pytest.raises(RemoteProtocolError, match="arena name"):
        sharing.open(describe(tensor, CpuShare(segment="passwd", nbytes=60, offset=0)))
    with pytest.raises(LocalProtocolError, match="CudaShare"):
        sharing.open(
            describe(tensor, CudaShare(handle=b"x" * 64, device=UUID, nbytes=60, offset=0))
        )


# --- what is said ---------------------------------------------------------------------------------


def test_the_number_is_logged_and_each_tensor_only_for_debugging(caplog, monkeypatch):
    caches = {"a": cache(1), "b": cache(2, (7,), torch.uint8)}
    caplog.set_level(logging.INFO, "lmcache_kernels.transfer.sharing")
    kept = wrap_kv_caches(caches)
    assert [record.getMessage() for record in caplog.records] == ["wrapped 2 KV caches"]
    caplog.clear()
    caplog.set_level(logging.DEBUG, "lmcache_kernels.transfer.sharing")
    kept = wrap_kv_caches(caches)
    assert [record.getMessage() for record in caplog.records] == [
        "wrapping KV cache 0: a, shape (2, 5, 3), torch.float16 on cpu",
        "wrapping KV cache 1: b, shape (7,), torch.uint8 on cpu",
        "wrapped 2 KV caches",
    ]
    kept.close()


def test_nothing_to_wrap_is_nothing_wrapped():
    assert wrap_kv_caches({}).descriptors == []
