"""Frames: golden bytes, round trips, and everything that is no message."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from formkit import CUDA_UUID, GROUPS, PARTS, piece, tensor
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.adapters.messaging import wire
from lmcache_kernels.errors import LocalProtocolError, RemoteProtocolError
from lmcache_kernels.transfer import messages as m
from lmcache_kernels.transfer.cache_forms import ArraysForm, AxesForm, PagesForm, ShardPart
from lmcache_kernels.transfer.sharing.descriptors import CudaShare

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

# Bytes on the socket only change together with PROTOCOL_VERSION.
GOLDEN = [
    (m.Hello(protocol=1), "83a26f70a568656c6c6fa870726f746f636f6c01a8736f667477617265a0"),
    (
        m.Welcome(protocol=1, incarnation="i", clock=1.0, chunk_tokens=256),
        "86a26f70a777656c636f6d65a870726f746f636f6c01ab696e6361726e6174696f6ea169a5636c6f"
        "636bcb3ff0000000000000ac6368756e6b5f746f6b656e73cd0100a8736f667477617265a0",
    ),
    (m.Ping(instance=7), "82a26f70a470696e67a8696e7374616e636507"),
    (
        m.Pong(incarnation="i", registered=True),
        "83a26f70a4706f6e67ab696e6361726e6174696f6ea169aa72656769737465726564c3",
    ),
    (
        m.Register(instance=1, shard=b"s", chunk_bytes=2),
        "84a26f70a87265676973746572a8696e7374616e636501a57368617264c40173ab6368756e6b5f62"
        "7974657302",
    ),
    (
        m.Registered(arena_name="a", arena_bytes=3),
        "83a26f70aa72656769737465726564aa6172656e615f6e616d65a161ab6172656e615f627974657303",
    ),
    (m.Unregister(instance=1), "82a26f70aa756e7265676973746572a8696e7374616e636501"),
    (m.Done(), "81a26f70a4646f6e65"),
    (m.EndSession(request="r"), "82a26f70aa656e6473657373696f6ea772657175657374a172"),
    (m.Clear(), "82a26f70a5636c656172a673686172647390"),
    (m.Clear(shards=[b"s"]), "82a26f70a5636c656172a673686172647391c40173"),
    (m.Cleared(chunks=4), "82a26f70a7636c6561726564a66368756e6b7304"),
    (m.Found(chunks=4), "82a26f70a5666f756e64a66368756e6b7304"),
    (
        m.PrepareStore(instance=1, digests=b"d"),
        "83a26f70ac7072657061726573746f7265a8696e7374616e636501a764696765737473c40164",
    ),
    (
        m.CommitStore(instance=1, ticket=2),
        "83a26f70ab636f6d6d697473746f7265a8696e7374616e636501a67469636b657402",
    ),
    (
        m.AbortStore(instance=1, ticket=2),
        "83a26f70aa61626f727473746f7265a8696e7374616e636501a67469636b657402",
    ),
    (
        m.PrepareRetrieve(instance=1, digests=b"d"),
        "83a26f70af707265706172657265747269657665a8696e7374616e636501a764696765737473c40164",
    ),
    (
        m.ErrorReply(code="internal", message="x"),
        "83a26f70aa6572726f727265706c79a4636f6465a8696e7465726e616ca76d657373616765a178",
    ),
    (
        m.Lookup(request="r", shards=[b"s"], digests=b"d"),
        "84a26f70a66c6f6f6b7570a772657175657374a172a673686172647391c40173a764696765737473c40164",
    ),
    (
        m.StoreSlots(ticket=1, indices=[0], offsets=[300]),
        "84a26f70aa73746f7265736c6f7473a67469636b657401a7696e64696365739100a76f6666736574"
        "7391cd012c",
    ),
    (
        m.LoadSlots(ticket=1, offsets=[2]),
        "83a26f70a96c6f6164736c6f7473a67469636b657401a76f6666736574739102",
    ),
    (
        m.CommitRetrieve(instance=1, ticket=2, damaged=[3]),
        "84a26f70ae636f6d6d69747265747269657665a8696e7374616e636501a67469636b657402a76461"
        "6d616765649103",
    ),
    (
        m.RegisterCache(
            instance=1,
            shard=b"s",
            part=ShardPart(layers=(("a", "b"),)),
            groups=[
                (
                    piece(AxesForm(axes="block token dim", sizes={"token": 4})),
                    piece(
                        PagesForm(block_tokens=4, format="f"),
                        (
                            tensor(
                                share=CudaShare(
                                    handle=bytes(64), device=CUDA_UUID, nbytes=64, offset=0
                                )
                            ),
                        ),
                    ),
                    piece(ArraysForm(block_tokens=4, widths=(6, 2))),
                )
            ],
        ),
        "86a26f70ad72656769737465726361636865a8696e7374616e636501a57368617264c40173a470617274"
        "85a5696e64657800a5636f756e7401a5737461676500a673746167657301a66c61796572739192a161a1"
        "62a667726f757073919383a774656e736f72739185a776657273696f6e01a5736861726584a26f6ea363"
        "7075a66e6279746573cd0200a66f666673657400a77365676d656e74b16c6d63616368655f6b65726e65"
        "6c735f30a56474797065a575696e7438a5736861706593020408a77374726964657393200801a56c6973"
        "747390a4666f726d84a4666f726da461786573a461786573af626c6f636b20746f6b656e2064696da573"
        "697a657381a5746f6b656e04b0746f6b656e735f7065725f73746174650183a774656e736f72739185a7"
        "76657273696f6e01a5736861726585a26f6ea463756461a66e627974657340a66f666673657400a66861"
        "6e646c65c440000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000000000000000000a6646576696365d9243031323334"
        "3536372d383961622d636465662d303132332d343536373839616263646566a56474797065a575696e74"
        "38a5736861706593020408a77374726964657393200801a56c6973747390a4666f726d83a4666f726da5"
        "7061676573ac626c6f636b5f746f6b656e7304a6666f726d6174a16683a774656e736f72739185a77665"
        "7273696f6e01a5736861726584a26f6ea3637075a66e6279746573cd0200a66f666673657400a7736567"
        "6d656e74b16c6d63616368655f6b65726e656c735f30a56474797065a575696e7438a573686170659302"
        "0408a77374726964657393200801a56c6973747390a4666f726d84a4666f726da6617272617973ac626c"
        "6f636b5f746f6b656e7304a6776964746873920602b0746f6b656e735f7065725f737461746501ac6d61"
        "785f70726f6772616d73c0",
    ),
    (
        m.StoreBlocks(instance=1, transfer=2, digests=b"d", blocks=[b"bbbb"], event=b"e"),
        "86a26f70ab73746f7265626c6f636b73a8696e7374616e636501a87472616e7366657202a76469676573"
        "7473c40164a6626c6f636b7391c40462626262a56576656e74c40165",
    ),
    (m.Copied(ticket=1, chunks=2), "83a26f70a6636f70696564a67469636b657401a66368756e6b7302"),
    (
        m.LoadBlocks(instance=1, transfer=2, digests=b"d", blocks=[b"bbbb"], skip_tokens=3),
        "87a26f70aa6c6f6164626c6f636b73a8696e7374616e636501a87472616e7366657202a7646967657374"
        "73c40164a6626c6f636b7391c40462626262ab736b69705f746f6b656e7303a56576656e74c400",
    ),
    (m.Loaded(chunks=2), "82a26f70a66c6f61646564a66368756e6b7302"),
    (
        m.Settle(instance=1, transfers=[2]),
        "83a26f70a6736574746c65a8696e7374616e636501a97472616e73666572739102",
    ),
    (
        m.PutPart(instance=1, ticket=2, index=3, start=4, data=b"d"),
        "86a26f70a770757470617274a8696e7374616e636501a67469636b657402a5696e64657803a57374"
        "61727404a464617461c40164",
    ),
    (
        m.GetPart(instance=1, ticket=2, index=3, start=4, nbytes=5),
        "86a26f70a767657470617274a8696e7374616e636501a67469636b657402a5696e64657803a57374"
        "61727404a66e627974657305",
    ),
    (
        m.Part(data=b"d"),
        "82a26f70a470617274a464617461c40164",
    ),
]


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
