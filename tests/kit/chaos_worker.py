"""A worker as another process: it looks up, loads, verifies and stores without end, and tells of it.

One line of JSON for each call. Whatever disturbs it, it goes on by itself; only what can never be right is
a violation. Ends when standard input does.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from contextlib import suppress

import torch

from bench.workers.payloads import Payloads, Prompts
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.errors import KVTransferError, PeerGone
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.context_factory import create_transfer_context
from lmcache_kernels.transfer.kv_groups import KVGroup
from lmcache_kernels.transfer.messages import EndSession, Lookup

CHUNK_TOKENS = 8
BLOCK_TOKENS, HEADS, DIM = 4, 2, 1024
CHUNKS = 16
"""Of one prompt."""

BLOCKS = CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
CHUNK_BYTES = 2 * HEADS * CHUNK_TOKENS * DIM * 2
PROMPTS, FAMILIES = 120, 40
POISON = 0x5A5A
TIMEOUT, COPY_TIMEOUT = 15.0, 30.0
"""Seconds. A server that loads torch, because somebody asks it to copy, answers nobody for a part of a second;
on a busy machine that can be several."""

THINK = 0.02
"""Seconds at most between prompts, so that there is something left of the processors for who starts."""

BOUND = 2 * COPY_TIMEOUT + 2 * TIMEOUT + 5.0
"""Seconds in which any call ends: a registration, a copy, a question whether it is over, a commit, and
something for a machine that is busy."""


class ChaosWorker:
    """Made at once; connected when there is a server.

    Args:
        url: of the server, now or later.
        instance, mode: of the worker.
        seed: of what it asks for.
    """

    def __init__(self, url, *, instance, mode, seed):
        self.prompts = Prompts(CHUNKS, PROMPTS, FAMILIES, skew=0.3)
        self._chance = random.Random(seed)
        self._payloads = Payloads(CHUNK_BYTES)
        self._requests = (f"{instance}-{time.monotonic_ns()}-{n}" for n in itertools.count())
        self._client = CacheClient(
            url, instance_id=instance, ping_interval=0.5, chunk_tokens=CHUNK_TOKENS
        )
        # Blocks of a store, and behind them those of a load; in a random order.
        self._cache = torch.full((2, 2 * BLOCKS, HEADS, BLOCK_TOKENS, DIM), POISON).to(torch.int16)
        order = list(range(2 * BLOCKS))
        self._chance.shuffle(order)
        self._source, self._target = order[:BLOCKS], order[BLOCKS:]
        copying = {"copy_timeout": COPY_TIMEOUT} if mode == "lmcache_driven" else {}
        self._context = create_transfer_context(
            [KVGroup.of(self._cache, "kv block head token dim")],
            mode,
            chunk_tokens=CHUNK_TOKENS,
            part=ShardPart(),
            instance=instance,
            port=self._client,
            timeout=TIMEOUT,
            **copying,
        )

    def events(self):
        """What happens while it serves one prompt after the other, without end."""
        while True:
            if self._client.incarnation is None:
                with suppress(PeerGone):
                    self.wait_ready(0.5)
                yield {"waits": True}
                continue
            digests = self.prompts.draw(self._chance)
            yield from self.read(digests, store=True)

    def read(self, digests, *, store=False):
        """What happens while it loads what there is of a prompt, and stores the rest if it is to.

        An event is a dict: ``begins``, a load or store, or ``call``, ``seconds``, ``server`` (which one was there from the begin to the
        end), ``chunks`` or ``error``, and ``violation`` if that cannot be right.
        """
        request = next(self._requests)
        lookup = Lookup(request=request, shards=[self._context.shard], digests=b"".join(digests))
        found = self._call("lookup", lambda: self._ask(lookup).chunks)
        yield found
        offered = found.get("chunks", 0)
        if offered:
            yield {"begins": "load"}
            loaded = self._call("load", lambda: self._load(digests[:offered]))
            same = loaded["server"] is not None and loaded["server"] == found["server"]
            if same and loaded.get("chunks") != offered:
                loaded["violation"] = f"offered {offered} chunks"
            wrong = self._wrong(digests[: loaded.get("chunks", 0)])
            if wrong:
                loaded["violation"] = f"wrong chunks: {wrong}"
            yield loaded
        if store and offered < len(digests):
            yield {"begins": "store"}
            yield self._call("store", lambda: self._store(digests[offered:]))
        yield self._call("end session", lambda: self._ask(EndSession(request=request)) and 0)

    def close(self):
        self._context.close()
        self._client.close()

    @property
    def incarnation(self):
        """Of the server that it knows; None: there is none."""
        return self._client.incarnation

    def wait_ready(self, timeout):
        self._client.wait_ready(timeout)

    def _call(self, name, function):
        before, began = self._client.incarnation, time.monotonic()
        event = {"call": name}
        try:
            event["chunks"] = function()
        except Exception as error:
            event["error"] = f"{type(error).__name__}: {error}"
            if not isinstance(error, KVTransferError):
                event["violation"] = "an error of no kind that is ours"
        seconds = event["seconds"] = time.monotonic() - began
        event["server"] = before if before == self._client.incarnation else None
        if event["server"] and "error" in event:
            event["violation"] = "an error while the server was there"
        elif seconds > BOUND:
            event["violation"] = f"it took {seconds:.1f} s"
        return event

    def _ask(self, message):
        return self._client.request(message, TIMEOUT).result(BOUND)

    def _store(self, digests):
        blocks = self._source[: 2 * len(digests)]
        payload = bytearray(CHUNK_BYTES * len(digests))
        for index, digest in enumerate(digests):
            self._payloads.write(self._part(payload, index), digest)
        values = torch.frombuffer(payload, dtype=torch.int16)
        self._cache[:, blocks] = values.view(len(blocks), *self._shape()).movedim(1, 0)
        return self._context.submit_store(digests, [blocks]).result.result(BOUND)

    def _load(self, digests):
        blocks = self._target[: 2 * len(digests)]
        self._cache[:, self._target] = POISON
        return self._context.submit_retrieve(digests, [blocks]).result(BOUND)

    def _wrong(self, digests):
        """Names of those that the blocks of the last load do not hold."""
        blocks = self._target[: 2 * len(digests)]
        values = self._cache[:, blocks].movedim(0, 1).contiguous()
        payload = values.numpy().tobytes()
        return [
            digest.hex()[:16]
            for index, digest in enumerate(digests)
            if not self._payloads.is_at(self._part(payload, index), digest)
        ]

    def _shape(self):
        return (2, HEADS, BLOCK_TOKENS, DIM)

    def _part(self, payload, index):
        return memoryview(payload)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def main(url, options):
    worker = ChaosWorker(url, **options)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    thinking = random.Random(0)
    for event in worker.events():
        if ended.wait(thinking.uniform(0.0, THINK) if event.get("call") == "end session" else 0.0):
            break
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
