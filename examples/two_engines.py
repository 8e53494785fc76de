"""Two engines with other page layouts share what one of them stored, through a server process."""

from __future__ import annotations

import torch

from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.transfer.keys import ChunkChain, root_digest
from lmcache_kernels.views import group_of

names = ChunkChain(root_digest(model="example", chunk_tokens=256), 256).extend(range(1024))
head_major = [torch.randn(96, 8, 16, 128) for _ in range(4)]  # block, head, token, K|V
token_major = [torch.zeros(96, 16, 8, 128) for _ in range(4)]  # block, token, head, K|V

with spawn_server(size_gb=0.1, chunk_size=256) as server:
    with connect(server.url, [group_of(head_major, "block head token dim")]) as first:
        stored = first.submit_store(names, [list(range(64))]).result.result(30)
    with connect(server.url, [group_of(token_major, "block token head dim")]) as second:
        loaded = second.submit_retrieve(names, [list(range(95, 31, -1))]).result(30)

assert stored == loaded == len(names)
for layer in range(4):
    for block in range(64):
        assert torch.equal(token_major[layer][95 - block].transpose(0, 1), head_major[layer][block])
print(f"stored {stored} chunks head-major, loaded {loaded} token-major, every byte the same")
