"""What a type checker makes of the public names. Checked by mypy; never run."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from typing_extensions import assert_type

import lmcache_kernels
import lmcache_kernels.transfer
from lmcache_kernels import (
    CacheGroup,
    KVTransferError,
    LayoutError,
    Plane,
    copy_blocks,
    group_of,
    plane_of,
)
from lmcache_kernels.transfer import (
    ChunkChain,
    EmbeddedCache,
    EngineDrivenContext,
    Observer,
    PeerCopy,
    PeerTarget,
    TransferEvent,
    create_transfer_context,
    open_kv_caches,
    root_digest,
    shard_id,
    wrap_kv_caches,
)
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.kv_groups import KVGroup

cache = torch.zeros(2, 8, 16, 4, 64)
plane = plane_of(cache, "kv block token head dim")
assert_type(plane, Plane)
assert_type(plane_of([cache[0], cache[1]], "kv block token head dim"), Plane)
assert_type(plane.bases, tuple[int, ...])
assert_type(plane.num_blocks, int)
assert_type(plane.device, str)

group = CacheGroup((plane,), block_tokens=16, dtype="float32")
assert_type(group.planes, tuple[Plane, ...])
assert_type(group.block_tokens, int)

ids = range(3)
copy_blocks(plane, ids, plane, [4, 5, 6], max_programs=8)
copy_blocks(plane, (0,), plane, (1,))
lmcache_kernels.copy_blocks(plane, "01", plane, [1, 2])  # type: ignore[arg-type]
copy_blocks(plane, ids, plane, ids, 8)  # type: ignore[call-arg]
plane.width = 3  # type: ignore[misc]

assert_type(lmcache_kernels.__version__, str)
try:
    copy_blocks(plane, [0], plane, [0])
except LayoutError as error:
    as_root: KVTransferError = error
    as_value_error: ValueError = error

# --- the transfer API -----------------------------------------------------------------------------


class Printer:
    def transfer_over(self, event: TransferEvent) -> None:
        assert_type(event.nbytes, int)
        assert_type(event.gb_per_second, float)


observer: Observer = Printer()
names = ChunkChain(root_digest(model="m", chunk_tokens=256), 256).extend([1, 2, 3])
assert_type(names, list[bytes])
with EmbeddedCache(arena_bytes=1 << 20, chunk_tokens=256) as store:
    assert_type(store, EmbeddedCache)
    context = EngineDrivenContext(
        [group],
        chunk_tokens=256,
        shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
        instance=1,
        port=store,
        observer=observer,
    )
    assert_type(context.submit_store(names, [[1], range(3)]).result, Future[int])
    assert_type(context.submit_retrieve(names, [[1]], skip_first_n_tokens=16), Future[int])
    following = context.submit_layered_store(names, [[1]], [[0, 1]])
    assert_type(following.result, Future[int])
    following.saved(1)
    context.submit_store(names, [1, 2])  # type: ignore[list-item]
    either = create_transfer_context(
        [KVGroup.of(cache, "kv block token head dim")],
        "auto",
        chunk_tokens=256,
        part=ShardPart(index=0, count=1),
        port=store,
    )
    assert_type(either.instance, int)
    assert_type(either.submit_store(names, [[1]]).result, Future[int])
    assert_type(either.submit_retrieve(names, [[1]], skip_first_n_tokens=16), Future[int])
    create_transfer_context([group], chunk_tokens=256)  # type: ignore[call-arg, list-item]
    EngineDrivenContext([group], 256)  # type: ignore[call-arg]

with PeerTarget({"layer": cache}) as target:
    assert_type(target.offer, bytes)
    assert_type(target.ready(), bytes)
    with PeerCopy([group], target.offer, lambda tensors: [group_of(tensors, "block dim")]) as copy:
        assert_type(copy.copy([[1]], [range(1)], after=target.ready(), timeout=1.0), bytes)
        assert_type(copy.device, str)
        copy.copy([[1]], [[1]], target.ready())  # type: ignore[call-arg]
        copy.flush(1.0)
    target.wait(b"")
    PeerCopy([group], target.offer, lambda tensors: group_of(tensors, "block dim"))  # type: ignore[arg-type, return-value]

assert_type(
    open_kv_caches(wrap_kv_caches({"layer": cache}).descriptors).tensors, list[torch.Tensor]
)
assert_type(lmcache_kernels.transfer.root_digest(model="m", chunk_tokens=1), bytes)
