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
88     8     fingerprint of the payload
96     24    reserved; 0
120    392   zero
512          payload
====== ===== =========================================================

Pure.
"""

from __future__ import annotations

import struct

from lmcache_kernels.errors import LocalProtocolError, RemoteProtocolError

HEADER_BYTES = 512
"""Keeps the payload as aligned as the slot."""

MAGIC = b"LMCKSLOT"
FORMAT_VERSION = 2
"""Raised by one whenever a field changes its place or meaning."""

_FIELDS = struct.Struct("<8sIIQ32s32sQ")
_ID_BYTES = 32


def pack_header(shard: bytes, digest: bytes, payload_bytes: int, fingerprint: int) -> bytes:
    """The ``HEADER_BYTES`` in front of a chunk.

    Raises:
        LocalProtocolError: ids that are not 32 bytes, or numbers outside 64 bits.
    """
    if len(shard) != _ID_BYTES or len(digest) != _ID_BYTES or not 0 <= payload_bytes < 1 << 64:
        raise LocalProtocolError(
            f"slot header: expected ids of {_ID_BYTES} bytes and a 64-bit size, got "
            f"{len(shard)} and {len(digest)} bytes and size {payload_bytes}"
        )
    if not 0 <= fingerprint < 1 << 64:
        raise LocalProtocolError(f"slot header: expected a 64-bit fingerprint, got {fingerprint}")
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, 0, payload_bytes, shard, digest, fingerprint)
    return fields.ljust(HEADER_BYTES, b"\0")


def read_header(view: memoryview | bytes, shard: bytes, digest: bytes, payload_bytes: int) -> int:
    """The fingerprint of the payload, if ``view`` begins with the header of just this chunk.

    Raises:
        RemoteProtocolError: it does not; the message names the first field that differs.
    """
    if len(view) < HEADER_BYTES:
        raise RemoteProtocolError(f"slot header: expected {HEADER_BYTES} bytes, got {len(view)}")
    names = ("magic", "format version", "flags", "payload bytes", "shard id", "digest")
    expected = (MAGIC, FORMAT_VERSION, 0, payload_bytes, shard, digest)
    *fields, fingerprint = _FIELDS.unpack_from(view)
    for name, want, got in zip(names, expected, fields, strict=True):
        if want != got:
            raise RemoteProtocolError(
                f"slot header, {name}: expected {_show(want)}, got {_show(got)}"
            )
    return int(fingerprint)


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
