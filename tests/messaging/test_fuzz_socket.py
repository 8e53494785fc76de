"""A server process under a flood of mutated messages: it answers, and does not grow."""

from __future__ import annotations

import random
from typing import get_args

import msgspec
import psutil
import pytest
import zmq
from golden_messages import GOLDEN

from lmcache_kernels.adapters.messaging import wire
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.transfer import messages as m

BODIES = [
    bytes.fromhex(body) for message, body in GOLDEN if isinstance(message, get_args(m.AnyRequest))
]
BATCH = 500
WAIT = 30_000  # milliseconds, for what takes a few
HUGE = (
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
)


SHARD, DIGESTS = b"s" * 32, bytes(range(256)) * 2
SENSIBLE = [
    m.Register(instance=1, shard=SHARD, chunk_bytes=1000),
    m.PrepareStore(instance=1, digests=DIGESTS),
    m.PutPart(instance=1, ticket=1, index=0, start=0, data=b"d" * 100),
    m.CommitStore(instance=1, ticket=1),
    m.AbortStore(instance=1, ticket=2),
    m.Lookup(request="r", shards=[SHARD], digests=DIGESTS),
    m.PrepareRetrieve(instance=1, digests=DIGESTS[:64]),
    m.GetPart(instance=1, ticket=3, index=0, start=0, nbytes=100),
    m.CommitRetrieve(instance=1, ticket=3, damaged=[0]),
    m.EndSession(request="r"),
    m.Ping(instance=1),
]
FIELDS = [msgspec.msgpack.decode(wire.encode_body(message)) for message in SENSIBLE]
NUMBERS = (0, 1, 2, 3, -1, 7, 1500, 2**31, 2**63 - 1, 2**64 - 1)


class Mutator:
    """Messages that a peer might send if it were broken, old, or ill-willed."""

    def __init__(self, seed: int, incarnation: str) -> None:
        self.random = random.Random(seed)
        self.incarnation = incarnation

    def frames(self) -> list[bytes]:
        rng = self.random
        incarnation = self.incarnation if rng.random() < 0.9 else "another"
        uid = rng.choice((rng.getrandbits(32), 0, 2**63, 2**64 - 1))
        body = self.body()
        frames = wire.request_frames(uid, incarnation, rng.choice((0.0, 1.0, 1e300)), body)
        if rng.random() < 0.05:
            frames[0] = self.broken(frames[0])
        if rng.random() < 0.02:
            frames.insert(rng.randrange(3), rng.randbytes(rng.randrange(40)))
        if rng.random() < 0.02:
            del frames[rng.randrange(len(frames))]
        return frames or [b""]

    def body(self) -> bytes:
        """A third each: bytes that may be no message, messages that may make no sense, sensible ones."""
        rng = self.random
        kind = rng.randrange(3)
        if kind == 0:
            return self.broken(rng.choice(BODIES))
        fields = dict(rng.choice(FIELDS))
        if kind == 1:
            name = rng.choice(sorted(fields))
            fields[name] = self.another(fields[name])
        if "ticket" in fields and rng.random() < 0.7:
            fields["ticket"] = rng.randrange(1, 2000)
        return msgspec.msgpack.encode(fields)

    def another(self, value: object) -> object:
        rng = self.random
        match value:
            case bytes():
                return rng.choice(
                    (value[: rng.randrange(len(value) + 1)], value * 3, rng.randbytes(64))
                )
            case int():
                return rng.choice((*NUMBERS, rng.getrandbits(60)))
            case list():
                return rng.choice(
                    ([], value * 2, value * 3000, [self.another(one) for one in value])
                )
            case _:
                return rng.choice((value, "x" * 511, "x" * 5000, "\U0001f600", None, 1.5))

    def broken(self, data: bytes) -> bytes:
        rng, out = self.random, bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = rng.randrange(len(out) + 1)
            match rng.randrange(6):
                case 0 if at < len(out):
                    out[at] ^= 1 << rng.randrange(8)
                case 1:
                    del out[at:]
                case 2:
                    out[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 3:
                    out[at : at + rng.randrange(1, 6)] = rng.choice(HUGE)
                case 4:
                    other = rng.choice(BODIES)
                    out[at:] = other[rng.randrange(len(other)) :]
                case _:
                    out[at:at] = out[: rng.randrange(len(out) + 1)][:2000]
        return bytes(out)


def answered(raw: zmq.Socket, uid: int, incarnation: str) -> None:
    """A ping gets its answer, behind whatever else was answered."""
    body = wire.encode_body(m.Ping())
    raw.send_multipart(wire.request_frames(uid, incarnation, 0.0, body))
    while True:
        frames = raw.recv_multipart()
        found, reply = wire.decode_reply(frames)
        if found == uid and isinstance(reply, m.Pong):
            return


@pytest.mark.parametrize("seed", [1])
def test_fault_i06_mutated_messages_neither_stop_nor_fill_a_server(seed, full):
    count = 1_000_000 if full else 20_000
    with (
        spawn_server(size_gb=0.01, chunk_size=16) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as raw,
    ):
        raw.linger = 0
        raw.rcvtimeo = raw.sndtimeo = WAIT
        raw.connect(server.url)
        hello = wire.encode_body(m.Hello(protocol=m.PROTOCOL_VERSION))
        raw.send_multipart(wire.request_frames(1, "", 0.0, hello))
        welcome = wire.decode_reply(raw.recv_multipart())[1]
        mutator = Mutator(seed, welcome.incarnation)
        process = psutil.Process(server.pid)
        early = 0
        for number in range(count // BATCH):
            for _ in range(BATCH):
                raw.send_multipart(mutator.frames())
            answered(raw, 2**62 + number, welcome.incarnation)
            if number == count // BATCH // 10:
                early = process.memory_info().rss
        assert process.memory_info().rss <= 1.05 * early
