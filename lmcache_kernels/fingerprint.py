"""A 64-bit fingerprint of a chunk's payload that a copy computes in passing.

Let ``w[p]`` be the 32-bit little-endian word number ``p`` of the payload (padding between planes
counts as zero). Then::

    x(p) = p * 0x9E3779B97F4A7C15 mod 2**64            (2**64 divided by the golden ratio, made odd)
    key(p) = (x(p) xor (x(p) >> 32)) or 1
    fingerprint = sum of w[p] * key(p) mod 2**64

A sum has no order, so programs add their parts as they finish; places are places in the payload, so
it says nothing about where blocks lie. A key is odd, so a change inside one word always shows. Other
changes escape with a chance of about 2**-63 where a changed word differs in its lowest bit, and of
2**-32 at worst (words that differ in their highest bit only). It finds accidents, not attackers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY_MULTIPLIER = 0x9E3779B97F4A7C15
KEY_SHIFT = 32
MAX_PAYLOAD = 1 << 34
"""Bytes: the number of a word has 32 bits."""

_MODULUS = 1 << 64

_PIECE_WORDS = 1 << 16
"""Words whose keys are made at a time: 512 KiB, so that they stay in a core's cache."""


def fingerprint(data: memoryview | bytes, place: int = 0) -> int:
    """What ``data`` adds to the fingerprint of a payload in which it begins at byte ``place``."""
    lead = place % 4
    whole = -(-(lead + len(data)) // 4) * 4
    if lead or whole != len(data):
        data = bytes(lead) + bytes(data) + bytes(whole - lead - len(data))
    words = np.frombuffer(data, dtype="<u4")
    first = place // 4
    total = 0
    for start in range(0, len(words), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS].astype(np.uint64)
        places = np.arange(first + start, first + start + len(piece), dtype=np.uint64)
        keys = places * np.uint64(KEY_MULTIPLIER)
        keys = (keys ^ (keys >> np.uint64(KEY_SHIFT))) | np.uint64(1)
        total += int(np.dot(piece, keys))
    return total % _MODULUS


def signed(total: int) -> int:
    """A sum modulo 2**64 as the int64 that holds its bits."""
    total %= _MODULUS
    return total - _MODULUS if total >= _MODULUS >> 1 else total


def unsigned(parts: Iterable[int]) -> int:
    """The fingerprint whose parts, by row, these int64 are."""
    return sum(parts) % _MODULUS
