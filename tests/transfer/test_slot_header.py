"""The bytes in front of a chunk: fixed, and refused when they are another chunk's."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.chunk_layout import MAX_GROUPS, ChunkLayout
from lmcache_kernels.errors import LayoutError, LocalProtocolError, RemoteProtocolError
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES, pack_header, read_header
from lmcache_kernels.transfer.serving.slots import SLOT_ALIGN
from lmcache_kernels.views import group_of

SHARD = bytes(range(32))
DIGEST = bytes(range(100, 132))
SIZE = 0x0102030405
PRINTS = (0xF1F2F3F4F5F6F7F8, 0, 7)


def test_golden_bytes() -> None:
    header = pack_header(SHARD, DIGEST, SIZE, PRINTS)
    assert len(header) == HEADER_BYTES == SLOT_ALIGN == 512
    assert header[:24].hex() == "4c4d434b534c4f5403000000000000000504030201000000"
    assert header[24:56] == SHARD
    assert header[56:88] == DIGEST
    assert header[88:96].hex() == "f8f7f6f5f4f3f2f1"
    assert header[96:104] == bytes(8)
    assert header[104:112].hex() == "0700000000000000"
    assert header[112:] == bytes(400)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_own_header_is_accepted(kind: type) -> None:
    header = kind(pack_header(SHARD, DIGEST, SIZE, PRINTS))
    assert read_header(header, SHARD, DIGEST, SIZE) == (*PRINTS, *(0,) * (MAX_GROUPS - 3))


@pytest.mark.parametrize(
    ("offset", "field"),
    [
        (0, "magic"),
        (8, "format version"),
        (12, "flags"),
        (16, "payload bytes"),
        (55, "shard id"),
        (56, "digest"),
    ],
)
def test_the_differing_field_is_named(offset: int, field: str) -> None:
    header = bytearray(pack_header(SHARD, DIGEST, SIZE, PRINTS))
    header[offset] ^= 0x80
    with pytest.raises(RemoteProtocolError, match=f"slot header, {field}: expected .*, got "):
        read_header(memoryview(header), SHARD, DIGEST, SIZE)


def test_an_erased_or_short_header_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="magic"):
        read_header(bytes(HEADER_BYTES), SHARD, DIGEST, SIZE)
    with pytest.raises(RemoteProtocolError, match="expected 512 bytes, got 511"):
        read_header(pack_header(SHARD, DIGEST, SIZE, PRINTS)[:-1], SHARD, DIGEST, SIZE)


@given(bit=st.integers(0, 88 * 8 - 1), size=st.integers(0, (1 << 64) - 1))
def test_any_flipped_bit_is_refused(bit: int, size: int) -> None:
    header = bytearray(pack_header(SHARD, DIGEST, size, PRINTS))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        read_header(header, SHARD, DIGEST, size)


@pytest.mark.parametrize(
    ("shard", "digest", "size"),
    [
        (SHARD[:-1], DIGEST, 1),
        (SHARD, DIGEST + b"x", 1),
        (SHARD, DIGEST, -1),
        (SHARD, b"", 1 << 64),
    ],
)
def test_wrong_lengths_are_refused(shard: bytes, digest: bytes, size: int) -> None:
    with pytest.raises(LocalProtocolError, match="slot header"):
        pack_header(shard, digest, size, PRINTS)


def test_offsets_match_the_documented_table() -> None:
    header = pack_header(SHARD, DIGEST, SIZE, PRINTS)
    assert struct.unpack_from("<8s", header, 0) == (b"LMCKSLOT",)
    assert struct.unpack_from("<II", header, 8) == (3, 0)
    assert struct.unpack_from("<Q", header, 16) == (SIZE,)


@pytest.mark.parametrize("fingerprint", [-1, 1 << 64])
def test_fingerprints_of_other_sizes_are_refused(fingerprint: int) -> None:
    with pytest.raises(LocalProtocolError, match="64-bit fingerprint"):
        pack_header(SHARD, DIGEST, SIZE, [1, fingerprint])


def test_there_is_room_for_so_many_groups() -> None:
    most = list(range(MAX_GROUPS))
    assert read_header(pack_header(SHARD, DIGEST, SIZE, most), SHARD, DIGEST, SIZE) == tuple(most)
    with pytest.raises(LocalProtocolError, match="at most 48"):
        pack_header(SHARD, DIGEST, SIZE, [*most, 1])
    group = group_of([torch.zeros(2, 4, 2, 1, 8)], "kv block token head dim")
    assert len(ChunkLayout.of([group] * MAX_GROUPS, 4).groups) == MAX_GROUPS
    with pytest.raises(LayoutError, match="groups: expected at most 48, got 49"):
        ChunkLayout.of([group] * (MAX_GROUPS + 1), 4)


def test_a_fingerprint_that_is_not_known_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="64-bit fingerprints"):
        pack_header(SHARD, DIGEST, SIZE, [1, None, 2])
