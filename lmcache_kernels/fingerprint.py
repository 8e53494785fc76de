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

_PIECE_WORDS = 1 << 15
"""Words whose keys are made at a time: 256 KiB of them stay in a core's cache."""

_STEPS = np.arange(_PIECE_WORDS, dtype=np.uint64) * np.uint64(KEY_MULTIPLIER)
"""What the words of a piece add to the x of its first."""


def fingerprint(data: memoryview | bytes, place: int = 0) -> int:
    """What ``data`` adds to the fingerprint of a payload in which it begins at byte ``place``."""
    lead = place % 4
    whole = -(-(lead + len(data)) // 4) * 4
    if lead or whole != len(data):
        data = bytes(lead) + bytes(data) + bytes(whole - lead - len(data))
    words = np.frombuffer(data, dtype="<u4")
    total = 0
    for start in range(0, len(words), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        first = (place // 4 + start) * KEY_MULTIPLIER % _MODULUS
        keys = _STEPS[: len(piece)] + np.uint64(first)
        keys ^= keys >> np.uint64(KEY_SHIFT)
        keys |= np.uint64(1)
        total += int(np.dot(piece.astype(np.uint64), keys))
    return total % _MODULUS


def signed(total: int) -> int:
    """A sum modulo 2**64 as the int64 that holds its bits."""
    total %= _MODULUS
    return total - _MODULUS if total >= _MODULUS >> 1 else total


def unsigned(parts: Iterable[int]) -> int:
    """The fingerprint whose parts, by row, these int64 are."""
    return sum(parts) % _MODULUS
