"""Chunks whose bytes follow from their names, and prompts that name them.

So whoever reads a chunk can tell a wrong byte without knowing who wrote it, and when.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from lmcache_kernels.transfer.messages import DIGEST_BYTES

if TYPE_CHECKING:
    import random

Words = npt.NDArray[np.uint64]


class Payloads:
    """The payloads of chunks of one size; not for several threads.

    Every word depends on its place and on the name, so neither another chunk nor a piece of this one at
    another place passes for it.

    Args:
        nbytes: a multiple of 32.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        places = blake3(b"places").digest(length=nbytes)
        self._places = np.frombuffer(places, np.uint64).reshape(-1, 4)
        self._scratch = np.empty_like(self._places)

    def write(self, place: memoryview, digest: bytes) -> None:
        """Write the chunk of that name, ``nbytes`` of it, to ``place``."""
        np.bitwise_xor(self._places, _words(digest), out=_words(place).reshape(-1, 4))

    def is_at(self, place: memoryview, digest: bytes) -> bool:
        """Whether the chunk of that name is there, to the last bit."""
        np.bitwise_xor(_words(place).reshape(-1, 4), _words(digest), out=self._scratch)
        return bool(np.array_equal(self._scratch, self._places))


class Prompts:
    """Prompts of equal length, some of them more frequent than others.

    The first half of a prompt is that of its whole family: a system prompt or a document.

    Args:
        chunks: of one prompt.
        count: how many prompts there are.
        families: of how many families.
        skew: 1: Zipf's law; 0: none is more frequent.
    """

    def __init__(self, chunks: int, count: int, families: int, skew: float = 1.0) -> None:
        self._chunks = chunks
        self._families = families
        self._weights = list(itertools.accumulate((rank + 1) ** -skew for rank in range(count)))

    def draw(self, chance: random.Random) -> list[bytes]:
        """The digests of a prompt, drawn by how frequent it is."""
        (number,) = chance.choices(range(len(self._weights)), cum_weights=self._weights)
        return self.digests(number)

    def digests(self, number: int) -> list[bytes]:
        """The digests of prompt ``number``; 0 is the most frequent."""
        shared = self._chunks // 2
        return [
            *_names(f"family {number % self._families}", shared),
            *_names(f"prompt {number}", self._chunks - shared),
        ]


def _names(of: str, count: int) -> list[bytes]:
    packed = blake3(of.encode()).digest(length=DIGEST_BYTES * count)
    return [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]


def _words(place: memoryview | bytes) -> Words:
    return np.frombuffer(place, np.uint64)
