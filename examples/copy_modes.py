"""The ways to copy blocks, one after the other; every one checks its bytes. Runs on a GPU or a CPU.

python examples/copy_modes.py
"""

from __future__ import annotations

import torch

from lmcache_kernels import copy_blocks, group_of, plane_of
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.copying import PreparedCopy, prepare_copy
from lmcache_kernels.fingerprint import fingerprint, unsigned
from lmcache_kernels.head_slices import head_slices
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.pages import pages_per_block, split_ids

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
LAYERS, BLOCKS, TOKENS, HEADS, DIM = 2, 32, 16, 8, 64


def cache(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, dtype=torch.float16, device=DEVICE) for _ in range(LAYERS)]


def wait() -> None:
    """Copies on a GPU are queued on the current stream."""
    if DEVICE != "cpu":
        torch.cuda.current_stream().synchronize()


# Two engines of one model: head-major and token-major. Keep tensors alive while planes are in use.
hnd, nhd = cache(2, BLOCKS, HEADS, TOKENS, DIM), cache(2, BLOCKS, TOKENS, HEADS, DIM)
pages, others = group_of(hnd, "kv block head token dim"), group_of(nhd, "kv block token head dim")
(source,), (target,) = pages.planes, others.planes

# Several chunks in one call. Block i of chunk c has the id c * blocks_per_chunk + i.
layout = ChunkLayout.of([pages], chunk_tokens=64)
memory = torch.zeros(3, layout.nbytes, dtype=torch.uint8, device=DEVICE)
((chunks,),) = layout.planes_at(memory.data_ptr(), DEVICE, chunks=3)
blocks = [5, 1, 6, 0, 9, 2, 7, 3, 11, 4, 8, 10]
gather = PreparedCopy([[(chunks, source)]], chunk_side="dst")  # once; ids every time
sums = torch.zeros(3, gather.plan.rows, dtype=torch.int64, device=DEVICE)  # zero before every call
gather.copy(range(12), blocks, sums=sums)
wait()
print("three chunks of", layout.nbytes, "bytes")

# Each row's part of a chunk's fingerprint came with the copy. The host finds the same in the bytes.
for number, parts in enumerate(sums.tolist()):
    assert unsigned(parts) == fingerprint(memory[number].cpu().numpy().data)
print("fingerprints agree")

# Back into other blocks and the other layout, some left out, from the middle of chunk 0 to chunk 1.
before = nhd[0].clone()
copy_blocks(target, [20, ABSENT, 22], chunks, [2, 3, 4])
wait()
assert torch.equal(nhd[1][:, [20, 22]], hnd[1][:, [6, 9]].transpose(2, 3))
assert torch.equal(nhd[0][:, 21], before[:, 21])
print("chunks to blocks, one left out")

# Token slots: block * block_tokens + token, on both sides.
copy_blocks(target.by_token(), [16 * 30 + 3, 16 * 31], source.by_token(), [16 * 4 + 15, 16 * 5])
wait()
assert torch.equal(nhd[0][:, 30, 3], hnd[0][:, 4, :, 15])
print("single tokens")

# Heads: rank 1 of 2 collects its four heads from chunks that four ranks stored, two heads each.
mine = plane_of(half := cache(2, BLOCKS, TOKENS, HEADS // 2, DIM), "kv block token head dim")
for part in head_slices(HEADS, tp=2, rank=1, stored_tp=4):
    stored = source.narrow_heads(part.rank * 2, 2)  # what that rank's chunk holds
    copy_blocks(
        mine.narrow_heads(part.here, part.count),
        [0, 1],
        stored.narrow_heads(part.start, part.count),
        [5, 1],
    )
wait()
assert torch.equal(half[0][:, [0, 1]], hnd[0][:, [5, 1], HEADS // 2 :].transpose(2, 3))
print("heads for another tensor parallelism")

# Several groups with their own blocks, in one launch.
latent = cache(BLOCKS, TOKENS, 576)
copy_of_latent = [torch.zeros_like(layer) for layer in latent]
both = PreparedCopy(
    [
        [(target, source)],
        [(plane_of(copy_of_latent, "block token dim"), plane_of(latent, "block token dim"))],
    ]
)
both.copy_groups([([0, 1], [2, 3]), ([7], [8])])
wait()
assert torch.equal(copy_of_latent[1][7], latent[1][8])
print("two groups at once")

# A scheduler's block of 64 tokens that its attention kernel keeps as pages of 16.
ratio = pages_per_block(64, TOKENS)
prepare_copy(target, source, max_programs=16).copy(
    split_ids([1, 0], ratio), split_ids([3, 5], ratio)
)
wait()
assert torch.equal(nhd[0][:, 4:8], hnd[0][:, 12:16].transpose(2, 3))
print("blocks of several pages, on at most 16 programs")
