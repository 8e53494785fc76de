"""Frames: golden bytes, round trips, and everything that is no message."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from formkit import GROUPS, PARTS
from golden_messages import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.adapters.messaging import wire
from lmcache_kernels.errors import LocalProtocolError, RemoteProtocolError
from lmcache_kernels.transfer import messages as m

INTS = st.integers(-(2**63), 2**64 - 1)
FIELDS = {
    "int": INTS,
    "int | None": st.none() | INTS,
    "float": st.floats(allow_nan=False),
    "str": st.text(max_size=20),
    "bytes": st.binary(max_size=100),
    "bool": st.booleans(),
    "list[int]": st.lists(INTS, max_size=5),
    "list[bytes]": st.lists(st.binary(max_size=40), max_size=5),
    "ShardPart": PARTS,
    "list[tuple[SharedPiece, ...]]": GROUPS,
}


def structs(union):
    return st.one_of(
        st.builds(kind, **{f.name: FIELDS[f.type] for f in annotations(kind)})
        for kind in get_args(union)
    )


def annotations(kind):
    class Field:
        def __init__(self, name, annotation):
            self.name, self.type = name, annotation

    return [Field(name, kind.__annotations__[name]) for name in kind.__struct_fields__]


REQUESTS = structs(m.AnyRequest)
REPLIES = structs(m.AnyReply)
UIDS = st.integers(0, 2**64 - 1)


def test_every_message_has_golden_bytes():
    known = {type(message) for message, _ in GOLDEN}
    assert known == {*get_args(m.AnyRequest), *get_args(m.AnyReply)}


@pytest.mark.parametrize(
    ("message", "expected"), GOLDEN, ids=[type(message).__name__ for message, _ in GOLDEN]
)
def test_golden_bytes_of_each_body(message, expected):
    assert wire.encode_body(message).hex() == expected


def test_golden_bytes_of_the_headers():
    header, body = wire.request_frames(5, "inc", 1.0, b"body")
    assert header.hex() == (
        "83a375696405ab696e6361726e6174696f6ea3696e63a8646561646c696e65cb3ff0000000000000"
    )
    assert body == b"body"
    assert wire.reply_frames(5, b"body") == [bytes.fromhex("81a375696405"), b"body"]


@given(UIDS, st.text(max_size=64), st.floats(0, allow_infinity=False), REQUESTS)
def test_requests_round_trip(uid, incarnation, deadline, request):
    frames = wire.request_frames(uid, incarnation, deadline, wire.encode_body(request))
    header, back = wire.decode_request(frames)
    assert (header.uid, header.incarnation, header.deadline) == (uid, incarnation, deadline)
    assert back == request
    assert type(back) is type(request)


@given(UIDS, REPLIES)
def test_replies_round_trip(uid, reply):
    assert wire.decode_reply(wire.reply_frames(uid, wire.encode_body(reply))) == (uid, reply)


def decode_both(frames):
    """Both decoders on ``frames``; nothing but the one exception may come out."""
    for decode in (wire.decode_request, wire.decode_reply):
        error = malformed(decode, frames)
        if error is not None:
            assert error.code in m.ERROR_CODES
            assert len(str(error)) < 400


def malformed(decode, frames):
    try:
        decode(frames)
    except wire.MalformedMessage as error:
        return error
    return None


def test_the_one_exception_is_the_peers_fault():
    assert issubclass(wire.MalformedMessage, RemoteProtocolError)


@given(REQUESTS | REPLIES, st.data())
def test_flipped_and_cut_and_extended_frames_raise_one_error_only(message, data):
    frames = wire.request_frames(1, "inc", 2.0, wire.encode_body(message))
    which = data.draw(st.integers(0, 1))
    frame = bytearray(frames[which])
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= 1 << data.draw(st.integers(0, 7))
    decode_both([bytes(frame) if i == which else f for i, f in enumerate(frames)])
    cut = frames[which][:position]
    more = frames[which] + data.draw(st.binary(min_size=1, max_size=5))
    for bad in (cut, more):
        broken = [bad if i == which else f for i, f in enumerate(frames)]
        for decode in (wire.decode_request, wire.decode_reply):
            with pytest.raises(wire.MalformedMessage):
                decode(broken)


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_arbitrary_frames_raise_one_error_only(frames):
    decode_both(frames)


HEADER = wire.request_frames(9, "inc", 0.0, b"")[0]
encode = msgspec.msgpack.encode
PING = b"\x82\xa2op\xa4ping\xa8instance"
LOOKUP = b"\x84\xa2op\xa6lookup\xa7request\xa1a\xa7digests\xc4\x00\xa6shards"

BAD_BODIES = {
    "empty": b"",
    "not msgpack": b"\xc1",
    "an array": encode([1]),
    "a number": encode(1),
    "no op": encode({"x": 1}),
    "op of another type": encode({"op": 5}),
    "op that is no text": b"\x81\xa2op\xa4\xff\xfe\xfd\xfc",
    "text that is no text": b"\x82\xa2op\xaaendsession\xa7request\xa2\xff\xfe",
    "nested without end": b"\x91" * 100_000,
    "nested in an unknown field": b"\x82\xa2op\xa4ping\xa1x" + b"\x91" * 100_000,
    "an array of 4 G": LOOKUP + b"\xdd\xff\xff\xff\xff",
    "bytes of 4 G": b"\x82\xa2op\xacpreparestore\xa7digests\xc6\xff\xff\xff\xff",
    "wrong type": encode({"op": "ping", "instance": "1"}),
    "bool for int": encode({"op": "ping", "instance": True}),
    "NaN for int": PING + b"\xcb\x7f\xf8\0\0\0\0\0\0",
    "an extension": PING + b"\xc7\x03\x05aaa",
    "missing field": encode({"op": "register"}),
    "trailing bytes": encode({"op": "ping"}) + b"\0",
    "too large": b"\x82\xa2op\xa4ping\xa1x\xc6\x01\0\0\0" + bytes(wire.MAX_FRAME),
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_bad_body_keeps_the_uid(body):
    with pytest.raises(wire.MalformedMessage) as caught:
        wire.decode_request([HEADER, body])
    assert (caught.value.uid, caught.value.code) == (9, "bad_request")


def header(**fields):
    return encode({"uid": 9, "incarnation": "", "deadline": 0.0} | fields)


BAD_HEADERS = {
    "empty": b"",
    "no uid": encode({"incarnation": ""}),
    "negative uid": header(uid=-1),
    "uid that is no number": header(uid="1"),
    "long incarnation": header(incarnation="i" * 65),
    "negative deadline": header(deadline=-1.0),
    "trailing bytes": HEADER + b"\0",
    "nested without end": b"\x81\xa1x" + b"\x91" * 100_000,
    "too large": encode({"uid": 9, "x": bytes(wire.MAX_FRAME)}),
}


@pytest.mark.parametrize("bad", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_bad_header_has_no_uid(bad):
    with pytest.raises(wire.MalformedMessage) as caught:
        wire.decode_request([bad, wire.encode_body(m.Clear())])
    assert caught.value.uid is None


@pytest.mark.parametrize("deadline", [float("inf"), float("nan")])
def test_a_deadline_that_is_no_time_is_refused(deadline):
    with pytest.raises(wire.MalformedMessage):
        wire.decode_request([header(deadline=deadline), wire.encode_body(m.Clear())])


@pytest.mark.parametrize("extra", [[], [b""], [b"", b""]], ids=["1", "3", "4"])
def test_a_wrong_number_of_frames_keeps_the_uid(extra):
    frames = [HEADER, *extra, wire.encode_body(m.Clear())] if extra else [HEADER]
    for decode in (wire.decode_request, wire.decode_reply):
        with pytest.raises(wire.MalformedMessage, match=f"got {len(frames)}") as caught:
            decode(frames)
        assert caught.value.uid == 9
        with pytest.raises(wire.MalformedMessage):
            decode([])


@pytest.mark.parametrize("op", ["", "zork", "pong", "PING", "x" * 10_000])
def test_fault_e13_an_unknown_operation_is_unsupported_and_named(op):
    with pytest.raises(wire.MalformedMessage, match=f"'{op[:64]}'") as caught:
        wire.decode_request([HEADER, encode({"op": op, "new": [1]})])
    assert (caught.value.uid, caught.value.code) == (9, "unsupported")
    assert len(str(caught.value)) < 200


def test_fault_e13_unknown_fields_are_ignored():
    body = encode({"op": "ping", "instance": 3, "later": {"a": [1, None]}})
    decoded, request = wire.decode_request([header(later=1), body])
    assert decoded.uid == 9
    assert request == m.Ping(instance=3)


@pytest.mark.parametrize(
    "message",
    [
        m.Ping(instance=2**64),
        m.Ping(instance=object()),
        m.EndSession(request="\ud800"),
        m.PrepareStore(instance=1, digests=bytes(wire.MAX_FRAME)),
    ],
    ids=["beyond 64 bits", "no value", "half a surrogate pair", "too large"],
)
def test_what_cannot_be_sent_is_our_own_error(message):
    with pytest.raises(LocalProtocolError):
        wire.encode_body(message)
