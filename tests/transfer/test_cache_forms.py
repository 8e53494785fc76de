"""Descriptions of caches: what they read, and what is refused while it is only data."""

from __future__ import annotations

import msgspec
import pytest
import torch
from formkit import FORMS, GROUPS, PARTS, PIECES, piece, tensor
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.adapters.messaging import wire
from lmcache_kernels.errors import ConfigError, LayoutError
from lmcache_kernels.transfer.cache_forms import (
    MAX_PARTS,
    MAX_ROWS,
    MAX_TEXT,
    ArraysForm,
    AxesForm,
    PagesForm,
    ShardPart,
    SharedPiece,
    read_group,
)
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.kv_groups import KVGroup, nested
from lmcache_kernels.transfer.messages import RegisterCache
from lmcache_kernels.transfer.sharing.descriptors import CpuShare, TensorDescriptor
from lmcache_kernels.views import blocked_group_of, group_of, opaque_group_of


def cache(*shape, dtype=torch.int16):
    return torch.zeros(shape, dtype=dtype)


def as_shared(group):
    """As another process sees it, over the same tensors."""
    flat = group.tensors
    pieces = group.share(iter([tensor(t.shape) for t in flat]))
    tensors = iter(flat)
    return read_group(
        [(nested([next(tensors) for _ in one.tensors], one.lists), one.form) for one in pieces]
    )


def test_each_form_is_read_as_its_function_reads_it():
    layers = [cache(2, 5, 4, 3, 8) for _ in range(3)]
    pages = [[cache(5, 64), cache(5, 32)], [cache(5, 16)]]
    scales = [cache(5, 4, 10, dtype=torch.uint8) for _ in range(2)]
    for group, expected in (
        (
            KVGroup.of(layers, "kv block token head dim"),
            group_of(layers, "kv block token head dim"),
        ),
        (
            KVGroup.of(layers[0], "kv block (token 1) head dim", token=4, tokens_per_state=2),
            group_of(layers[0], "kv block (token 1) head dim", token=4, tokens_per_state=2),
        ),
        (
            KVGroup.of([layers, layers], "plane layer | kv block token head dim"),
            group_of([layers, layers], "plane layer | kv block token head dim"),
        ),
        (KVGroup.of_pages(pages, 16, "states"), opaque_group_of(pages, 16, "states")),
        (KVGroup.of_arrays(scales, 4, [8, 2]), blocked_group_of(scales, 4, [8, 2])),
    ):
        assert group.read() == as_shared(group) == expected


def test_unlike_layers_make_one_group_of_several_pieces():
    latent, indexer = [cache(6, 4, 24)], [cache(6, 4, 12, dtype=torch.uint8)]
    parts = [KVGroup.of(latent, "block token dim"), KVGroup.of_arrays(indexer, 4, [8, 4])]
    joined = KVGroup.joined(parts).read()
    assert joined.planes == (*parts[0].read().planes, *parts[1].read().planes)
    assert (joined.dtype, joined.block_tokens) == ("int16", 4)
    assert as_shared(KVGroup.joined(parts)) == joined
    with pytest.raises(LayoutError, match="one block_tokens, got 4 and 8"):
        KVGroup.joined([parts[0], KVGroup.of([cache(6, 8, 24)], "block token dim")]).read()
    with pytest.raises(LayoutError, match="at least one piece"):
        KVGroup.joined([]).read()


@given(st.one_of(FORMS, PIECES, PARTS))
def test_forms_survive_the_wire(value):
    kind = type(value)
    if isinstance(value, (AxesForm, PagesForm, ArraysForm)):
        kind = AxesForm | PagesForm | ArraysForm
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AxesForm(axes=""), "1 to"),
        (lambda: AxesForm(axes="block " * MAX_TEXT), "characters"),
        (lambda: AxesForm(axes="token dim"), "'block' is missing"),
        (lambda: AxesForm(axes="block __class__"), "unknown axis"),
        (lambda: AxesForm(axes="block token dim", sizes={"token": 0}), "got 0"),
        (lambda: AxesForm(axes="block token dim", sizes={"token": 1 << 40}), "got"),
        (lambda: AxesForm(axes="block token dim", sizes={"head": 2}), "not named exactly once"),
        (lambda: AxesForm(axes="block dim", sizes={str(i): 1 for i in range(99)}), "at most"),
        (lambda: AxesForm(axes="block dim", tokens_per_state=0), "got 0"),
        (lambda: PagesForm(block_tokens=0, format="f"), "block_tokens"),
        (lambda: PagesForm(block_tokens=4, format=""), "format"),
        (lambda: PagesForm(block_tokens=4, format="f" * (MAX_TEXT + 1)), "format"),
        (lambda: ArraysForm(block_tokens=4, widths=(0,)), "widths"),
        (lambda: ArraysForm(block_tokens=4, widths=(1,) * (MAX_PARTS + 1)), "widths"),
        (lambda: ArraysForm(block_tokens=-4, widths=(1,)), "block_tokens"),
        (lambda: piece(lists=(2,)), "lists"),
        (lambda: SharedPiece(tensors=(), lists=(0,), form=PIECE_FORM), "got 0"),
        (lambda: piece(lists=(1,) * (MAX_PARTS + 1)), "lists"),
        (lambda: piece(AxesForm(axes="block kv token dim")), "expected 4 axes"),
        (lambda: piece(AxesForm(axes="block (token head) dim")), "all but one"),
        (lambda: ShardPart(layers=((),) * (MAX_PARTS + 1)), "layers"),
        (lambda: ShardPart(layers=(("x" * (MAX_TEXT + 1),),)), "characters"),
    ],
)
def test_what_cannot_be_right_cannot_be_made(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


PIECE_FORM = AxesForm(axes="block token dim")


@pytest.mark.parametrize("word", ["layer", "kv", "plane"])
def test_a_view_that_repeats_rows_without_end_is_refused(word):
    """Strides of 0 make a huge view of few bytes; reading it would never end."""
    endless = TensorDescriptor(
        version=1,
        share=CpuShare(segment="s", nbytes=64, offset=0),
        dtype="uint8",
        shape=(2, MAX_ROWS + 1, 8),
        strides=(8, 0, 1),
    )
    with pytest.raises(LayoutError, match="rows: expected at most"):
        piece(AxesForm(axes=f"block {word} dim"), (endless,))


def test_a_part_names_the_shard():
    part = ShardPart(index=1, count=4, stage=2, stages=3, layers=(("a", "b"), ("c",)))
    assert part.shard(b"f") == shard_id(
        b"f", index=1, count=4, stage=2, stages=3, layers=[["a", "b"], ["c"]]
    )
    with pytest.raises(ConfigError, match="shard index"):
        ShardPart(index=1).shard(b"f")


# --- while they are only bytes --------------------------------------------------------------------


def body(change):
    """The frames of a registration, changed by ``change`` while it is plain data."""
    request = RegisterCache(
        instance=1, shard=bytes(32), part=ShardPart(), groups=[(piece(), piece())]
    )
    plain = msgspec.msgpack.decode(wire.encode_body(request))
    change(plain)
    return wire.request_frames(1, "i", 0.0, msgspec.msgpack.encode(plain))


def first_tensor(plain):
    return plain["groups"][0][0]["tensors"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda p: first_tensor(p).update(shape=[2, 4, 1 << 40]),
        lambda p: first_tensor(p).update(shape=[2, 4, 8], strides=[1 << 62, 8, 1]),
        lambda p: first_tensor(p).update(strides=[-32, 8, 1]),
        lambda p: first_tensor(p).update(dtype="object"),
        lambda p: first_tensor(p).update(dtype="__class__"),
        lambda p: first_tensor(p).update(version=2),
        lambda p: first_tensor(p).update(extra=1),
        lambda p: first_tensor(p)["share"].update(segment="../etc/passwd"),
        lambda p: first_tensor(p)["share"].update(offset=1 << 50),
        lambda p: first_tensor(p)["share"].update(on="pickle"),
        lambda p: p["groups"][0][0].update(tensors=b"\x80\x04N."),
        lambda p: p["groups"][0][0].update(lists=[3]),
        lambda p: p["groups"][0][0].update(form={"form": "python", "code": "1"}),
        lambda p: p["groups"][0][0]["form"].update(axes="block ("),
        lambda p: p["groups"][0][0]["form"].update(axes=["block"]),
        lambda p: p["groups"][0][0]["form"].update(sizes={"token": "4"}),
        lambda p: p["part"].update(layers=[["x" * 10_000]]),
        lambda p: p["part"].update(index="0"),
        lambda p: p.update(groups=[[1]]),
        lambda p: p.update(shard="text"),
    ],
)
def test_a_wrong_registration_is_refused_when_it_is_decoded(change):
    """Nothing is opened, and the sender is told."""
    with pytest.raises(wire.MalformedMessage) as caught:
        wire.decode_request(body(change))
    assert (caught.value.code, caught.value.uid) == ("bad_request", 1)


@given(st.data())
def test_registrations_with_flipped_bytes_are_read_or_refused(data):
    frames = body(lambda plain: None)
    raw = bytearray(frames[1])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, request = wire.decode_request([frames[0], bytes(raw)])
    except wire.MalformedMessage:
        return
    assert wire.encode_body(request)


@given(GROUPS, PARTS)
def test_registrations_survive_the_wire(groups, part):
    request = RegisterCache(instance=1, shard=bytes(32), part=part, groups=groups, max_programs=4)
    frames = wire.request_frames(7, "i", 0.0, wire.encode_body(request))
    assert wire.decode_request(frames)[1] == request
