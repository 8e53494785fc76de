"""Clients that misbehave at random, in a process of their own, until standard input ends.

Says how often each kind of misbehaviour was brought to its end, and how many clients were answered whenever
they waited for it, as a line of JSON.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import zmq

from lmcache_kernels.adapters.messaging import wire
from lmcache_kernels.transfer import messages as m

CLIENTS = 32
INSTANCES = range(5000, 5050)
SHARD, DIGESTS = b"h" * 32, bytes(range(256))
WAIT = 10_000  # milliseconds
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


class HostileClients:
    """The process.

    Attributes:
        counts: of each kind, when it has ended.
    """

    def __init__(self, url, seed):
        self._process = subprocess.Popen(
            [sys.executable, __file__, url, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )
        self.counts = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        said, _ = self._process.communicate(timeout=60)
        self.counts = json.loads(said)


class _Client:
    """One of them; it does one thing after the other."""

    def __init__(self, url, context, chance):
        self._url, self._context, self._chance = url, context, chance
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        self._address = host, int(port)

    def storm(self):
        """Connect and be gone, politely or not."""
        for _ in range(20):
            with socket.create_connection(self._address, 10) as made:
                if self._chance.random() < 0.5:
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def half_greeting(self):
        """Part of what a connection begins with, or what none begins with."""
        with socket.create_connection(self._address, 10) as made:
            start = self._chance.choice((GREETING, self._chance.randbytes(64)))
            made.sendall(start[: self._chance.randrange(len(start))])
            self._look(made)

    def half_message(self):
        """A frame that says it is longer than what follows, up to what no frame may be."""
        with socket.create_connection(self._address, 10) as made:
            made.sendall(GREETING + bytes([4, len(READY)]) + READY)
            said = self._chance.choice((200, 1 << 20, 1 << 40, (1 << 63) - 1))
            made.sendall(b"\x02" + struct.pack(">Q", said) + self._chance.randbytes(100))
            self._look(made)

    def deaf(self):
        """Ask and ask, and never read what is answered."""
        with self._dealer() as raw:
            incarnation = self._greet(raw)
            ask = self._frames(m.Lookup(request="deaf", shards=[SHARD], digests=DIGESTS * 50))
            for number in range(2000):
                if not raw.poll(0, zmq.POLLOUT):
                    return
                raw.send_multipart(ask(number, incarnation))

    def vanish(self):
        """Register, reserve, store, look up, and be gone in the middle of it."""
        instance = self._chance.choice(INSTANCES)
        steps = [
            m.Register(instance=instance, shard=SHARD, chunk_bytes=1000),
            m.PrepareStore(instance=instance, digests=self._chance.randbytes(32 * 4)),
            m.PrepareStore(instance=instance, digests=DIGESTS),
            m.CommitStore(instance=instance, ticket=self._chance.randrange(1, 10_000)),
            m.Lookup(request=f"gone {instance}", shards=[SHARD], digests=DIGESTS),
            m.PrepareRetrieve(instance=instance, digests=DIGESTS),
        ]
        with self._dealer() as raw:
            incarnation = self._greet(raw)
            for number, step in enumerate(steps[: self._chance.randrange(1, len(steps) + 1)]):
                raw.send_multipart(self._frames(step)(number + 2, incarnation))
                if self._chance.random() < 0.7:
                    raw.recv_multipart()

    def _look(self, made):
        """Wait for what comes, or not."""
        made.settimeout(self._chance.choice((0.001, 0.3)))
        with suppress(OSError):
            made.recv(100)

    def _dealer(self):
        made = self._context.socket(zmq.DEALER)
        made.linger = 0
        made.rcvtimeo = made.sndtimeo = WAIT
        made.rcvhwm = made.sndhwm = self._chance.choice((1, 100))
        made.connect(self._url)
        return made

    def _greet(self, raw):
        raw.send_multipart(self._frames(m.Hello(protocol=m.PROTOCOL_VERSION))(1, ""))
        return wire.decode_reply(raw.recv_multipart())[1].incarnation

    def _frames(self, message):
        body = wire.encode_body(message)
        return lambda uid, incarnation: wire.request_frames(uid, incarnation, 0.0, body)


KINDS = (_Client.storm, _Client.half_greeting, _Client.half_message, _Client.deaf, _Client.vanish)


def _misbehave(client, chance, ended, counts):
    while not ended.is_set():
        kind = chance.choice(KINDS)
        with suppress(OSError):  # a server may well hang up
            kind(client)
            counts[kind.__name__] += 1
    counts["unbroken"] += 1


def main(url, seed):
    ended, counts, chance = threading.Event(), Counter(), random.Random(seed)
    with zmq.Context() as context:
        threads = []
        for _ in range(CLIENTS):
            own = random.Random(chance.getrandbits(64))
            client = _Client(url, context, own)
            threads.append(threading.Thread(target=_misbehave, args=(client, own, ended, counts)))
            threads[-1].start()
        sys.stdin.read()
        ended.set()
        for thread in threads:
            thread.join()
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
