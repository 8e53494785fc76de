"""What a type checker makes of the public names. Checked by mypy; never run."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import lmcache_kernels
from lmcache_kernels import CacheGroup, KVTransferError, LayoutError, Plane, copy_blocks, plane_of

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
