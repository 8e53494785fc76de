"""Tensor descriptors: data only, and nothing in them is believed."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  # to show that it is refused
from contextlib import suppress

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.errors import LayoutError, RemoteProtocolError
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.sharing import descriptors
from lmcache_kernels.transfer.sharing.descriptors import (
    DTYPES,
    MAX_BYTES,
    VERSION,
    CpuShare,
    CudaShare,
    PluginShare,
    TensorDescriptor,
    decode,
    describe,
    encode,
)

UUID = "0a1b2c3d-0000-1111-2222-333344445555"
CPU = CpuShare(segment="segment_1", nbytes=4096, offset=64)
CUDA = CudaShare(handle=bytes(range(64)), device=UUID, nbytes=1 << 21, offset=512)
PLUGIN = PluginShare(backend="npu", handle=b"any", nbytes=100, offset=0)


def made(share=CPU, dtype="float16", shape=(2, 3), strides=(3, 1)):
    return TensorDescriptor(version=VERSION, share=share, dtype=dtype, shape=shape, strides=strides)


def packed(**changes):
    """A message of one descriptor, some of its values replaced; None takes a field out."""
    (fields,) = msgspec.msgpack.decode(encode([made()]))
    for path, value in changes.items():
        *outer, name = path.split("__")
        place = fields
        for key in outer:
            place = place[key]
        if value is None:
            del place[name]
        else:
            place[name] = value
    return msgspec.msgpack.encode([fields])


SHARES = st.one_of(
    st.builds(
        CpuShare,
        segment=st.from_regex(r"\A[A-Za-z0-9_]{1,64}\Z"),
        nbytes=st.just(1 << 30),
        offset=st.integers(0, 100).map(lambda n: 8 * n),
    ),
    st.builds(
        CudaShare,
        handle=st.binary(min_size=64, max_size=64),
        device=st.uuids().map(str),
        nbytes=st.just(1 << 30),
        offset=st.integers(0, 100).map(lambda n: 8 * n),
    ),
    st.just(PLUGIN),
    st.just(CpuShare(segment="", nbytes=0, offset=0)),
)


@st.composite
def some_descriptors(draw):
    share = draw(SHARES)
    dims = draw(st.integers(0, 5))
    extents = st.integers(0, 6) if share.nbytes > 100 else st.just(0)
    shape = draw(st.lists(extents, min_size=dims, max_size=dims)) if share.nbytes > 100 else [0]
    strides = draw(st.lists(st.integers(0, 999), min_size=len(shape), max_size=len(shape)))
    return made(share, draw(st.sampled_from(sorted(DTYPES))), tuple(shape), tuple(strides))


# --- what they say --------------------------------------------------------------------------------


@given(st.lists(some_descriptors(), max_size=5))
def test_a_round_trip_keeps_everything(many):
    assert decode(encode(many)) == tuple(many)


def test_the_bytes_are_those_promised():
    assert (
        encode([made(PLUGIN, "int8", (4,), (1,))]).hex()
        == (
            "91"  # a list of one
            "85" + "a776657273696f6e01"  # version 1
            "a57368617265"  # share
            "85" + "a26f6ea6706c7567696e"  # on plugin
            "a66e6279746573" + "64" + "a66f666673657400"  # nbytes 100, offset 0
            "a76261636b656e64a36e7075"  # backend npu
            "a668616e646c65c403616e79"  # handle any
            "a56474797065a4696e7438"  # dtype int8
            "a573686170659104"
            "a7737472696465739101"
        )
    )


def test_every_dtype_is_torchs():
    for name, itemsize in DTYPES.items():
        assert getattr(torch, name).itemsize == itemsize


@pytest.mark.parametrize(
    ("share", "backend"), [(CPU, "cpu"), (CUDA, "cuda"), (PLUGIN, "npu")], ids=lambda x: str(x)[:9]
)
def test_the_share_tells_which_backend_opens_it(share, backend):
    assert made(share, "int8", (1,), (1,)).backend == backend


@given(st.data())
def test_the_span_is_that_of_the_tensor(data):
    """Against torch: the elements of a view, and no further byte, lie within the span."""
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    view = torch.arange(200).as_strided(shape, strides)
    last = int(view.max()) if view.numel() else -1
    found = describe(view, CpuShare(segment="s", nbytes=1600, offset=0))
    assert found.span == 8 * (last + 1)
    assert (found.shape, found.strides, found.dtype) == (tuple(shape), tuple(strides), "int64")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.uint16])
def test_dtypes_outside_the_table_are_refused(dtype):
    tensor = torch.empty(4, dtype=dtype)
    with pytest.raises(LayoutError, match="dtype: expected one of uint8"):
        describe(tensor, CPU)


def test_only_so_many_at_once(monkeypatch):
    monkeypatch.setattr(descriptors, "MAX_TENSORS", 2)
    three = msgspec.msgpack.encode([made()] * 3)
    with pytest.raises(LayoutError, match="at most 2 tensors, got 3"):
        encode([made()] * 3)
    with pytest.raises(RemoteProtocolError, match="at most 2, got 3"):
        decode(three)
    monkeypatch.setattr(descriptors, "MAX_MESSAGE", len(three) - 1)
    with pytest.raises(RemoteProtocolError, match=f"got {len(three)}"):
        decode(three)


# --- hostile --------------------------------------------------------------------------------------

BEYOND = {
    "one element too far": {"share__offset": 4096 - 10},
    "a long stride": {"strides": [2048, 1]},
    "an offset behind the end": {"share__offset": 4098},
    "a negative offset": {"share__offset": -2},
    "a negative stride": {"strides": [-3, 1]},
    "a negative extent": {"shape": [-2, 3]},
    "an extent that overflows": {"shape": [1 << 62, 1 << 62], "strides": [0, 0]},
    "endless repetition": {"shape": [1 << 47, 4], "strides": [0, 1]},
    "a stride that overflows": {"strides": [(1 << 64) - 1, 1]},
    "an allocation no machine has": {"share__nbytes": MAX_BYTES + 1},
    "a misaligned offset": {"share__offset": 65},
    "more strides than extents": {"strides": [3, 1, 1]},
    "too many axes": {"shape": [1] * 17, "strides": [1] * 17},
    "a name that is a path": {"share__segment": "../etc/passwd"},
    "a name with a newline": {"share__segment": "segment\n"},
    "no name": {"share__segment": ""},
    "an endless name": {"share__segment": "s" * 65},
    "an unknown dtype": {"dtype": "object"},
    "an attribute of torch": {"dtype": "load"},
    "another version": {"version": 2},
    "no version": {"version": None},
    "an unknown field": {"more": 1},
    "an unknown field of the share": {"share__more": 1},
    "an unknown kind of share": {"share__on": "disk"},
    "no kind of share": {"share__on": None},
    "a GPU share with a segment": {"share__on": "cuda"},
    "no shape": {"shape": None},
    "a number as text": {"share__offset": "64"},
    "a fraction": {"share__offset": 64.0},
    "a truth value": {"shape": [True, 3]},
    "a handle that is too short": {
        "share": {"on": "cuda", "nbytes": 99, "offset": 0, "handle": b"x" * 63, "device": UUID}
    },
    "a device that is no UUID": {
        "share": {"on": "cuda", "nbytes": 99, "offset": 0, "handle": b"x" * 64, "device": "cuda:0"}
    },
    "a long handle": {
        "share": {
            "on": "plugin",
            "nbytes": 99,
            "offset": 0,
            "handle": b"x" * 4097,
            "backend": "npu",
        }
    },
    "a backend that is a path": {
        "share": {"on": "plugin", "nbytes": 99, "offset": 0, "handle": b"", "backend": "../npu"}
    },
}


@pytest.fixture
def nothing_is_opened(monkeypatch):
    def opens(*_, **__):
        pytest.fail("something was opened")

    for owner, name in ((Arena, "attach"), (os, "open"), (torch.cuda, "init")):
        monkeypatch.setattr(owner, name, opens)


@pytest.mark.usefixtures("nothing_is_opened")
@pytest.mark.parametrize("what", BEYOND)
def test_mp_074_a_view_beyond_its_segment_is_refused_unopened(what):
    """Whatever a peer claims is checked by decoding, before anything is opened."""
    assert decode(packed()) == (made(),)
    with pytest.raises(RemoteProtocolError, match="tensor descriptors of version 1"):
        decode(packed(**BEYOND[what]))


@pytest.mark.usefixtures("nothing_is_opened")
@pytest.mark.parametrize("protocol", range(6))
def test_mp_074_pickled_bytes_are_refused_unopened(protocol):
    """A pickle is not unpickled, wherever it stands."""
    bomb = pickle.dumps(_Bomb(), protocol=protocol)
    for data in (bomb, msgspec.msgpack.encode([bomb]), packed(share=bomb), packed(shape=[bomb])):
        with pytest.raises(RemoteProtocolError):
            decode(data)


class _Bomb:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


@pytest.mark.usefixtures("nothing_is_opened")
def test_mp_074_damaged_messages_are_refused_or_still_sound():
    """Cut anywhere, extended, or with any bit flipped."""
    data = encode([made(), made(CUDA), made(PLUGIN, "int8", (4,), (1,))])
    for end in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode(data[:end])
    with pytest.raises(RemoteProtocolError):
        decode(data + b"\x00")
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(damaged))
        except RemoteProtocolError:
            continue
        assert all(0 <= one.share.offset + one.span <= one.share.nbytes for one in found)


@given(st.binary(max_size=300))
def test_mp_074_random_bytes_are_refused(data):
    """Of what bytes do, only the empty list comes through by chance."""
    with suppress(RemoteProtocolError):
        assert decode(data) == ()


def test_what_is_wrong_here_is_a_layout_error():
    """The same checks, but the fault is this side's."""
    with pytest.raises(LayoutError, match="12 bytes at 4086"):
        made(CpuShare(segment="s", nbytes=4096, offset=4086))
    with pytest.raises(LayoutError, match="expected no name, got 's'"):
        CpuShare(segment="s", nbytes=0, offset=0)
    with pytest.raises(LayoutError, match="expected 0 bytes"):
        CudaShare(handle=bytes(64), device=UUID, nbytes=0, offset=0)
