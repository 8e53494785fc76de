"""What engines see of a server that drains: a miss, a chunk that is not stored, and never a wrong byte."""

from __future__ import annotations

import signal

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk
from serverkit import logged_server
from transfer_suite import CHUNK_TOKENS, load, names, store

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.errors import RemoteError
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.messages import Done, EndSession, Found, Lookup
from lmcache_kernels.views import group_of

CHUNKS = 20
ARGUMENTS = ("--chunk-size", str(CHUNK_TOKENS), "--drain-timeout-seconds", "600")


class Engine:
    """A worker with twice as many chunks' blocks as it stores, and a scheduler."""

    def __init__(self, url):
        self.cache = make_cache(BY_NAME["kv_first_nhd"], blocks=4 * CHUNKS, device="cpu")
        self.cache.fill_random(1)
        group = group_of(self.cache.tensors, self.cache.axes)
        self._connection = connect(url, [group], chunk_tokens=CHUNK_TOKENS)
        self.context = self._connection.__enter__()
        self.scheduler = CacheClient(url)
        self.scheduler.wait_ready(20)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.scheduler.close()
        self._connection.__exit__(None, None, None)

    def ask(self, request):
        return self.scheduler.request(request, 20)

    def lookup(self, digests):
        shard = shard_id(self.context.layout.fingerprint, index=0, count=1)
        return self.ask(Lookup(request="r", shards=[shard], digests=b"".join(digests)))

    def load_elsewhere(self, digests):
        """Whether all come back in other blocks as they were stored."""
        count = len(digests)
        there = list(range(2 * CHUNKS, 2 * CHUNKS + 2 * count))
        if load(self.context, digests, there) != count:
            return False
        here = oracle_chunk(self.cache, list(range(2 * count)))
        return torch.equal(oracle_chunk(self.cache, there), here)


def test_who_was_told_of_a_hit_loads_it_and_nothing_new_is_stored():
    with logged_server(*ARGUMENTS) as server, Engine(server.url) as engine:
        known, new = names(3), names(1)
        assert store(engine.context, known, list(range(6))) == 3
        assert engine.lookup(known).result(30) == Found(chunks=3)
        server.send(signal.SIGTERM)
        server.wait_log("ending in")
        refused = engine.context.submit_store(new, [[8, 9]]).result.exception(30)
        assert isinstance(refused, RemoteError)
        assert refused.code == "draining"
        assert engine.lookup(known).exception(30).code == "draining"
        assert engine.load_elsewhere(known)
        assert engine.ask(EndSession(request="r")).result(30) == Done()
        assert server.wait() == 0


@pytest.mark.parametrize("round_", range(3))
def test_what_was_stored_is_in_the_tier_when_the_server_has_ended(round_, tmp_path):
    tier = ("--l2-tier", f"file://{tmp_path}/tier")
    digests = names(CHUNKS)
    with logged_server(*ARGUMENTS, *tier) as server, Engine(server.url) as engine:
        assert store(engine.context, digests, list(range(2 * CHUNKS))) == CHUNKS
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert "lost" not in server.log()
    with logged_server(*ARGUMENTS, *tier) as server, Engine(server.url) as engine:
        assert engine.lookup(digests).result(30) == Found(chunks=CHUNKS)
        assert engine.load_elsewhere(digests)
