"""Seals: whatever is not exactly what was sealed is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.adapters.tiers.sealing import (
    FORMAT_VERSION,
    MAGIC,
    SEAL_BYTES,
    is_sealed,
    seal,
    sealed_bytes,
)

KEY = (b"s" * 32, b"d" * 32)
SLOT = bytes(range(256)) * 4


def test_the_layout_is_that_of_the_docstring():
    found = seal(KEY, memoryview(SLOT))
    assert len(found) == SEAL_BYTES
    assert found[:8] == MAGIC
    assert int.from_bytes(found[8:12], "little") == FORMAT_VERSION
    assert found[12:16] == bytes(4)
    assert int.from_bytes(found[16:24], "little") == sealed_bytes(found) == len(SLOT)
    # What is written today must be read tomorrow: this never changes within a version.
    assert found[24:].hex() == GOLDEN


def test_what_was_sealed_is_known():
    assert is_sealed(KEY, memoryview(SLOT), seal(KEY, memoryview(SLOT)))


@given(st.integers(0, 8 * (len(SLOT) + SEAL_BYTES) - 1))
def test_a_flipped_bit_anywhere_is_noticed(bit):
    whole = bytearray(SLOT + seal(KEY, memoryview(SLOT)))
    whole[bit // 8] ^= 1 << bit % 8
    view = memoryview(whole)
    assert not is_sealed(KEY, view[: len(SLOT)], view[len(SLOT) :])


@pytest.mark.parametrize(
    "other", [(b"t" * 32, KEY[1]), (KEY[0], b"e" * 32), (KEY[1], KEY[0])], ids=str
)
def test_the_chunk_of_another_name_is_noticed(other):
    assert not is_sealed(other, memoryview(SLOT), seal(KEY, memoryview(SLOT)))


@given(st.integers(0, len(SLOT) - 1))
def test_a_slot_of_another_length_is_noticed(length):
    found = seal(KEY, memoryview(SLOT))
    assert not is_sealed(KEY, memoryview(SLOT)[:length], found)
    assert not is_sealed(KEY, memoryview(SLOT + SLOT[:512]), found)


@given(st.binary(max_size=SEAL_BYTES + 8))
def test_what_is_no_seal_has_no_length(found):
    assert sealed_bytes(found) is None
    assert not is_sealed(KEY, memoryview(SLOT), found)


GOLDEN = "5997b683af6762c730eeaa0d468889d3c20b31fb5903a1a9d26373ac34c9b4ad"
