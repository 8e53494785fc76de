"""The last bytes of a chunk that is kept outside: they tell whether it is whole, and which it is. Pure.

All integers little-endian:

====== ===== =======================================================
offset bytes field
====== ===== =======================================================
0      8     magic, ``LMCKSEAL``
8      4     format version
12     4     zero
16     8     bytes of the slot in front of it
24     32    blake3 over the slot, shard id, digest and the fields above
====== ===== =======================================================
"""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey

SEAL_BYTES = 56
MAGIC = b"LMCKSEAL"
FORMAT_VERSION = 1
"""Raised by one whenever a field changes its place or meaning."""

_FIELDS = struct.Struct("<8sIIQ")


def seal(key: ChunkKey, slot: memoryview) -> bytes:
    """The ``SEAL_BYTES`` behind the slot of this chunk."""
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, 0, len(slot))
    shard, digest = key
    hasher = blake3(slot)  # lets other threads run
    for part in (shard, digest, fields):
        hasher.update(part)
    return fields + hasher.digest()


def is_sealed(key: ChunkKey, slot: memoryview, found: bytes | bytearray | memoryview) -> bool:
    """Are these exactly the bytes of this chunk that were sealed?"""
    return hmac.compare_digest(seal(key, slot), found)


def sealed_bytes(found: bytes) -> int | None:
    """How long the slot in front of a seal was, if this is one."""
    if len(found) != SEAL_BYTES:
        return None
    magic, version, zero, nbytes = _FIELDS.unpack_from(found)
    return int(nbytes) if (magic, version, zero) == (MAGIC, FORMAT_VERSION, 0) else None
