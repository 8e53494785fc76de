"""Store blocks of a paged KV cache and load them into other blocks: torch, and nothing that serves.

python examples/transfer.py
"""

import torch

from lmcache_kernels import group_of
from lmcache_kernels.transfer import (
    ChunkChain,
    EmbeddedCache,
    EngineDrivenContext,
    root_digest,
    shard_id,
)

kv = torch.randn(2, 64, 16, 8, 128, device="cuda:0" if torch.cuda.is_available() else "cpu")
names = ChunkChain(root_digest(model="example", chunk_tokens=256), 256).extend(range(512))
with EmbeddedCache(arena_bytes=64 << 20, chunk_tokens=256) as cache:
    context = EngineDrivenContext(
        [group_of(kv, "kv block token head dim")],
        chunk_tokens=256,
        shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
        port=cache,
    )
    stored = context.submit_store(names, [list(range(32))]).result.result(timeout=30)
    loaded = context.submit_retrieve(names, [list(range(63, 31, -1))]).result(timeout=30)
    context.close()
assert stored == loaded == len(names)
assert torch.equal(kv[:, 32:].flip(1), kv[:, :32])
print(f"{stored} chunks stored and loaded on {kv.device}, every byte the same")
