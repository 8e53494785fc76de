"""The first bytes of a slot say which chunk follows, so that a reader can tell that it is the right
one and whole. The writer puts the header last.

All integers little-endian:

====== ===== =========================================================
offset bytes field
====== ===== =========================================================
0      8     magic, ``LMCKSLOT``
8      4     format version
12     4     flags; none defined, so 0
16     8     payload bytes
24     32    shard id
56     32    digest
88     384   per group, what its part of the payload adds to the fingerprint
             of the whole, 8 bytes each; 0 behind the last group's
472    40    zero
512          payload
====== ===== =========================================================

Pure.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from lmcache_kernels.chunk_layout import MAX_GROUPS
from lmcache_kernels.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER_BYTES = 512
"""Keeps the payload as aligned as the slot."""

MAGIC = b"LMCKSLOT"
FORMAT_VERSION = 3
"""Raised by one whenever a field changes its place or meaning."""

_FIELDS = struct.Struct(f"<8sIIQ32s32s{MAX_GROUPS}Q")
_ID_BYTES = 32


def pack_header(
    shard: bytes, digest: bytes, payload_bytes: int, fingerprints: Sequence[int | None]
) -> bytes:
    """The ``HEADER_BYTES`` in front of a chunk.

    Raises:
        LocalProtocolError: ids that are not 32 bytes, numbers outside 64 bits, too many groups.
    """
    if len(shard) != _ID_BYTES or len(digest) != _ID_BYTES or not 0 <= payload_bytes < 1 << 64:
        raise LocalProtocolError(
            f"slot header: expected ids of {_ID_BYTES} bytes and a 64-bit size, got "
            f"{len(shard)} and {len(digest)} bytes and size {payload_bytes}"
        )
    known = [one for one in fingerprints if one is not None and 0 <= one < 1 << 64]
    if len(fingerprints) > MAX_GROUPS or len(known) < len(fingerprints):
        raise LocalProtocolError(
            f"slot header: expected at most {MAX_GROUPS} 64-bit fingerprints, got {fingerprints}"
        )
    unused = (0,) * (MAX_GROUPS - len(known))
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, 0, payload_bytes, shard, digest, *known, *unused)
    return fields.ljust(HEADER_BYTES, b"\0")


def payload_bytes_of(view: memoryview | bytes) -> int:
    """What a slot says about the size of its payload, which the reader has to check.

    Raises:
        RemoteProtocolError: it is too short to say anything.
    """
    if len(view) < HEADER_BYTES:
        raise RemoteProtocolError(f"slot header: expected {HEADER_BYTES} bytes, got {len(view)}")
    payload_bytes: int = _FIELDS.unpack_from(view)[3]
    return payload_bytes


def read_header(
    view: memoryview | bytes, shard: bytes, digest: bytes, payload_bytes: int
) -> tuple[int, ...]:
    """The fingerprints of :data:`MAX_GROUPS` groups, if ``view`` begins with the header of just this chunk.

    Raises:
        RemoteProtocolError: it does not; the message names the first field that differs.
    """
    if len(view) < HEADER_BYTES:
        raise RemoteProtocolError(f"slot header: expected {HEADER_BYTES} bytes, got {len(view)}")
    names = ("magic", "format version", "flags", "payload bytes", "shard id", "digest")
    expected = (MAGIC, FORMAT_VERSION, 0, payload_bytes, shard, digest)
    found = _FIELDS.unpack_from(view)
    fields, fingerprints = found[:-MAX_GROUPS], found[-MAX_GROUPS:]
    for name, want, got in zip(names, expected, fields, strict=True):
        if want != got:
            raise RemoteProtocolError(
                f"slot header, {name}: expected {_show(want)}, got {_show(got)}"
            )
    return fingerprints


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
