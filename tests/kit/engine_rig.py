"""An engine's cache, a cache server whose answers can be held back, and a context between them."""

from __future__ import annotations

import secrets

import torch
from cachekit import BY_NAME, make_cache, oracle_chunk
from gate_port import GatePort
from held_mover import HeldMover

from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.views import group_of

CHUNK = 8  # two blocks of four tokens


class Rig:
    """An engine's cache, a cache server behind a gate, and a context between them."""

    def __init__(self, closing, *, cache=None, chunk=CHUNK, mover=HeldMover, **options):
        self._closing = closing
        self._make = mover
        self._chunk = chunk
        self.cache = cache or make_cache(BY_NAME["kv_first_nhd"], blocks=32)
        self.cache.fill_random(1)
        self.port = GatePort(self.new_server())
        self.context = EngineDrivenContext(
            [group_of(self.cache.tensors, self.cache.axes)],
            chunk_tokens=chunk,
            shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
            instance=secrets.randbits(63),
            port=self.port,
            mover=self._make_mover,
            **options,
        )
        closing.callback(self.context.close)
        if isinstance(self.mover, HeldMover):
            closing.callback(self.mover.let_go)
        closing.callback(self.port.let_go)

    def _make_mover(self, groups, layout):
        self.mover = self._make(groups, layout)
        return self.mover

    def new_server(self):
        server = EmbeddedCache(1 << 20, chunk_tokens=self._chunk)
        self._closing.callback(server.close)
        return server

    def restart_server(self):
        """Another one with nothing in it, in the place of this one, which is gone."""
        self.port.inner.close()
        self.port.inner = self.new_server()

    def store(self, digests, ids):
        return self.context.submit_store(digests, [ids])

    def load(self, digests, ids, **options):
        return self.context.submit_retrieve(digests, [ids], **options)

    def stats(self):
        return self.port.inner.stats()

    def fill_blocks(self, ids, value):
        for tensor in self.cache.tensors:
            tensor[:, ids] = value

    def same(self, ids, others):
        return torch.equal(oracle_chunk(self.cache, ids), oracle_chunk(self.cache, others))
