"""Store a paged KV cache of one layout and load it into another, with the cache in this process."""

from __future__ import annotations

import torch

from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import ChunkChain, root_digest, shard_id
from lmcache_kernels.views import group_of

CHUNK, LAYERS = 256, 4
tokens = list(range(1024))
names = ChunkChain(root_digest(model="example", chunk_tokens=CHUNK), CHUNK).extend(tokens)

token_major = [torch.randn(2, 96, 16, 8, 64) for _ in range(LAYERS)]
head_major = [torch.zeros(96, 2, 8, 16, 64) for _ in range(LAYERS)]
engines = [
    group_of(token_major, "kv block token head dim"),
    group_of(head_major, "block kv head token dim"),
]

with EmbeddedCache(arena_bytes=64 << 20, chunk_tokens=CHUNK) as cache:
    contexts = [
        EngineDrivenContext(
            [group],
            chunk_tokens=CHUNK,
            shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
            port=cache,
        )
        for group in engines
    ]
    stored = contexts[0].submit_store(names, [list(range(64))]).result.result(30)
    loaded = contexts[1].submit_retrieve(names, [list(range(95, 31, -1))]).result(30)
    for context in contexts:
        context.close()

assert stored == loaded == len(names)
for layer in range(LAYERS):
    for block in range(64):
        there = head_major[layer][95 - block].transpose(1, 2)
        assert torch.equal(there, token_major[layer][:, block])
print(f"stored {stored} chunks token-major, loaded {loaded} head-major, every byte the same")
